"""GRPO for Gymnasium environments: groups of episodes, small policies, seconds on one core.

from grpo.control import GRPOTrainer
GRPOTrainer(env="CartPole-v1").train(steps=30)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo.lazy import lazily

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

__getattr__, __dir__ = lazily(__name__, _HOME, "control")
