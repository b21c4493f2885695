"""What a try is compared with where its group says nothing: the mean reward of its role so far."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from grpo.core.advantages import role_means
from grpo.credit import trajectory_reward
from grpo.protocols import State
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts


class RoleMeans:
    """Running means of rewards by role, which go on from step to step."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._mean_by_role: Mapping[int, float] = {}

    def applied(self, rollouts: Rollouts) -> Rollouts:
        """The tries, each with its role's mean before it as baseline; one that failed moves none."""
        reward_N, weight_N = trajectory_reward(rollouts, self._recipe)
        roles = [0] * len(rollouts) if rollouts.role_N is None else rollouts.role_N.tolist()
        counted = (weight_N > 0).tolist()
        decay = self._recipe.baseline_decay
        baseline, self._mean_by_role = role_means(reward_N.tolist(), roles, counted, self._mean_by_role, decay)
        baseline_N1 = torch.tensor(baseline, dtype=reward_N.dtype, device=reward_N.device)[:, None]
        return rollouts.but(baseline_NT=baseline_N1.expand(tuple(rollouts.mask_NT.shape)).contiguous())

    def state(self) -> State:
        """The means."""
        return State({"role_means": {str(role): mean for role, mean in self._mean_by_role.items()}}, {})

    def load_state(self, state: State) -> None:
        """Go on with them."""
        self._mean_by_role = {int(role): float(mean) for role, mean in state.values["role_means"].items()}
