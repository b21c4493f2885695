"""When things happen in a run, as TRL's `…_strategy` words say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.spelling import spelled

BY_EPOCH = {
    "eval_strategy": "evaluate_every", "save_strategy": "checkpoint_every", "logging_strategy": "log_every",
}  # fmt: skip
"""TRL's words that may say `epoch`, and the settings of a run that they are about."""


def without_epochs(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings without the words that say `epoch`, and what of a run these are about."""
    spoken = {key: name for key, name in BY_EPOCH.items() if spelled(given.get(key, "")) == "epoch"}
    return {key: value for key, value in given.items() if key not in spoken}, tuple(spoken.values())


def evaluated(given: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's eval_strategy=steps alone: as often as steps are logged."""
    spoken = {"eval_steps", "evaluate_every", "evaluation_steps"} & given.keys()
    if spelled(given.get("eval_strategy", "")) != "steps" or any(given[key] is not None for key in spoken):
        return dict(given)
    return {**given, "eval_steps": given.get("logging_steps") or given.get("log_every") or 1}
