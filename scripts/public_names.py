"""List what is public: names, parameters and settings. `python scripts/public_names.py` writes the list that
tests/architecture/test_public.py holds the code to; docs/stability.md says what the list means."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

LIST = Path(__file__).parents[1] / "tests" / "architecture" / "public.txt"
MODULES = [
    "grpo", "grpo.control", "grpo.language", "grpo.language.rewards", "grpo.language.trl", "grpo.language.turns",
    "grpo.worldmodel",
]  # fmt: skip
"""Each with its `__all__`."""
MORE = {
    "grpo.objective": ["objective"],
    "grpo.protocols": ["Reference", "RolloutSource", "SequencePolicy"],
    "grpo.bandit": ["BanditConfig", "make_trainer"],
    "grpo.run.config": ["RunConfig"],
    "grpo.run.folder": ["SCHEMA", "RunFolder"],
}
"""Documented names of modules that have more than is public."""
SAID = (bool, int, float, str, tuple, type(None))
"""Defaults of these types are part of a signature; others are only known to exist."""


def described(name: str, thing: Any) -> list[str]:
    """One line for a function or a value, more for a class: its parameters and methods, or its settings."""
    if isinstance(thing, Mapping):
        return [f"{name}: {', '.join(thing)}"]
    if not inspect.isclass(thing):
        return [f"{name}{signature(thing) if callable(thing) else f' = {thing!r}'}"]
    if issubclass(thing, BaseModel):
        fields = [f"{name}.{field}{default(info.default)}" for field, info in thing.model_fields.items()]
        return [f"{name}: settings", *fields]
    lines = [f"{name}{': record' if is_dataclass(thing) else ''}{signature(thing)}"]
    return lines + [line for method, found in methods(thing) for line in described_member(f"{name}.{method}", found)]


def methods(thing: type) -> list[tuple[str, Any]]:
    """Public members that are defined in the package, inherited ones included."""
    ours = [kind for kind in reversed(thing.__mro__) if kind.__module__.partition(".")[0] == "grpo"]
    found = {key: value for kind in ours for key, value in vars(kind).items() if not key.startswith(("_", "model_"))}
    return sorted((key, value) for key, value in found.items() if not is_field(thing, key))


def is_field(thing: type, key: str) -> bool:
    """Fields stand in the signature, or in the list of settings."""
    return key in {name for kind in thing.__mro__ for name in vars(kind).get("__annotations__", {})}


def described_member(name: str, found: Any) -> list[str]:
    """A method with its parameters, a property by its name; a constant of the class is no promise."""
    if isinstance(found, property) or hasattr(found, "func"):
        return [f"{name}: property"]
    function = getattr(found, "__func__", found)
    return [f"{name}{signature(function)}"] if inspect.isfunction(function) else []


def signature(thing: Any) -> str:
    """Names and defaults of the parameters; types are mypy's affair."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return ""
    said, starred = [], False
    for parameter in parameters:
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            said.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        said.append(
            star + parameter.name + ("" if parameter.default is parameter.empty else default(parameter.default))
        )
    return f"({', '.join(said)})"


def default(value: Any) -> str:
    """As it is written, where that is short and the same every time."""
    if repr(value) == "PydanticUndefined":
        return ""
    return f"={value!r}" if isinstance(value, SAID) and len(repr(value)) < 60 else "=…"


def listing() -> str:
    """A line a name."""
    public = {module: list(import_module(module).__all__) for module in MODULES} | MORE
    lines = []
    for module, names in public.items():
        for name in sorted(names):
            lines += described(f"{module}.{name}", getattr(import_module(module), name))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    LIST.write_text(listing(), encoding="utf-8")
    print(LIST)
