"""What imagined futures are worth: returns, their range, and a critic for the actors that want one.

Letters: H steps of a future, F numbers of a latent.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from grpo.protocols import State, as_part, part
from grpo.worldmodel.model.networks import TwoHotHead
from grpo.worldmodel.model.optimizer import LaProp, load_moments, moments

LOW, HIGH = 0.05, 0.95
"""Percentiles that a range lies between: outliers neither stretch nor hide it."""
DECAY = 0.99
"""Of the running mean of ranges."""


def discounted(reward_NH: Tensor, continue_NH: Tensor, last_N: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + γ c_t R_{t+1}, with R_H = `last_N`: (N, H)."""
    return lambda_returns(reward_NH, continue_NH, torch.zeros_like(reward_NH), last_N, gamma, 1.0)


def lambda_returns(
    reward_NH: Tensor, continue_NH: Tensor, value_NH: Tensor, last_N: Tensor, gamma: float, lam: float
) -> Tensor:
    """R_t = r_t + γ c_t ((1 − λ) v_{t+1} + λ R_{t+1}); `value_NH` are v_1 … v_H, R_H = `last_N`."""
    found, ahead_N = [], last_N
    for reward_N, continue_N, value_N in zip(
        reward_NH.unbind(1)[::-1], continue_NH.unbind(1)[::-1], value_NH.unbind(1)[::-1], strict=True
    ):
        ahead_N = reward_N + gamma * continue_N * ((1 - lam) * value_N + lam * ahead_N)
        found.append(ahead_N)
    return torch.stack(found[::-1], 1)


def as_rewards(return_NH: Tensor, gamma: float) -> Tensor:
    """Rewards whose discounted sums are these returns: r_t = R_t − γ R_{t+1}.

    Where the episode surely goes on that is the reward itself; where it may end, what lies beyond is taken off.
    """
    ahead_NH = torch.cat([return_NH[:, 1:], torch.zeros_like(return_NH[:, :1])], 1)
    return return_NH - gamma * ahead_NH


class ReturnNormalizer:
    """How far apart returns are: a running mean of the distance between two percentiles, at least 1."""

    def __init__(self) -> None:
        self.value: float | None = None

    def update(self, return_NH: Tensor) -> float:
        """Take in a batch; what to divide by."""
        low, high = torch.quantile(return_NH.flatten()[:: max(1, return_NH.numel() // 100_000)].float(),
                                   torch.tensor([LOW, HIGH], device=return_NH.device)).tolist()  # fmt: skip
        found = high - low
        self.value = found if self.value is None else DECAY * self.value + (1 - DECAY) * found
        return max(1.0, self.value)


class Critic:
    """The value of a latent as a distribution over bins, and a slow copy that keeps it from running away."""

    def __init__(self, width: int, units: int, layers: int, rate: float, slow_rate: float, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.network = TwoHotHead(width, units, layers)
        self._slow = copy.deepcopy(self.network).requires_grad_(False)
        self._slow_rate = slow_rate
        self._rate = rate
        self._optimizer = LaProp(self.network.parameters(), lr=rate, warmup=0)
        self.skipped = 0
        """Updates that were not finite."""

    def to(self, device: torch.device) -> Critic:
        """There, before it has learned anything."""
        self.network.to(device)
        self._slow.to(device)
        self._optimizer = LaProp(self.network.parameters(), lr=self._rate, warmup=0)
        return self

    @torch.no_grad()
    def value(self, flat: Tensor) -> Tensor:
        """(…, F) → (…)."""
        value: Tensor = self.network(flat).mean
        return value

    def learn(self, flat_NHF: Tensor, return_NH: Tensor, weight_NH: Tensor) -> float:
        """One update towards the returns, held near the slow copy; its loss."""
        said = self.network(flat_NHF)
        with torch.no_grad():
            slow_NH = self._slow(flat_NHF).mean
        loss = -((said.log_prob(return_NH) + said.log_prob(slow_NH)) * weight_NH).mean()
        self._optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in self.network.parameters() if p.grad is not None]
        if bool(torch.isfinite(loss) & torch.isfinite(torch.nn.utils.get_total_norm(grads))):
            self._optimizer.step()
            with torch.no_grad():
                for slow, own in zip(self._slow.parameters(), self.network.parameters(), strict=True):
                    slow.lerp_(own, self._slow_rate)
        else:
            self.skipped += 1
        return float(loss.detach())

    def state(self) -> State:
        """Both networks and the optimizer."""
        arrays = as_part("network", self.network.state_dict())
        arrays |= as_part("slow", self._slow.state_dict())
        kept = moments(self._optimizer)
        values = {"moments": sorted(kept), "skipped": self.skipped}
        return State(values, arrays | as_part("optimiser", kept))

    def load_state(self, state: State) -> None:
        """Go on from there."""
        self.skipped = int(state.values["skipped"])
        self.network.load_state_dict(part(state.arrays, "network"))
        self._slow.load_state_dict(part(state.arrays, "slow"))
        load_moments(self._optimizer, state.values["moments"], part(state.arrays, "optimiser"))
