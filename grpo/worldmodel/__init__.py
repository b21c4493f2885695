"""Learned worlds: a group of imagined futures from every state that was seen.

from grpo.worldmodel import GRPOTrainer
GRPOTrainer(env="CartPole-v1", group_size=8, horizon=16).train(env_steps=10_000)
"""

from grpo.worldmodel.config import WorldModelConfig
from grpo.worldmodel.trainer import GRPOTrainer, make_trainer

__all__ = ["GRPOTrainer", "WorldModelConfig", "make_trainer"]
