"""Learned worlds: a group of imagined futures from every state that was seen.

from grpo.worldmodel import GRPOTrainer
GRPOTrainer(env="CartPole-v1", group_size=8, horizon=16).train(env_steps=10_000)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo.lazy import lazily

if TYPE_CHECKING:
    from grpo.worldmodel.config import WorldModelConfig
    from grpo.worldmodel.trainer import GRPOTrainer, make_trainer

__all__ = ["GRPOTrainer", "WorldModelConfig", "make_trainer"]

_HOME = {
    "GRPOTrainer": "grpo.worldmodel.trainer",
    "WorldModelConfig": "grpo.worldmodel.config",
    "make_trainer": "grpo.worldmodel.trainer",
}

__getattr__, __dir__ = lazily(__name__, _HOME, "worldmodel")
