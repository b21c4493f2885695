"""What a future is worth beyond its last step, without a network to train: a value that is linear in fixed random
features of the latent and solved in closed form from imagined futures (LSTD(λ), as `advantage=fitted` in control).

With φ the features of a state, c the chance that the episode goes on and r the reward of the step that follows,

    u_t = φ_t − γ c_t φ_(t+1) + γ λ c_t u_(t+1)        g_t = r_t + γ λ c_t g_(t+1)

are linear in nothing but the value's weights w, which solve Σ φ_t (g_t − u_t·w) = 0 plus a ridge penalty. There is no
gradient, no target network and no learning rate.

A start's futures are valued by those of the other half of the starts and by what earlier steps left of both sums, which
fades as actor and latents change: never by themselves.

Letters: N futures of H steps, F numbers of a latent, K features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from grpo.protocols import State

FEATURES = 256
"""Random ones, beside a constant."""
SLOPE = 1.5
"""Deviation of a random feature's input, where a latent's numbers are of size 1."""
KEPT = 0.9
"""Of the sums, from a step to the next: latents of a model that learns do not mean the same for long."""
RIDGE = 1e-4
"""Penalty on a weight's square, a decision; the constant pays none."""
DOUBT = 2.0
"""Penalty beside it, for each of the K weights, however many decisions there are: while they are few, what K weights
find in them is mostly noise, and the tail says little."""


class FittedTail:
    """V(z) = w·φ(z) with φ = [tanh(Wz + c), 1] of a latent z."""

    def __init__(self, width: int, gamma: float, lam: float, seed: int, device: torch.device) -> None:
        random = torch.Generator().manual_seed(seed)
        self._slope_FK = (torch.randn(width, FEATURES, generator=random) * (SLOPE / width**0.5)).to(device)
        self._shift_K = (torch.rand(FEATURES, generator=random) * 2 - 1).to(device)
        self._gamma, self._lam = gamma, lam
        self._left, self._right, self._count = np.zeros((FEATURES + 1,) * 2), np.zeros(FEATURES + 1), 0.0
        """Σ φ·uᵀ, Σ φ·g and the decisions that they are of, faded."""
        self.skipped = 0
        """Halves of a step that were not finite, and so not taken in."""

    @torch.no_grad()
    def features(self, flat: Tensor) -> Tensor:
        """(…, F) → (…, K)."""
        curved = torch.tanh(flat.float() @ self._slope_FK + self._shift_K)
        return torch.cat([curved, torch.ones_like(curved[..., :1])], -1)

    @torch.no_grad()
    def value(
        self, flat: Tensor, reward_NH: Tensor, continue_NH: Tensor, weight_NH: Tensor, group: int, learn: bool
    ) -> Tensor:
        """(N,): of where each future ends; flat (N, H + 1, F). learn: the sums take these futures in afterwards."""
        phi = self.features(flat)
        u, g_NH = self._to_go(phi, reward_NH, continue_NH)
        half_N = torch.arange(len(phi), device=phi.device) // group % 2
        found = [_sums(phi[mine, :-1], u[mine], g_NH[mine], weight_NH[mine]) for mine in (half_N == 0, half_N == 1)]
        sums = [half if _finite(*half) else (0.0, 0.0, 0.0) for half in found]
        value_N = torch.zeros_like(reward_NH[:, 0])
        for half, (left, right, count) in enumerate(reversed(sums)):
            weight_K = _solved(self._left + left, self._right + right, self._count + count)
            mine = half_N == half
            value_N[mine] = phi[mine, -1] @ torch.as_tensor(weight_K, dtype=phi.dtype, device=phi.device)
        if learn:
            self.skipped += sum(not _finite(*half) for half in found)
            self._left = KEPT * (self._left + sums[0][0] + sums[1][0])
            self._right = KEPT * (self._right + sums[0][1] + sums[1][1])
            self._count = KEPT * (self._count + sums[0][2] + sums[1][2])
        return value_N

    def _to_go(self, phi: Tensor, reward_NH: Tensor, continue_NH: Tensor) -> tuple[Tensor, Tensor]:
        """u (N, H, K) and g (N, H) of every decision."""
        u, g, ahead, earned_N = [], [], torch.zeros_like(phi[:, 0]), torch.zeros_like(reward_NH[:, 0])
        for t in reversed(range(reward_NH.shape[1])):
            on_N = self._gamma * continue_NH[:, t]
            ahead = phi[:, t] + on_N[:, None] * (self._lam * ahead - phi[:, t + 1])
            earned_N = reward_NH[:, t] + self._lam * on_N * earned_N
            u.append(ahead)
            g.append(earned_N)
        return torch.stack(u[::-1], 1), torch.stack(g[::-1], 1)

    def state(self) -> State:
        """The sums; the random features come from the seed."""
        arrays = {"left": torch.from_numpy(self._left.copy()), "right": torch.from_numpy(self._right.copy())}
        return State({"count": self._count, "skipped": self.skipped}, arrays)

    def load_state(self, state: State) -> None:
        """Go on from there."""
        left, right = (np.asarray(state.arrays[name], np.float64).copy() for name in ("left", "right"))
        count = float(state.values["count"])
        if not _finite(left, right, count):  # older states kept what was not
            left, right, count = np.zeros_like(left), np.zeros_like(right), 0.0
        self._left, self._right, self._count = left, right, count
        self.skipped = int(state.values.get("skipped", 0))


def _sums(phi: Tensor, u: Tensor, g_NH: Tensor, weight_NH: Tensor) -> tuple[np.ndarray, np.ndarray, float]:
    """Σ φ·uᵀ, Σ φ·g and how many decisions those are, each by the chance to get there."""
    weighed = (phi * weight_NH[..., None]).flatten(0, 1)
    left, right = weighed.T @ u.flatten(0, 1), weighed.T @ g_NH.flatten()
    return left.double().cpu().numpy(), right.double().cpu().numpy(), float(weight_NH.sum())


def _finite(*sums: np.ndarray | float) -> bool:
    return all(bool(np.isfinite(x).all()) for x in sums)


def _solved(left_KK: np.ndarray, right_K: np.ndarray, count: float) -> np.ndarray:
    """w, with a penalty in proportion to the decisions, and one that counts while they are few."""
    penalty_K = np.full(len(right_K), RIDGE * max(count, 1.0) + DOUBT * len(right_K))
    penalty_K[-1] = 1e-6 * max(count, 1.0)
    return np.asarray(np.linalg.solve(left_KK + np.diag(penalty_K), right_K))
