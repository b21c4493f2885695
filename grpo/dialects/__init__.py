"""Other systems' spellings → our names: the translator, and the words that are about the algorithm itself.

Most words mean one thing everywhere (`COMMON`). Some do not: `batch_size` counts states in one system and decisions in
another. Those belong to a system, chosen by the front door or block a setting comes from, or named (`dialect: rlinf`).
A room brings the words that only it can mean (`words` of its settings class, from its module `dialect`); so does the
run (`grpo.run.dialect`). `grpo config --dialects` prints them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.spelling import Settings, Soft, Spelling, Together, Translation, Words, joined, key_of, truth
from grpo.dialects.words import COMMON, OWN, SYSTEMS
from grpo.errors import nearest

__all__ = [
    "COMMON", "OWN", "SYSTEMS", "Settings", "Spelling", "Translation", "Words",
    "interpret", "joined", "key_of", "read", "spellings", "translate", "truth",
]  # fmt: skip


def spellings(system: str, words: Words = SYSTEMS) -> dict[str, Spelling]:
    """Every foreign key that this system's settings may use; `words`: of all systems that are known there."""
    if system not in words:
        known = ", ".join(words)
        raise ValueError(f'unknown dialect "{system}"{nearest(system, list(words))}; known: {known}')
    return {spelling.key: spelling for spelling in (*COMMON, *words[system])}


def translate(
    settings: Mapping[str, Any], system: str = "grpo", words: Words = SYSTEMS
) -> tuple[Settings, list[Translation]]:
    """Settings in our names, and what each foreign key became. Two keys that end in one setting must agree."""
    ours, soft, done = read(settings, system, words=words)
    return soft | ours, done


def read(
    settings: Mapping[str, Any], system: str, before: Mapping[str, Any] | None = None, words: Words = SYSTEMS
) -> tuple[Settings, Settings, list[Translation]]:
    """As `translate`, with those that yield to any other key apart; `before`: our settings from other places."""
    return interpret(settings, spellings(system, words), before or {})


def interpret(
    settings: Mapping[str, Any], known: Mapping[str, Spelling], before: Mapping[str, Any]
) -> tuple[Settings, Settings, list[Translation]]:
    """Settings by the spellings that are known: what they are here, what yields to other keys, what each became."""
    ours: Settings = {}
    soft: Settings = {}
    done: list[Translation] = []
    source: dict[str, str] = {}
    joint: dict[Together, dict[str, Any]] = {}

    def take(raw: str, value: Any, became: Settings) -> None:
        for name, setting in became.items():
            if isinstance(setting, Soft):
                soft[name] = setting.value
                continue
            if isinstance(setting, dict) and isinstance(ours.get(name), dict):
                clash = any(ours[name].get(key, item) != item for key, item in setting.items())
                setting = ours[name] | setting
            else:
                clash = name in ours and ours[name] != setting
            if clash:
                raise ValueError(f"{raw}={value!r} and {source[name]} both set {name}; keep one of them")
            ours[name], source[name] = setting, raw

    def note(raw: str, value: Any, became: Settings) -> None:
        plain = {name: item.value if isinstance(item, Soft) else item for name, item in became.items()}
        if list(plain) != [key_of(raw)]:  # our own word, only read more kindly
            along = tuple(name for name, item in became.items() if isinstance(item, Soft))
            done.append(Translation(raw, value, plain, known[key_of(raw)].default, along))

    for raw, value in settings.items():
        spelling = known.get(key_of(raw))
        if spelling is None:
            take(raw, value, {key_of(raw): value})
        elif spelling.together is not None:
            joint.setdefault(spelling.together, {})[key_of(raw)] = value
        else:
            became = {spelling.becomes: value} if spelling.convert is None else _converted(raw, spelling, value)
            take(raw, value, became)
            note(raw, value, became)
    for together, words in joint.items():
        found = together(words, {**before, **ours})
        for key, value in words.items():
            take(key, value, found.get(key, {}))
            note(key, value, found.get(key, {}))
    return ours, {name: value for name, value in soft.items() if name not in ours}, done


def _converted(raw: str, spelling: Spelling, value: Any) -> Settings:
    assert spelling.convert is not None
    try:
        return spelling.convert(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{raw}: {error}") from None
