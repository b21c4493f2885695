"""When things happen in a run, as TRL's `…_strategy` and `…_steps` words say it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from grpo.dialects.spelling import spelled

BY_EPOCH = {
    "eval_strategy": "evaluate_every", "save_strategy": "checkpoint_every", "logging_strategy": "log_every",
}  # fmt: skip
"""TRL's words that may say `epoch`, and the settings of a run that they are about."""
SHARED = {"eval_steps": "evaluate_every", "save_steps": "checkpoint_every", "logging_steps": "log_every"}
"""Those that may be a share of the run."""


def apart(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], dict[str, float]]:
    """Settings without the words that say `epoch` or a share of the run, and what of a run these are about."""
    epochs = {key: name for key, name in BY_EPOCH.items() if spelled(given.get(key, "")) == "epoch"}
    shares: dict[str, float] = {}
    for key in SHARED.keys() & given.keys():
        with suppress(TypeError, ValueError):  # no number: whoever reads it says so
            if 0 < float(given[key]) < 1:
                shares[key] = float(given[key])
    idle = {key.replace("strategy", "steps") for key in ("eval_strategy", "save_strategy") if _is_off(given.get(key))}
    shares = {key: share for key, share in shares.items() if key not in idle}
    rest = {key: value for key, value in given.items() if key not in {*epochs, *shares, *idle}}
    return rest, tuple(epochs.values()), {SHARED[key]: share for key, share in shares.items()}


def _is_off(strategy: Any) -> bool:
    """Whether TRL would not read the steps beside it."""
    return strategy is not None and spelled(strategy).lower() in ("no", "false", "best")


def evaluated(given: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's eval_strategy=steps alone: as often as steps are logged."""
    spoken = {"eval_steps", "evaluate_every", "evaluation_steps"} & given.keys()
    if spelled(given.get("eval_strategy", "")) != "steps" or any(given[key] is not None for key in spoken):
        return dict(given)
    return {**given, "eval_steps": given.get("logging_steps") or given.get("log_every") or 1}
