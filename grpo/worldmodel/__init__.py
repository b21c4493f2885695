"""Learned worlds: a group of imagined futures from every state that was seen.

from grpo.worldmodel import GRPOTrainer
GRPOTrainer(env="CartPole-v1", group_size=8, horizon=16).train(env_steps=10_000)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.worldmodel.config import WorldModelConfig
    from grpo.worldmodel.trainer import GRPOTrainer, make_trainer

__all__ = ["GRPOTrainer", "WorldModelConfig", "make_trainer"]

_HOME = {
    "GRPOTrainer": "grpo.worldmodel.trainer",
    "WorldModelConfig": "grpo.worldmodel.config",
    "make_trainer": "grpo.worldmodel.trainer",
}


def __getattr__(name: str) -> Any:
    """Words and settings load without the libraries that the trainer brings along."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
