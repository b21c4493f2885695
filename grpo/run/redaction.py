"""Secrets taken out of everything a run writes or sends: by the name of a setting, by the look of a value, by what the
environment holds under such a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

HIDDEN = "[redacted]"

_WORDS = {"secret", "secrets", "password", "passwd", "passphrase", "pwd", "apikey", "credential", "credentials", "auth"}
_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("account", "key")}
# `eos_token` names a piece of text, `hf_token` opens a door.
_PLAIN_TOKENS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "start", "end", "image", "per", "think"}
_LOOKS = re.compile(
    r"""
      sk-[A-Za-z0-9_-]{16,} | hf_[A-Za-z0-9]{16,} | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{16,}
    | glpat-[\w-]{16,} | xox[abprs]-[\w-]{10,} | AKIA[0-9A-Z]{16} | AIza[\w-]{30,} | wandb_v1_\w{16,}
    | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+ | (?<=[Bb]earer\ )\S{8,} | (?<=://)[^/\s:@]+:[^/\s@]+(?=@)
    | -----BEGIN[A-Z ]*PRIVATE\ KEY-----.*?(?:-----END[A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_SHORTEST = 8
"""Shorter values are not searched for in other text: `auth: yes` must not blank every yes."""


def names_a_secret(name: str) -> bool:
    """Whether a setting, option or variable of this name holds a secret."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^A-Za-z0-9]+", spaced.lower()) if word]
    if not words:
        return False
    is_token = words[-1] == "token" and (len(words) == 1 or words[-2] not in _PLAIN_TOKENS)
    return is_token or bool(_WORDS & set(words)) or any(pair in _PAIRS for pair in pairwise(words))


class Redactor:
    """Knows the secrets of one run and takes them out of text and trees of settings."""

    def __init__(self, config: Any = None, argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        found = {value for name, value in (environ or {}).items() if names_a_secret(name)}
        found |= set(_secrets_of(config)) | {value for _, value in _argv_secrets(argv)}
        self._known = sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)

    def text(self, text: str) -> str:
        """`text` with every known or recognisable secret replaced."""
        for value in self._known:
            text = text.replace(value, HIDDEN)
        return _LOOKS.sub(HIDDEN, text)

    def tree(self, tree: Any) -> Any:
        """Nested dicts and lists with secrets replaced, by name of the key and by value."""
        if isinstance(tree, Mapping):
            return {
                self.text(str(key)): HIDDEN if _is_secret(str(key), value) else self.tree(value)
                for key, value in tree.items()
            }
        if isinstance(tree, list | tuple):
            return [self.tree(item) for item in tree]
        return self.text(tree) if isinstance(tree, str) else tree

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command line with the values of secret options replaced."""
        hidden = dict(_argv_secrets(argv))
        cleaned = [word[: len(word) - len(hidden[i])] + HIDDEN if i in hidden else word for i, word in enumerate(argv)]
        return [self.text(word) for word in cleaned]


def _is_secret(name: str, value: Any) -> bool:
    return (
        names_a_secret(name)
        and value not in (None, "")
        and isinstance(value, str | int | float | bytes)
        and not isinstance(value, bool)
    )


def _secrets_of(tree: Any) -> Iterable[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if _is_secret(str(key), value):
                yield str(value)
            else:
                yield from _secrets_of(value)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _secrets_of(item)


def _argv_secrets(argv: Sequence[str]) -> Iterable[tuple[int, str]]:
    """(position, secret at its end) for `--api-key X`, `--api-key=X` and `--set tracker.api_key=X`."""
    for i, word in enumerate(argv):
        parts = word.split("=")
        named = next((n for n, part in enumerate(parts[:-1], 1) if names_a_secret(part)), None)
        if named is not None:
            yield i, "=".join(parts[named:])
        elif len(parts) == 1 and word.startswith("-") and names_a_secret(word) and i + 1 < len(argv):
            yield i + 1, argv[i + 1]
