"""A trained policy outside of training: it decides for several episodes at once, from their observations alone.

players = Players(policy, scaling, rules, rows=1)
action_M = players.decide(stacked_observations)      # one row an episode; memory and chunks are kept in between
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.fleet import Tree
from grpo.envs.rules import EpisodeRules
from grpo.envs.spaces import take


class Players:
    """The policy in M episodes: what it remembers of each, and the actions it has decided on ahead."""

    def __init__(self, policy: ActorPolicy, scaling: Scaling, rules: EpisodeRules, rows: int, seed: int = 0) -> None:
        policy.eval()
        self._policy, self._scaling, self._times = policy, scaling, rules.action_repeat
        self._memory = policy.begin(rows)
        self._ahead: list[deque[Any]] = [deque() for _ in range(rows)]
        self._random = np.random.default_rng(seed)

    @property
    def remembers(self) -> bool:
        """A memory, or actions that were decided on ahead."""
        return self._memory is not None or any(self._ahead)

    def __repr__(self) -> str:
        return f"<what the policy remembers of {len(self._ahead)} episode(s)>"

    def decide(self, observation: Tree, greedy: bool = True) -> np.ndarray:
        """Actions for what all of them see now."""
        free = [row for row, ahead in enumerate(self._ahead) if not ahead]
        if free:
            memory = None if self._memory is None else self._memory[free]
            acted = self._policy.act(self._scaling(take(observation, free)), None if greedy else self._random, memory)
            if self._memory is not None:
                self._memory = self._memory.clone()
                self._memory[free] = acted.memory
            action_C = self._policy.head.to_env(acted.recorded)
            chunk = len(action_C) // len(free)
            for at, row in enumerate(free):
                some = action_C[at * chunk : (at + 1) * chunk]
                self._ahead[row].extend(action for action in some for _ in range(self._times))
        return np.stack([ahead.popleft() for ahead in self._ahead])

    def forget(self, first_M: np.ndarray) -> None:
        """Where True, another episode begins."""
        for row in np.flatnonzero(first_M):
            self._ahead[row].clear()
        if self._memory is not None:
            fresh_M = torch.tensor(first_M).reshape(-1, *[1] * (self._memory.ndim - 1))
            self._memory = torch.where(fresh_M, self._policy.begin(len(first_M)), self._memory)
