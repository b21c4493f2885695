"""A T-maze: a sign at the entrance says which way to turn at the far end, and is not seen again.

    sign ─ ─ ─ ─ ─ ─ ─ ─ ─ ┤      the reward is 1 behind the turn that the sign showed, 0 behind the other one

A policy that sees only where it is now is right half of the time, however long it learns (Bakker 2001, Reinforcement
Learning with Long Short-Term Memory, has the task with other rewards).
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

LEFT, RIGHT, FORWARD = range(3)
"""Actions. In the corridor a turn leads against the wall, at its end going on does."""
WALL = -0.02
"""Reward for walking against a wall; small beside 1 and enough to hurry."""


class TMaze(gym.Env[np.ndarray, np.integer[Any]]):
    """`length` steps of corridor, then a turn; observation: [sign is left, sign is right, in the corridor, at its end].

    In the corridor every place looks the same. An episode ends with the turn, or after 4 · (length + 1) steps.
    """

    action_space = spaces.Discrete(3)
    observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)

    def __init__(self, length: int = 8) -> None:
        if length < 1:
            raise ValueError(f"a corridor has at least one step; got length={length}")
        self.length, self.max_steps = length, 4 * (length + 1)
        self._sign, self._at, self._t = LEFT, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """At the entrance, with another sign."""
        super().reset(seed=seed)
        self._sign, self._at, self._t = int(self.np_random.integers(2)), 0, 0
        return self._seen(), {}

    def step(self, action: np.integer[Any]) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """On, or a turn."""
        self._t += 1
        goes, there = int(action) == FORWARD, self._at == self.length
        self._at += goes and not there
        over = there and not goes
        right = over and int(action) == self._sign
        reward = float(right) if over else WALL * float(goes == there)
        return self._seen(), reward, over, self._t >= self.max_steps and not over, {"is_success": right}

    def _seen(self) -> np.ndarray:
        seen = np.zeros(4, np.float32)
        seen[self._sign if self._t == 0 else 3 if self._at == self.length else 2] = 1.0
        return seen
