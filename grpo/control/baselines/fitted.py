"""A value without a network to train: linear in fixed random features, solved in closed form (LSTD(λ)).

Of a decision s, let g_s be the sum over t ≥ s of (γλ)^(t−s) times the reward, and u_s the same sum of φ_t − γ·φ_(t+1),
where φ are the features, zero after an end. Then GAE(γ, λ) of the value w·φ is g_s − u_s·w, linear in w, and w solves

    Σ_s φ_s (g_s − u_s·w) = 0        plus a ridge penalty

so that nothing linear in the features is left in the advantages. With λ = 1 and whole episodes it is least squares of
the returns. There is no gradient, no target and no learning rate.

Rows are judged by the other half of the step's rows and by what earlier steps left of both sums, which fades: never by
themselves. Unlike the group's means it bootstraps, so rows may be windows of episodes.

Letters: M decisions, F features, D numbers of an observation, H random ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.config import ConfigError
from grpo.control.config import ControlConfig
from grpo.control.play import Episodes
from grpo.control.scaling import Scaling
from grpo.envs.fleet import Tree
from grpo.envs.spaces import flatten, layout, take
from grpo.seeding import generator

RIDGE = 1e-3
"""Penalty on a weight's square, a decision; the constant pays none."""
REACH = 5.0
"""Deviations from the mean beyond which a feature's input no longer grows."""


class FittedValue:
    """V(o) = w·φ(o) with φ = [z, z², tanh(Wz + c), 1] of the scaled observation z."""

    def __init__(self, space: gym.Space[Any], config: ControlConfig) -> None:
        self._layout = layout(space)
        if self._layout.pictures:
            raise ConfigError("advantage=fitted reads numbers, not pictures; use step, leave_one_out or critic")
        size, random = self._layout.size, generator(config.seed, 7)
        self._scaling = Scaling(gym.spaces.Box(-np.inf, np.inf, (size,)), True)
        self._slope_DH = random.normal(0.0, 1.0 / np.sqrt(size), (size, config.baseline_features))
        self._shift_H = random.uniform(-1.0, 1.0, config.baseline_features)
        self._gamma, self._lam = config.recipe.gamma, config.gae_lambda
        self._kept = config.baseline_memory
        count = 2 * size + config.baseline_features + 1
        self._left, self._right, self._count = np.zeros((count, count)), np.zeros(count), 0.0
        """Σ φ·uᵀ, Σ φ·g and the decisions that they are of, faded."""

    def features(self, observation: Tree) -> np.ndarray:
        """(M, F) of M observations as the environment gave them."""
        z_MD = np.clip(self._scaling(flatten(observation, self._layout)), -REACH, REACH).astype(np.float64)
        curved_MH = np.tanh(z_MD @ self._slope_DH + self._shift_H)
        return np.concatenate([z_MD, z_MD**2 / REACH, curved_MH, np.ones((len(z_MD), 1))], axis=1)

    def baseline(
        self, episodes: Episodes, reward_NT: np.ndarray, return_NT: np.ndarray, half_N: np.ndarray
    ) -> np.ndarray:
        """return − GAE for each decision; then the sums take these rows in."""
        mask_NT = episodes.mask_NT & episodes.ok_N[:, None]  # nobody knows what came after a failure
        baseline_NT = return_NT.astype(np.float64)
        if not mask_NT.any():
            return baseline_NT
        seen = take(episodes.raw, mask_NT)
        self._scaling.update(flatten(seen, self._layout))
        phi_MF = self.features(seen)
        u_MF, g_M = self._to_go(episodes, mask_NT, phi_MF, reward_NT[mask_NT])
        half_M = np.repeat(half_N[:, None], mask_NT.shape[1], 1)[mask_NT]
        sums = [(phi.T @ u_MF[mine], phi.T @ g_M[mine], len(phi)) for mine in (half_M == 0, half_M == 1)
                for phi in (phi_MF[mine],)]  # fmt: skip
        gain_M = np.zeros(len(g_M))
        for half, (left, right, count) in enumerate(reversed(sums)):
            weight_F = _solved(self._left + left, self._right + right, self._count + count)
            gain_M[half_M == half] = (g_M - u_MF @ weight_F)[half_M == half]
        self._left = self._kept * (self._left + sums[0][0] + sums[1][0])
        self._right = self._kept * (self._right + sums[0][1] + sums[1][1])
        self._count = self._kept * (self._count + len(g_M))
        baseline_NT[mask_NT] -= gain_M
        return baseline_NT

    def _to_go(
        self, episodes: Episodes, mask_NT: np.ndarray, phi_MF: np.ndarray, reward_M: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """u and g of each decision, row after row; where a row was cut off, the features of what came next go in."""
        length_N = mask_NT.sum(1)
        end_N = length_N.cumsum()
        following_MF = np.append(phi_MF[1:], phi_MF[:1], axis=0)
        following_MF[end_N[length_N > 0] - 1] = 0.0
        cut_N = episodes.truncated_N & ~episodes.terminated_N & (length_N > 0)
        if cut_N.any():
            following_MF[end_N[cut_N] - 1] = self.features(take(episodes.last, cut_N))
        u_MF, g_M = phi_MF - self._gamma * following_MF, reward_M.astype(np.float64)
        first_N, fade = end_N - length_N, self._gamma * self._lam
        for t in reversed(range(int(length_N.max()) - 1)):
            at = first_N[length_N > t + 1] + t
            u_MF[at] += fade * u_MF[at + 1]
            g_M[at] += fade * g_M[at + 1]
        return u_MF, g_M

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps; the random features come from the seed."""
        sums = {"left": self._left, "right": self._right, "count": np.array([self._count, self._scaling.count])}
        return sums | {f"scaling/{name}": value for name, value in self._scaling.arrays().items()}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._left, self._right = (np.asarray(arrays[name], np.float64) for name in ("left", "right"))
        self._count, seen = (float(x) for x in arrays["count"])
        self._scaling.load(seen, {name: arrays[f"scaling/{name}"] for name in self._scaling.arrays()})


def _solved(left_FF: np.ndarray, right_F: np.ndarray, count: float) -> np.ndarray:
    """w, with the penalty in proportion to the decisions; nothing known: zero."""
    penalty_F = np.full(len(right_F), RIDGE * max(count, 1.0))
    penalty_F[-1] = 1e-9
    return np.linalg.solve(left_FF + np.diag(penalty_F), right_F)
