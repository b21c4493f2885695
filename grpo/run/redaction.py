"""Secrets taken out of everything a run writes or sends: by the name of a setting, by the look of a value, by what the
environment holds under such a name.

A name is a secret's by its words: `password` anywhere, `key`, `pass`, `pat`, `pw` or `token` at its end, unless the one
before says that it is none (`sort_key`, `eos_token`), or the last one that it is about a secret (`password_file`). What
is a path is none: it must still be found when the run goes on.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

HIDDEN = "[redacted]"

_SHORTEST = 8
"""Shorter values are not searched for in other text: `auth: yes` must not blank every yes."""
_NO_SECRETS = {"undefined", "not-needed", "changeme", "localhost", "development", "production", "password"}
"""Nor are these, which stand for one."""

# --- names ------------------------------------------------------------------------------------------------------------

_ANYWHERE = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "passcode", "apikey", "apikeys", "creds",
    "credential", "credentials",
}  # fmt: skip
_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("account", "key")}
_LAST = {"auth", "authorization", "bearer", "cookie", "cookies", "jwt", "pass", "pw", "pwd", "pat", "token"}
_LAST_OF_SEVERAL = {"key", "keys", "pat"}
_GLUED = re.compile(
    r"(password|passwd|passphrase|secret|(?<!de)token|(db|ssh|pg|my|sql|root|user|ftp|smtp|redis)pass"
    r"|(api|access|secret|private|auth|ssh|account|client)keys?)$"
)
"""PGPASSWORD, authtoken, SSHPASS, ACCESSKEY."""
_PLAIN = {
    # `eos_token` names a piece of text, `hf_token` opens a door.
    "token": "pad eos bos unk sep cls mask stop start end image video audio per think first last next new special tool"
    " begin extra prompt decoder eot sot boi eoi forced placeholder reasoning detoken",
    "key": "sort group cache primary foreign partition public column row dict json map metric reward prompt answer obs"
    " observation observations state action info render image images pixel pixels goal data dataset index item object"
    " field feature label target input output text message messages content role id name hash lookup join unique hot"
    " short arrow left right up down any query kv metrics per value attention order by on",
    "pass": "forward backward one two single multi first second by high low band all render pre post min max per",
}
_PLURAL = {"access", "api", "auth", "bearer", "bot", "github", "hf", "hub", "refresh", "session"}
"""`access_tokens` are secrets; `max_tokens` are counted."""
_ABOUT = {
    "algorithm", "cache", "class", "column", "config", "count", "dir", "directory", "domain", "enabled", "endpoint",
    "env", "expires", "expiry", "field", "file", "folder", "format", "helper", "home", "host", "len", "length", "limit",
    "max", "method", "min", "mode", "module", "name", "path", "paths", "policy", "port", "provider", "required", "size",
    "sock", "socket", "timeout", "ttl", "type", "var", "version",
}  # fmt: skip
_PLACES = {"PWD", "OLDPWD"}
"""Of the shell. In lower case, `pwd` is a password."""


@lru_cache(4096)
def names_a_secret(name: str) -> bool:
    """Whether a setting, option or variable of this name holds a secret; `judge.api_key` is an api_key."""
    words = _words(name)
    if not words or name in _PLACES or words[-1] in _ABOUT:
        return False
    last, before = words[-1], "".join(_words(name.rpartition(".")[2])[-2:-1])
    if _ANYWHERE & set(words) or (last == "tokens" and before in _PLURAL):
        return True
    if any(pair in _PAIRS for pair in pairwise(words)):
        return True
    if before in _PLAIN.get({"keys": "key"}.get(last, last), "").split():
        return False
    return last in _LAST or (bool(before) and last in _LAST_OF_SEVERAL) or bool(_GLUED.search(last))


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in re.split(r"[^A-Za-z0-9]+", spaced.lower()) if word]


# --- text -------------------------------------------------------------------------------------------------------------

_LOOKS = re.compile(
    r"""
      sk-[A-Za-z0-9_-]{16,} | hf_[A-Za-z0-9]{16,} | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{16,}
    | glpat-[\w-]{16,} | xox[abprs]-[\w-]{10,} | AKIA[0-9A-Z]{16} | AIza[\w-]{30,} | wandb_v1_\w{16,}
    | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+ | (?<=[Bb]earer\ )\S{8,} | (?<=[Bb]asic\ )[A-Za-z0-9+/=]{8,}
    | -----BEGIN[A-Z ]*PRIVATE\ KEY-----.*?(?:-----END[A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_USER = re.compile(r"(?<=://)(?:[^/\s:@\"']*:[^/\s\"']+|(?<=https://)[^/\s@\"']{8,}|(?<=http://)[^/\s@\"']{8,})(?=@)")
"""Name and password in an address, or the token that stands there alone."""
_QUERY = re.compile(r"(^|[?&;#\s])([A-Za-z_][\w.\-]*)=([^&;#\s\"'<>\\]+)")
_IN_A_QUERY = {"key", "sig", "signature"}
"""Names that are secrets behind ? and &, and elsewhere not."""
_NAME = re.compile(r"-{0,2}[A-Za-z_][\w.\-]*")
_SAID = re.compile(r"""([A-Za-z_][\w.\-]*)(["']?\s*=\s*["']?|["']\s*:\s*["']?|:\s+["']?)([^\s"',{}\[\]&]+)""")
"""`name=value`, `name: value` and `"name":"value"`, inside a word of a command line."""


def _in_text(text: str) -> str:
    """Without what looks like a secret, wherever it comes from."""
    if "://" in text:
        text = _USER.sub(HIDDEN, text)
    if "=" in text:
        text = _QUERY.sub(lambda found: f"{found[1]}{found[2]}={HIDDEN}" if _asks(*found.groups()) else found[0], text)
    return _LOOKS.sub(HIDDEN, text)


def _asks(mark: str, name: str, value: str) -> bool:
    """Whether `?name=value` tells a secret."""
    in_a_query = mark in ("?", "&") and (name.lower() in _IN_A_QUERY or name.lower().endswith("-signature"))
    return (in_a_query or names_a_secret(name)) and not _is_place(value)


def _carried(text: str) -> Iterable[str]:
    """Passwords and tokens inside of an address."""
    if "://" in text:
        for found in _USER.findall(text):
            password = found.partition(":")[2] or found
            yield from (password, unquote(password))
        yield from (found[2] for found in _QUERY.findall(text) if _asks(*found))


# --- a run's own ------------------------------------------------------------------------------------------------------


class Redactor:
    """Knows the secrets of one run and takes them out of text and trees of settings."""

    def __init__(self, config: Any = None, argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        self._known: list[str] = []
        self.learn(_variables(environ or {}))
        self.learn(config)
        self._keep(value for _, value in _argv_secrets(argv))
        self._keep(value for word in argv for value in _carried(word))
        self._keep(value for word in argv for name, _, value in _SAID.findall(word) if names_a_secret(name))

    def learn(self, config: Any) -> None:
        """Take note of the secrets in a tree of settings."""
        self._keep(_secrets_of(config))

    def text(self, text: str) -> str:
        """`text` with every known or recognisable secret replaced."""
        for value in self._known:
            text = text.replace(value, HIDDEN)
        return _in_text(text)

    def tree(self, tree: Any) -> Any:
        """Nested dicts and lists with secrets replaced, by name of the key and by value."""
        if isinstance(tree, Mapping):
            return {
                self.text(str(key)): self._hidden(value) if names_a_secret(str(key)) else self.tree(value)
                for key, value in tree.items()
            }
        if isinstance(tree, list | tuple):
            return [self.tree(item) for item in tree]
        return self.text(tree) if isinstance(tree, str) else tree

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command line with the values of secret options replaced."""
        hidden = {place: value for place, value in _argv_secrets(argv) if not _is_place(value)}
        cleaned = [word[: len(word) - len(hidden[i])] + HIDDEN if i in hidden else word for i, word in enumerate(argv)]
        return [self.text(_SAID.sub(_unsaid, word)) for word in cleaned]

    def _hidden(self, value: Any) -> Any:
        """A value under a secret name, and all that lies in it; nothing, yes and no say nothing."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._hidden(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(item) for item in value]
        says_nothing = value is None or value == "" or isinstance(value, bool)
        return value if says_nothing or (isinstance(value, str) and _is_place(value)) else HIDDEN

    def _keep(self, values: Iterable[str]) -> None:
        found = {value for value in values if len(value) >= _SHORTEST and value.lower() not in _NO_SECRETS}
        found = {value for value in found if not _is_place(value)} | {*self._known}
        self._known = sorted(found, key=len, reverse=True)


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Variables as settings; those that hold JSON, as service accounts do, opened."""

    def opened(value: str) -> Any:
        try:
            return json.loads(value) if value[:1] in ("{", "[") else value
        except (ValueError, RecursionError):
            return value

    return {name: opened(value) for name, value in environ.items()}


def _is_place(value: str) -> bool:
    """Whether a value is a path: the shell's, a socket's, that of a file with a key in it."""
    expanded = os.path.expanduser(value)
    top = os.path.join(os.sep, *expanded.split(os.sep)[1:2])
    return os.path.isabs(expanded) and ((top != os.sep and os.path.isdir(top)) or os.path.exists(expanded))


def _secrets_of(tree: Any, under: bool = False) -> Iterable[str]:
    """Every value under a secret name, and what addresses carry."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _secrets_of(value, under or names_a_secret(str(key)))
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _secrets_of(item, under)
    elif under and tree is not None and not isinstance(tree, bool):
        yield tree.decode(errors="replace") if isinstance(tree, bytes) else str(tree)
    elif isinstance(tree, str):
        yield from _carried(tree)


def _unsaid(found: re.Match[str]) -> str:
    secret = names_a_secret(found[1]) and found[3] not in ("true", "false") and not _is_place(found[3])
    return found[1] + found[2] + HIDDEN if secret else found[0]


def _argv_secrets(argv: Sequence[str]) -> Iterable[tuple[int, str]]:
    """(position, secret at its end) for `--api-key X`, `--api-keys X Y`, `--api-key=X`, `--set tracker.api_key=X`."""
    for i, word in enumerate(argv):
        parts = word.split("=")
        named = next(
            (n for n, part in enumerate(parts[:-1], 1) if _NAME.fullmatch(part) and names_a_secret(part)), None
        )
        if named is not None:
            yield i, "=".join(parts[named:])
        elif len(parts) == 1 and word.startswith("-") and names_a_secret(word):
            several = word.endswith("s")
            for place, value in enumerate(argv[i + 1 : None if several else i + 2], i + 1):
                if value.startswith("--"):
                    break
                yield place, value
