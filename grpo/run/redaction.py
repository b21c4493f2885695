"""Secrets taken out of everything a run writes or sends: by the name of a setting, by the look of a value, by what the
environment holds under such a name.

A name is a secret's by its words: `password` anywhere, `key`, `pass`, `pat` or `token` at its end behind a word that
says whose (`hf_token`, but neither `door_key` nor `eos_token`), unless the last one says that it is about a secret
(`password_file`). A number or the place of its use at the end changes nothing (`GITHUB_TOKEN_PROD_2`). Under any other
`…_key` only what looks random is one; numbers, yes and no never are. What is a path is none: it must still be found
when the run goes on.
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
_LAST = {"auth", "authorization", "bearer", "cookie", "cookies", "jwt", "pw", "pwd"}
_OPENING = {"key", "keys", "pass", "pat", "token"}
"""Secrets where the word before says whose; alone, `pass` and `token` are."""
_WHOSE = {
    "access", "account", "admin", "anthropic", "api", "auth", "aws", "azure", "bearer", "bitbucket", "bot",
    "client", "cloudflare", "cohere", "comet", "csrf", "databricks", "datadog", "deepl", "deepseek", "deploy",
    "discord", "docker", "encryption", "fireworks", "gcp", "gemini", "gh", "git", "github", "gitlab", "google",
    "groq", "heroku", "hf", "hub", "huggingface", "kaggle", "langsmith", "license", "login", "master", "mistral",
    "mlflow", "neptune", "ngrok", "notion", "npm", "nvidia", "oauth", "openai", "openrouter", "perplexity",
    "personal", "private", "pypi", "refresh", "replicate", "runpod", "secret", "sendgrid", "sentry", "service",
    "session", "signing", "slack", "ssh", "stripe", "swanlab", "telegram", "together", "twilio", "vault", "wandb",
    "webhook", "xai",
}  # fmt: skip
_WHOSE_PASS = {
    "database", "db", "ftp", "mail", "mongo", "my", "mysql", "pg", "postgres", "proxy", "redis", "root", "smtp",
    "sql", "sudo", "user",
}  # fmt: skip
"""`redis_pass` opens a door, a `redis_key` is a name in it."""
_AFTER = {
    "prod", "production", "dev", "development", "live", "test", "testing", "staging", "stage", "read", "write",
    "readonly", "ro", "rw", "default", "old", "backup", "local", "ci",
}  # fmt: skip
"""Behind a secret's name these say where it is used."""
_GLUED = re.compile(
    r"(password|passwd|passphrase|secret|(?<!de)token|(db|ssh|pg|my|sql|root|user|ftp|smtp|redis)pass"
    r"|(api|access|secret|private|auth|ssh|account|client)keys?)$"
)
"""PGPASSWORD, authtoken, SSHPASS, ACCESSKEY."""
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
    last, before = words[-1], "".join(words[-2:-1])
    if _ANYWHERE & set(words) or any(pair in _PAIRS for pair in pairwise(words)):
        return True
    if last == "tokens":
        return before in _PLURAL
    if last in _OPENING:
        alone = len(_words(name.rpartition(".")[2])) == 1 and (last == "token" or name.lower().endswith("pass"))
        return alone or before in _WHOSE or (last == "pass" and before in _WHOSE_PASS)
    return last in _LAST or bool(_GLUED.search(last)) or (before in _OPENING and last in _WHOSE)


@lru_cache(4096)
def _may_name_one(name: str) -> bool:
    """Whether a secret may stand under a name that others use too: `my_key`. Its value tells."""
    words = _words(name)
    return len(words) > 1 and (words[-1] in _OPENING or (words[-1] == "mode" and bool(_ANYWHERE & set(words))))


def _tells(name: str, value: Any) -> bool:
    """Whether a secret stands under this name."""
    return names_a_secret(name) or (isinstance(value, str) and _may_name_one(name) and _looks_random(value))


def _looks_random(value: str) -> bool:
    """Whether a setting is written as people do not write."""
    return _takes_turns(value) and bool(re.fullmatch(r"[\w+/=.-]{16,}", value))


def _may_be_one(value: str) -> bool:
    """The same of a variable, of any length; `gsm8k-main` and `Qwen2.5-0.5B` are names."""
    unbroken = re.search("[A-Za-z0-9]{20}", value) and re.search("[A-Za-z]", value) and re.search("[0-9]", value)
    return _takes_turns(value) or bool(unbroken)


def _takes_turns(value: str) -> bool:
    """Letters and digits in turn."""
    return len(re.findall(r"[A-Za-z](?=[0-9])|[0-9](?=[A-Za-z])", value[:200])) >= 4


def _words(name: str) -> list[str]:
    """Its words in lower case, without what a number or the place of its use adds at the end."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^A-Za-z0-9]+", spaced.lower()) if word]
    while len(words) > 1 and (words[-1] in _AFTER or re.fullmatch(r"v?\d+", words[-1])):
        words.pop()
    return [*words[:-1], words[-1].rstrip("0123456789") or words[-1]] if words else []


# --- text -------------------------------------------------------------------------------------------------------------

_LOOKS = re.compile(
    r"""
      sk-[A-Za-z0-9_-]{16,} | hf_[A-Za-z0-9]{16,} | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{16,}
    | glpat-[\w-]{16,} | xox[abprs]-[\w-]{10,} | AKIA[0-9A-Z]{16} | AIza[\w-]{30,} | wandb_v1_\w{16,}
    | (?<![\w-])eyJ[\w-]{8,20000}\.eyJ[\w-]{8,20000}\.[\w-]+
    | (?<=[Bb]earer\ )\S{8,} | (?<=[Bb]asic\ )[A-Za-z0-9+/=]{8,}
    | -----BEGIN[A-Z ]*PRIVATE\ KEY-----.*?(?:-----END[A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_USER = re.compile(
    r"""(?<=://)(?:
      [^/\s:@"']*:[^/\s"']+ | [^/\s:@"']*:(?!\d+/)[^\s"'@]{1,200}
    | (?<=https://)[^/\s@"']{8,} | (?<=http://)[^/\s@"']{8,}
    )(?=@)""",
    re.VERBOSE,
)
"""Name and password in an address, or the token that stands there alone."""
_QUERY = re.compile(r"(^|[?&;#\s])([A-Za-z_][\w.\-]*)=([^&;#\s\"'<>\\]+)")
_IN_A_QUERY = {"key", "sig", "signature"}
"""Names that are secrets behind ? and &, and elsewhere not."""
_SENT = re.compile(r"(?:[Bb]earer|[Bb]asic) " + re.escape(HIDDEN))
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
    return (in_a_query or _tells(name, value)) and not _is_place(value)


def _carried(text: str) -> Iterable[str]:
    """Passwords and tokens inside of an address."""
    if "://" in text:
        for found in _USER.findall(text):
            password = found.partition(":")[2] or found
            yield from (password, unquote(password))
        yield from (found[2] for found in _QUERY.findall(text) if _asks(*found))


# --- a run's own ------------------------------------------------------------------------------------------------------


def same_but_hidden(before: Any, now: Any) -> bool:
    """Whether two values agree wherever the first still says something: a secret may be another one."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() == now.keys() and all(same_but_hidden(before[key], now[key]) for key in before)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(same_but_hidden, before, now))
    if before == HIDDEN:
        return True
    if isinstance(before, str) and HIDDEN in before and isinstance(now, str):
        return _in_order(before.split(HIDDEN), now)
    return bool(before == now)


def _in_order(parts: list[str], text: str) -> bool:
    """Whether a text begins with the first part, ends with the last and holds the others between them, in order."""
    first, *others, last = parts
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in others:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def hidden_in(tree: Any, where: str = "") -> str | None:
    """Where in a tree of settings a secret was taken out; None: nowhere."""
    if isinstance(tree, Mapping):
        found = (hidden_in(value, f"{where}.{key}" if where else str(key)) for key, value in tree.items())
    elif isinstance(tree, list | tuple):
        found = (hidden_in(value, f"{where}[{i}]") for i, value in enumerate(tree))
    else:
        return where if isinstance(tree, str) and _stands_for_one(where, tree) else None
    return next((place for place in found if place is not None), None)


def _stands_for_one(name: str, text: str) -> bool:
    """Whether the mark in a text was put there; "replace names with [redacted]" is a prompt that somebody wrote."""
    if HIDDEN not in text:
        return False
    in_an_address = any("://" in word and HIDDEN in word for word in text.split())
    named = any(HIDDEN in value and _asks(mark, key, value) for mark, key, value in _QUERY.findall(text))
    return text == HIDDEN or names_a_secret(name) or in_an_address or named or bool(_SENT.search(text))


class Redactor:
    """Knows the secrets of one run and takes them out of text and trees of settings."""

    def __init__(self, config: Any = None, argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        self._known: list[str] = []
        self.learn(_variables(environ or {}))
        self._keep(value for name, value in (environ or {}).items() if _may_name_one(name) and _may_be_one(value))
        self.learn(config)
        self._keep(value for _, value in _argv_secrets(argv))
        self._keep(value for word in argv for value in _carried(word))
        self._keep(value for word in argv for name, _, value in _SAID.findall(word) if _tells(name, value))

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
                self.text(str(key)): self._hidden(value) if _tells(str(key), value) else self.tree(value)
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
        """A value under a secret name, and all that lies in it; nothing, numbers, yes and no are kept."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._hidden(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(item) for item in value]
        says_nothing = value is None or value == "" or isinstance(value, int | float)
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
            yield from _secrets_of(value, under or _tells(str(key), value))
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _secrets_of(item, under)
    elif under and tree is not None and not isinstance(tree, int | float):
        yield tree.decode(errors="replace") if isinstance(tree, bytes) else str(tree)
    elif isinstance(tree, str):
        yield from _carried(tree)


def _unsaid(found: re.Match[str]) -> str:
    secret = _tells(found[1], found[3]) and found[3] not in ("true", "false") and not _is_place(found[3])
    return found[1] + found[2] + HIDDEN if secret else found[0]


def _argv_secrets(argv: Sequence[str]) -> Iterable[tuple[int, str]]:
    """(position, secret at its end) for `--api-key X`, `--api-keys X Y`, `--api-key=X`, `--set tracker.api_key=X`."""
    for i, word in enumerate(argv):
        parts = word.split("=")
        named = next(
            (n for n, part in enumerate(parts[:-1], 1) if _NAME.fullmatch(part) and _tells(part, "=".join(parts[n:]))),
            None,
        )
        if named is not None:
            yield i, "=".join(parts[named:])
        elif len(parts) == 1 and word.startswith("-"):
            several = word.endswith("s")
            for place, value in enumerate(argv[i + 1 : None if several else i + 2], i + 1):
                if value.startswith("--") or not _tells(word, value):
                    break
                yield place, value
