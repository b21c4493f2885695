"""The baseline that `advantage` asks the room for, and what it is learned with.

Letters: H numbers that the policy makes of an observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.control.baselines.critic import LearnedValue
from grpo.control.baselines.fitted import FittedValue
from grpo.control.baselines.linear import choose, explained, linear, returns_to_go
from grpo.control.baselines.points import until_reward
from grpo.control.config import ControlConfig
from grpo.control.play import Episodes
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.fleet import Fleet
from grpo.envs.spaces import each, layout
from grpo.protocols import part


class RoomBaseline:
    """What was expected of each decision; it owns the critic, or the value that is solved for."""

    def __init__(self, fleet: Fleet, policy: ActorPolicy, scaling: Scaling, config: ControlConfig) -> None:
        self._policy, self._scaling, self._config = policy, scaling, config
        self._horizon, judged, space = fleet.horizon or 1000, config.judged_by, fleet.observation_space
        self.critic = LearnedValue(space, config) if judged == "critic" else None
        self._sighted = judged == "fitted" and policy.sight_size > 0 and bool(layout(space).pictures)
        """Whether the value that is solved for reads what the policy makes of pictures, not the pictures."""
        read = gym.spaces.Box(-np.inf, np.inf, (policy.sight_size,)) if self._sighted else space
        self.fitted = FittedValue(read, config) if judged == "fitted" else None
        self.metrics: dict[str, float | None] = {}
        """Of the baseline that was found last."""

    def of(self, episodes: Episodes, seen: Any, reward_NT: np.ndarray, group_N: np.ndarray) -> np.ndarray:
        """(N, T); `seen`: the observations as the policy takes them, on its device."""
        config, gamma = self._config, self._config.recipe.gamma
        if self._sighted:
            episodes = self._looked_at(episodes, seen)
        return_NT = returns_to_go(episodes, reward_NT, gamma)
        half_N = place_in_group(group_N) % 2
        if config.group_by == "steps":  # a stream may be a single row, and rows are of different episodes anyway
            half_N = np.arange(len(group_N)) % 2
        if config.judged_by == "auto":
            found = choose(episodes, return_NT, group_N, half_N, self._horizon, self._policy.sight)
            chosen = {f"baseline/{name}": float(name == found.choice) for name in ("linear", "step", "batch_step")}
            self.metrics = {"baseline_explained": found.explained, **chosen}
            return found.baseline_NT
        judged_NT = return_NT
        if self.critic is not None:
            baseline_NT = self.critic.baseline(episodes, reward_NT, return_NT, self._scaling)
        elif self.fitted is not None and config.credit_until_reward:
            judged_NT, baseline_NT = until_reward(self.fitted.baseline, episodes, reward_NT, half_N, gamma)
        elif self.fitted is not None:
            baseline_NT = self.fitted.baseline(episodes, reward_NT, return_NT, half_N)
        else:
            baseline_NT = linear(episodes, return_NT, half_N, self._horizon, self._policy.sight)
        self.metrics = {"baseline_explained": explained(judged_NT, baseline_NT, episodes.mask_NT)}
        return baseline_NT + (return_NT - judged_NT)  # what is not judged cancels

    def _looked_at(self, episodes: Episodes, seen: Any) -> Episodes:
        """Episodes whose observations are what the policy makes of them."""
        rows = episodes.mask_NT.shape
        sight_NTH = self._policy.sight(each(seen, lambda x: x.flatten(0, 1))).reshape(*rows, -1)
        return replace(episodes, raw=sight_NTH, last=self._policy.sight(self._scaling(episodes.last)))

    def parts(self) -> dict[str, Mapping[str, Any]]:
        """To go on from, part by part."""
        critic = {} if self.critic is None else {"critic": self.critic.arrays()}
        return critic | ({} if self.fitted is None else {"fitted": self.fitted.arrays()})

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Go on from there; what is not of these parts is left alone."""
        if self.critic is not None:
            self.critic.load(part(arrays, "critic"))
        if self.fitted is not None:
            self.fitted.load(part(arrays, "fitted"))


def place_in_group(group_N: np.ndarray) -> np.ndarray:
    """Of each row: 0, 1, …"""
    order = np.argsort(group_N, kind="stable")
    first = np.searchsorted(group_N[order], group_N[order])
    place_N = np.empty(len(group_N), np.int64)
    place_N[order] = np.arange(len(group_N)) - first
    return place_N
