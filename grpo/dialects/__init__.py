"""Other systems' spellings → our names, in one place.

Most words mean one thing everywhere (`COMMON`). Some do not: `batch_size` counts states in one system and decisions in
another. Those belong to a system, chosen by the front door or block a setting comes from, or named (`dialect: rlinf`).
Words about the run rather than what is learned (`output_dir`, `use_wandb`) are split off first (`translate_run`).
`grpo config --dialects` prints this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.run import RUN, RUN_NAMES
from grpo.dialects.spelling import Settings, Soft, Spelling, Together, Translation, truth
from grpo.dialects.words import COMMON, OWN, SYSTEMS
from grpo.errors import nearest

__all__ = [
    "COMMON", "OWN", "RUN", "RUN_NAMES", "SYSTEMS", "Spelling", "Translation",
    "read", "spellings", "table_text", "translate", "translate_run", "truth",
]  # fmt: skip


def spellings(system: str) -> dict[str, Spelling]:
    """Every foreign key that this system's settings may use."""
    if system not in SYSTEMS:
        known = ", ".join(SYSTEMS)
        raise ValueError(f'unknown dialect "{system}"{nearest(system, list(SYSTEMS))}; known: {known}')
    return {spelling.key: spelling for spelling in (*COMMON, *SYSTEMS[system])}


def translate(settings: Mapping[str, Any], system: str = "grpo") -> tuple[Settings, list[Translation]]:
    """Settings in our names, and what each foreign key became. Two keys that end in one setting must agree."""
    ours, soft, done = read(settings, system)
    return soft | ours, done


def read(
    settings: Mapping[str, Any], system: str, before: Mapping[str, Any] | None = None
) -> tuple[Settings, Settings, list[Translation]]:
    """As `translate`, with those that yield to any other key apart; `before`: our settings from other places."""
    return _read(settings, spellings(system), before or {})


def translate_run(settings: Mapping[str, Any]) -> tuple[Settings, Settings, list[Translation]]:
    """Settings that do not concern the run, those that do (as RunConfig has them), and what each foreign key became."""
    known = {spelling.key: spelling for spelling in RUN}
    about = {raw: value for raw, value in settings.items() if _key(raw) in known or _key(raw) in RUN_NAMES}
    run, soft, done = _read(about, known, {})
    return {raw: value for raw, value in settings.items() if raw not in about}, soft | run, done


def _read(
    settings: Mapping[str, Any], known: Mapping[str, Spelling], before: Mapping[str, Any]
) -> tuple[Settings, Settings, list[Translation]]:
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
        if list(plain) != [_key(raw)]:  # our own word, only read more kindly
            done.append(Translation(raw, value, plain))

    for raw, value in settings.items():
        spelling = known.get(_key(raw))
        if spelling is None:
            take(raw, value, {_key(raw): value})
        elif spelling.together is not None:
            joint.setdefault(spelling.together, {})[_key(raw)] = value
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


def _key(raw: str) -> str:
    return raw.replace("-", "_")


def _converted(raw: str, spelling: Spelling, value: Any) -> Settings:
    assert spelling.convert is not None
    try:
        return spelling.convert(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{raw}: {error}") from None


def table_text() -> str:
    """Every foreign key, its system, what it becomes, and that system's default."""
    rows = [("key", "system", "becomes", "default there")]
    rows += [(s.key, "any", s.becomes, s.default) for s in COMMON]
    rows += [(s.key, "any", ", ".join(f"run.{name.strip()}" for name in s.becomes.split(",")), s.default) for s in RUN]
    for system, some in SYSTEMS.items():
        rows += [(s.key, system, "refused" if s.refused else s.becomes or "always so", s.default) for s in some]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in rows]
    return "\n".join(lines)
