"""A learned value function, for an honest comparison: GRPO needs none.

A = GAE(γ, λ) of the critic, handed over as the baseline return − A. Unlike the group's baselines it bootstraps, also
where a time limit cut an episode off.

Letters: M decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from grpo.control.config import ControlConfig
from grpo.control.networks import make_network, tensors
from grpo.control.play import Episodes
from grpo.control.scaling import Scaling
from grpo.envs.spaces import take
from grpo.optimizers import Adam

ROWS = 256
"""Decisions in one step of its optimizer."""


class LearnedValue:
    """V(o), fitted to λ-returns after each collection."""

    def __init__(self, space: gym.Space[Any], config: ControlConfig) -> None:
        self._config = config
        self._network = make_network(space, 1, hidden=config.hidden, activation=config.activation, seed=config.seed + 1)
        self._optimizer = Adam(self._network.parameters(), lr=config.critic_learning_rate)
        self._mean, self._deviation, self._seen = 0.0, 1.0, False

    @torch.no_grad()
    def values(self, observation: Any) -> np.ndarray:
        """V of M observations, in units of return."""
        out = self._network(tensors(observation))[:, 0].double().numpy()
        return np.asarray(out * self._deviation + self._mean)

    def baseline(
        self, episodes: Episodes, reward_NT: np.ndarray, return_NT: np.ndarray, scaling: Scaling
    ) -> np.ndarray:
        """return − GAE for each decision; then the critic learns from these episodes."""
        mask_NT = episodes.mask_NT & episodes.ok_N[:, None]  # nobody knows what came after a failure
        gamma, lam = self._config.recipe.gamma, self._config.gae_lambda
        rows, steps = mask_NT.shape
        value_NT = np.zeros((rows, steps + 1))
        value_NT[:, :-1][mask_NT] = self.values(take(episodes.observation, mask_NT))
        cut_N = episodes.truncated_N & ~episodes.terminated_N
        if cut_N.any():
            after_N = self.values(take(scaling(episodes.last), cut_N))
            value_NT[np.flatnonzero(cut_N), episodes.length_N[cut_N]] = after_N
        gain_NT, running_N = np.zeros((rows, steps)), np.zeros(rows)
        for t in reversed(range(steps)):
            surprise_N = reward_NT[:, t] + gamma * value_NT[:, t + 1] - value_NT[:, t]
            running_N = np.where(mask_NT[:, t], surprise_N + gamma * lam * running_N, 0.0)
            gain_NT[:, t] = running_N
        if mask_NT.any():
            self._learn(take(episodes.observation, mask_NT), (gain_NT + value_NT[:, :-1])[mask_NT])
        return np.asarray(return_NT - gain_NT)

    def _learn(self, observation: Any, target_M: np.ndarray) -> None:
        if not self._seen:  # units of the first returns: the network works with numbers around 1
            self._mean, self._deviation, self._seen = float(target_M.mean()), float(target_M.std()) or 1.0, True
        target = torch.as_tensor((target_M - self._mean) / self._deviation, dtype=torch.float32)
        seen = tensors(observation)
        order = torch.Generator().manual_seed(len(target_M))
        for _ in range(self._config.critic_passes):
            for index in torch.split(torch.randperm(len(target), generator=order), ROWS):
                value_M = self._network(take(seen, index))[:, 0]
                loss = (value_M - target[index]).square().mean()
                self._optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self._network.parameters(), 0.5)
                self._optimizer.step()

    def arrays(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: weights, the optimizer's moments, the units."""
        kept = {f"weight/{name}": value.detach().clone() for name, value in self._network.named_parameters()}
        for number, entry in self._optimizer.state_dict()["state"].items():
            kept |= {f"moment/{number}/{key}": torch.as_tensor(value).clone() for key, value in entry.items()}
        return kept | {"units": torch.tensor([self._mean, self._deviation, float(self._seen)], dtype=torch.float64)}

    @torch.no_grad()
    def load(self, arrays: Mapping[str, Any]) -> None:
        """Go on from there."""
        for name, parameter in self._network.named_parameters():
            parameter.copy_(torch.as_tensor(arrays[f"weight/{name}"]))
        state = self._optimizer.state_dict() | {"state": {}}
        for name, value in arrays.items():
            kind, _, rest = name.partition("/")
            if kind == "moment":
                number, _, key = rest.partition("/")
                state["state"].setdefault(int(number), {})[key] = torch.as_tensor(value).clone()
        self._optimizer.load_state_dict(state)
        self._mean, self._deviation, seen = (float(x) for x in arrays["units"])
        self._seen = bool(seen)
