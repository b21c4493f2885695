"""Group Relative Policy Optimization: one small exact algorithm, a room for each domain.

The names below are looked up when first used, so that `import grpo` loads no array library.
The loss itself is `from grpo.objective import objective`; its formulas are the pure functions in `grpo.core`.
"""

from typing import TYPE_CHECKING

from grpo.lazy import lazily
from grpo.moved import install

if TYPE_CHECKING:
    from grpo.app.load import load
    from grpo.checking import check
    from grpo.config import GRPOConfig
    from grpo.experience import Experience
    from grpo.feedback import PairwiseReward, RankedReward
    from grpo.protocols import PolicyModel, RewardModel
    from grpo.recipes import RECIPES, Recipe, recipe
    from grpo.report import StepReport
    from grpo.rollouts import Denominators, Rollouts
    from grpo.run.trainer import GRPOTrainer
    from grpo.view.launch import show

__version__ = "0.2.0"

install()

__all__ = [
    "RECIPES",
    "Denominators",
    "Experience",
    "GRPOConfig",
    "GRPOTrainer",
    "PairwiseReward",
    "PolicyModel",
    "RankedReward",
    "Recipe",
    "RewardModel",
    "Rollouts",
    "StepReport",
    "check",
    "load",
    "recipe",
    "show",
]

_HOME = {
    "Denominators": "grpo.rollouts",
    "Experience": "grpo.experience",
    "GRPOConfig": "grpo.config",
    "GRPOTrainer": "grpo.run.trainer",
    "PairwiseReward": "grpo.feedback",
    "PolicyModel": "grpo.protocols",
    "RankedReward": "grpo.feedback",
    "RewardModel": "grpo.protocols",
    "StepReport": "grpo.report",
    "RECIPES": "grpo.recipes",
    "Recipe": "grpo.recipes",
    "Rollouts": "grpo.rollouts",
    "check": "grpo.checking",
    "load": "grpo.app.load",
    "recipe": "grpo.recipes",
    "show": "grpo.view.launch",
}

__getattr__, __dir__ = lazily(__name__, _HOME)
