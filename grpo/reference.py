"""What the KL is measured to: an actor as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo.protocols import SequencePolicy
from grpo.rollouts import Rollouts


class FrozenActor:
    """The policy as it was when this was made, until the trainer syncs it."""

    def __init__(self, policy: SequencePolicy) -> None:
        self._policy = copy.deepcopy(policy)
        self._parameters = dict(self._policy.parameters())
        for parameter in self._parameters.values():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def score(self, rows: Rollouts) -> Tensor:
        """Its log-probs of the recorded actions."""
        return self._policy.score(rows).logp_NT

    @torch.no_grad()
    def sync(self, policy: Mapping[str, Tensor], alpha: float) -> None:
        """reference ← α·policy + (1−α)·reference."""
        for name, own in self._parameters.items():
            own.lerp_(policy[name].detach().to(own), alpha)

    def parameters(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps of it."""
        return self._parameters
