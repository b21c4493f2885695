"""Running scaling of observations: part of the policy, so it is saved with it and travels into an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import Tree

LIMIT = 10.0
"""Scaled observations stay within ±LIMIT deviations."""


class Scaling:
    """(o − mean) / deviation of everything seen so far, for the continuous vectors of a space; images and choices stay.

    It changes only in `update`, between collecting and the next step: what was sampled is scored under the same
    numbers, because rollouts keep observations as the policy saw them.
    """

    def __init__(self, space: gym.Space[Any], enabled: bool) -> None:
        spaces = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {"": space}
        self._scaled = [key for key, item in spaces.items() if enabled and _continuous(item)]
        self.count = 0.0
        self.mean = {key: np.zeros(spaces[key].shape or (1,)) for key in self._scaled}
        self.square = {key: np.ones(spaces[key].shape or (1,)) for key in self._scaled}
        """Mean squared distance from the mean."""

    def __call__(self, observation: Tree) -> Tree:
        """As the policy sees them."""
        if not self._scaled:
            return observation
        if not isinstance(observation, Mapping):
            return self._apply("", observation)
        return {k: self._apply(k, x) if k in self._scaled else x for k, x in observation.items()}

    def deviation(self, key: str = "") -> np.ndarray:
        """What observations are divided by."""
        return np.sqrt(self.square[key] + 1e-8)

    def _apply(self, key: str, x: np.ndarray) -> np.ndarray:
        scaled = (x - self.mean[key]) / self.deviation(key)
        return np.clip(scaled, -LIMIT, LIMIT).astype(np.float32)

    def update(self, observation: Tree) -> None:
        """Take in further observations, (M, …) each."""
        tree = observation if isinstance(observation, Mapping) else {"": observation}
        added = 0.0
        for key in self._scaled:
            x = np.asarray(tree[key], np.float64)
            added = float(len(x))
            if not added:
                return
            mean, square = x.mean(0), x.var(0)
            total, gap = self.count + added, mean - self.mean[key]
            share = added / total
            self.square[key] = (1 - share) * self.square[key] + share * square + share * (1 - share) * gap**2
            if not self.count:
                self.square[key] = square
            self.mean[key] = self.mean[key] + share * gap
        self.count += added

    def tree(self) -> tuple[Tree, Tree]:
        """Mean and deviation laid out like the observation, what is not scaled left out; None: nothing is."""
        if not self._scaled:
            return None, None
        if self._scaled == [""]:
            return self.mean[""], self.deviation()
        return dict(self.mean), {key: self.deviation(key) for key in self._scaled}

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""
        kept = {f"mean/{key}": value for key, value in self.mean.items()}
        return kept | {f"square/{key}": value for key, value in self.square.items()}

    def load(self, count: float, arrays: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.count = count
        for key in self._scaled:
            self.mean[key] = np.asarray(arrays[f"mean/{key}"], np.float64)
            self.square[key] = np.asarray(arrays[f"square/{key}"], np.float64)


def _continuous(space: gym.Space[Any]) -> bool:
    return isinstance(space, gym.spaces.Box) and space.dtype.kind == "f" and len(space.shape) <= 1
