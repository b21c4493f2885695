"""What a foreign key is made of: its spelling, what it becomes, and the little converters that several keys share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from grpo.errors import nearest

Settings = dict[str, Any]
Together = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Settings]]


@dataclass(frozen=True)
class Spelling:
    """One foreign key: what it becomes, and how its system's default compares with ours."""

    key: str
    becomes: str
    """Our settings, with commas; empty: it asks for nothing here (always so), or is refused."""
    default: str = ""
    """That system's default, and why ours departs from it where it does."""
    convert: Callable[[Any], Settings] | None = None
    """From the foreign value to our settings; None: the value as it is, under the name `becomes`."""
    together: Together | None = None
    """Instead, for keys that mean something only side by side: from those of them that are given, and our settings so
    far, to our settings by key."""
    refused: bool = False
    """Any value but the system's own default is an error that gives `default` as the reason."""
    accepted: bool = False
    """Any value will do: the outcome is the same here, for the reason that `default` gives."""
    theirs: Any = None
    """Of an accepted one, what its system has where nothing is said: scripts read such settings back."""


Words = Mapping[str, tuple[Spelling, ...]]
"""Foreign keys by the system that they belong to."""


@dataclass(frozen=True)
class Soft:
    """A value that goes along with a key, and yields to any other key that sets the same."""

    value: Any


@dataclass(frozen=True)
class Translation:
    """What happened to one key."""

    key: str
    value: Any
    settings: Settings
    note: str = ""
    """Its system's default, and how ours departs from it."""
    along: tuple[str, ...] = ()
    """Those of our settings that only go along with it: they yield to other keys, and leave when it does."""

    def said(self, name: str) -> str:
        """The key as a message about our setting calls it: by the word that was written, with what it means there."""
        return f"{self.key} ({name} here{'; there ' + self.note if self.note else ''})"


def joined(*tables: Words) -> dict[str, tuple[Spelling, ...]]:
    """The words of several tables; where two know a key of one system, the later says what it means."""
    found: dict[str, dict[str, Spelling]] = {}
    for table in tables:
        for system, some in table.items():
            found.setdefault(system, {}).update({spelling.key: spelling for spelling in some})
    return {system: tuple(keys.values()) for system, keys in found.items()}


def key_of(raw: str) -> str:
    """As it is spelled here: with underscores."""
    return raw.replace("-", "_")


def truth(value: Any) -> bool:
    """A yes/no setting, also as text from a file or a command line."""
    text = _text(value)
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", "none"):
        return False
    raise ValueError(f"expected true or false, got {value!r}")


def switched(words: Mapping[str, Any], key: str) -> bool:
    """Whether a yes/no key is given and on; for keys that are read together, where nobody else knows which is wrong."""
    try:
        return key in words and truth(words[key])
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def absent(value: Any) -> bool:
    """Whether a value says nothing: None, also as text."""
    return value is None or (isinstance(value, str) and _text(value) in ("", "none", "null"))


def choice(
    table: Mapping[str, Settings],
    refused: Mapping[str, str] | None = None,
    otherwise: Callable[[Any], Settings] | None = None,
) -> Callable[[Any], Settings]:
    """One of a few words; `refused`: those that are not done here, each with why; `otherwise`: for all others."""

    def convert(value: Any) -> Settings:
        word = _text(value)
        if refused and word in refused:
            raise ValueError(f"{value!r} is not done here: {refused[word]}")
        if word not in table and otherwise is not None:
            return otherwise(value)
        if word not in table:
            raise ValueError(f"{value!r} is not one of {', '.join(table)}{nearest(word, list(table))}")
        return table[word]

    return convert


KL_NAMES = {
    "low_var_kl": "k3",
    "kl": "k1",
    "mse": "k2",
    "mse_kl": "k2",
    "abs": "abs",
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
}
"""Other systems' names of the KL's estimators, and ours."""

kl_estimator = choice({name: {"kl_estimator": ours} for name, ours in KL_NAMES.items()})


def given(name: str, make: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Settings]:
    """The value under our name; None leaves our default."""
    return lambda value: {} if absent(value) else {name: make(value)}


def when(settings: Settings, otherwise: Settings | None = None) -> Callable[[Any], Settings]:
    """A switch."""
    return lambda value: {} if absent(value) else settings if truth(value) else otherwise or {}


def always(key: str, note: str) -> Spelling:
    """A switch that asks for what is done here anyway, or cannot be had otherwise and does no harm."""

    def convert(value: Any) -> Settings:
        if not absent(value):
            truth(value)
        return {}

    return Spelling(key, "", note, convert)


def accept(key: str, why: str, theirs: Any = None) -> Spelling:
    """A key whose every value has the same outcome here; whoever gives one is told why, in a line."""
    return Spelling(key, "", why, lambda value: {}, accepted=True, theirs=theirs)


def refuse(key: str, why: str, *neutral: Any) -> Spelling:
    """A key that is not done here. None and `neutral`, its system's default (false if not said), ask for nothing."""
    passes = {"", "none", *map(_text, neutral or (False,))}

    def convert(value: Any) -> Settings:
        if _text(value) not in passes:
            raise ValueError(f"not done here: {why}")
        return {}

    return Spelling(key, "", why, convert, refused=True)


def whole(value: Any) -> int:
    """A count, also as text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.5
    if not number.is_integer():
        raise ValueError(f"expected a whole number, got {value!r}")
    return int(number)


def number(value: Any, key: str) -> float:
    """A number, also as text; for keys that are read together, where nobody else knows which is wrong."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: expected a number, got {value!r}") from None


def spelled(value: Any) -> str:
    """As one would type it; members of an enumeration by their value."""
    return str(value.value if isinstance(value, Enum) else value)


def _text(value: Any) -> str:
    return spelled(value).strip().lower()
