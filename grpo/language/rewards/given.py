"""Rewards as they are given: functions, models, words that name one; resolved, named, each with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo.errors import ConfigError
from grpo.language.rewards.lookup import find


def tokenizers_of(given: Any, count: int) -> list[Any]:
    """One for each reward; those beside plain functions are never looked at."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ConfigError(
            f"{len(given)} reward_processing_classes for {count} rewards; give one for each (None beside functions), "
            "or a single tokenizer for all models"
        )
    return list(given)


def resolve(
    given: Any, tokenizer: Any, settings: Mapping[str, Any], device: str, trust_remote_code: bool
) -> Callable[..., Any]:
    """The function itself, the one that a word names, or a reward model."""
    if isinstance(given, str):
        function = find(given, settings)
        if function is not None:
            return function
    elif not (hasattr(given, "forward") and hasattr(given, "parameters")):
        if not callable(given):
            raise ConfigError(f"a reward is a function, a model or a word that names one, got {type(given).__name__}")
        return given
    from grpo.language.rewards.models import RewardModel

    return RewardModel.load(given, tokenizer, device, trust_remote_code)


def name_of(function: Any) -> str:
    """What it is called in metrics."""
    inner = function
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    return str(getattr(inner, "__name__", None) or type(inner).__name__).strip("<>")


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, numbered where they are the same."""
    found: list[str] = []
    for name in names:
        count, chosen = 1, name
        while chosen in found:
            count += 1
            chosen = f"{name}_{count}"
        found.append(chosen)
    return tuple(found)
