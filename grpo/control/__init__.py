"""GRPO for Gymnasium environments: groups of episodes, small policies, seconds on one core.

from grpo.control import GRPOTrainer
GRPOTrainer(env="CartPole-v1").train(steps=30)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.control.config import ControlConfig
    from grpo.control.trainer import GRPOTrainer, make_trainer, test

__all__ = ["ControlConfig", "GRPOTrainer", "make_trainer", "test"]

_HOME = {
    "ControlConfig": "grpo.control.config",
    "GRPOTrainer": "grpo.control.trainer",
    "make_trainer": "grpo.control.trainer",
    "test": "grpo.control.trainer",
}


def __getattr__(name: str) -> Any:
    """Words and settings load without the libraries that the trainer brings along."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
