"""Whole episodes as they were played, whoever played them; nothing here needs more than NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from grpo.control.config import ControlConfig

if TYPE_CHECKING:
    from grpo.envs.fleet import Tree


@dataclass(frozen=True)
class Episodes:
    """N episodes of up to T decisions, as played."""

    observation: Tree
    """(N, T, …), as the policy saw them."""
    raw: Tree
    """(N, T, …), as the environment gave them; the same arrays where nothing is scaled."""
    action_NT: np.ndarray
    """(N, T, …), as the head records them."""
    logp_NT: np.ndarray
    out_NTF: np.ndarray | None
    """The policy's numbers for each decision, where they were asked for."""
    reward_NT: np.ndarray
    mask_NT: np.ndarray
    offset_N: np.ndarray
    """Decisions made before the row begins: 0, or where a continuation branched off."""
    terminated_N: np.ndarray
    truncated_N: np.ndarray
    success_N: np.ndarray
    """1, 0, or NaN where the environment does not tell."""
    last: Tree
    """(N, …): what was seen after the last decision, raw."""
    errors: Mapping[int, str]
    """Row → what went wrong."""
    steps_N: np.ndarray
    """Environment steps of each row; more than its decisions where an action is held."""

    @property
    def env_steps(self) -> int:
        """Environment steps in all."""
        return int(self.steps_N.sum())

    def __len__(self) -> int:
        return len(self.mask_NT)

    @property
    def return_N(self) -> np.ndarray:
        """Sum of the environment's rewards."""
        return np.asarray(np.where(self.mask_NT, self.reward_NT, 0.0).sum(1))

    @property
    def length_N(self) -> np.ndarray:
        """Decisions made."""
        return np.asarray(self.mask_NT.sum(1))

    @property
    def ok_N(self) -> np.ndarray:
        """Rows that did not fail."""
        ok_N = np.ones(len(self), bool)
        ok_N[list(self.errors)] = False
        return ok_N


def measured(episodes: Episodes) -> dict[str, float | None]:
    """Whole episodes as the environment scores them, but for those that failed."""
    ok_N = episodes.ok_N
    returns, lengths = episodes.return_N[ok_N], episodes.steps_N[ok_N]
    return {
        "return": float(returns.mean()) if len(returns) else None,
        "return_std": float(returns.std()) if len(returns) else None,
        "episode_length": float(lengths.mean()) if len(lengths) else None,
    }


def learned_from(episodes: Episodes, config: ControlConfig) -> np.ndarray:
    """Rewards as the algorithm sees them."""
    reward_NT, most = np.where(episodes.mask_NT, episodes.reward_NT, 0.0), config.clip_rewards
    return (reward_NT if most is None else reward_NT.clip(-most, most)) * config.reward_scale
