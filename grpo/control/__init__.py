"""GRPO for Gymnasium environments: groups of episodes, small policies, seconds on one core.

from grpo.control import GRPOTrainer
GRPOTrainer(env="CartPole-v1").train(steps=30)
"""

from grpo.control.config import ControlConfig
from grpo.control.trainer import GRPOTrainer, make_trainer, test

__all__ = ["ControlConfig", "GRPOTrainer", "make_trainer", "test"]
