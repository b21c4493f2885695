"""Preference feedback as group rewards: who won against whom, or who came first.

Both give a try's share of wins against the rest of its group, in [0, 1] with mean 0.5: a RewardModel like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Feedback:
    """A reward model without parameters, asked one group at a time."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def _wins(self, state: Any, actions: list[Any]) -> Tensor:
        """(G, G): how far row beat column; 0.5 on the diagonal."""
        raise NotImplementedError

    def compute_rewards(self, states: list[Any], actions: list[Any]) -> Tensor:
        """Win rate of each action."""
        size = self._group_size
        if len(actions) % size:
            raise ValueError(f"{len(actions)} actions are not whole groups of {size}; use the trainer's group_size")
        starts = range(0, len(actions), size)
        wins = [self._wins(states[i], actions[i : i + size]) for i in starts]
        return torch.cat([(table.sum(1) - 0.5) / (size - 1) for table in wins])

    def train(self) -> None:
        """Nothing to train."""

    def eval(self) -> None:
        """Nothing to switch."""

    def to(self, device: Any) -> _Feedback:
        """Nothing to move."""
        return self


class PairwiseReward(_Feedback):
    """`prefer(state, a, b)`: 1 if a is preferred, 0 if b is, 0.5 for neither, or a probability. Asked once a pair."""

    def __init__(self, prefer: Callable[[Any, Any, Any], float], group_size: int) -> None:
        super().__init__(group_size)
        self._prefer = prefer

    def _wins(self, state: Any, actions: list[Any]) -> Tensor:
        table = torch.full((len(actions), len(actions)), 0.5)
        for i, a in enumerate(actions):
            for j in range(i + 1, len(actions)):
                share = float(self._prefer(state, a, actions[j]))
                if not 0.0 <= share <= 1.0:
                    raise ValueError(f"prefer(state, a, b) must be in [0, 1], got {share} for actions {i} and {j}")
                table[i, j], table[j, i] = share, 1.0 - share
        return table


class RankedReward(_Feedback):
    """`rank(state, actions)`: the place of each action, 1 the best; equal places are ties."""

    def __init__(self, rank: Callable[[Any, list[Any]], Sequence[float]], group_size: int) -> None:
        super().__init__(group_size)
        self._rank = rank

    def _wins(self, state: Any, actions: list[Any]) -> Tensor:
        place = torch.tensor([float(p) for p in self._rank(state, list(actions))])
        if len(place) != len(actions):
            raise ValueError(f"rank(state, actions) returned {len(place)} places for {len(actions)} actions")
        return (place[:, None] < place[None, :]).float() + 0.5 * (place[:, None] == place[None, :]).float()
