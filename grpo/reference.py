"""What the KL is measured to: a policy as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo.protocols import SequencePolicy
from grpo.rollouts import Rollouts


class FrozenReference:
    """A policy that stays as it is, until the trainer syncs it; it is taken over, not copied."""

    def __init__(self, policy: SequencePolicy) -> None:
        self._policy = policy
        policy.eval()
        self._parameters = dict(policy.parameters())  # asked now: some policies name only what is trained
        for parameter in self._parameters.values():
            parameter.requires_grad_(False)

    @classmethod
    def copy_of(cls, policy: SequencePolicy) -> FrozenReference:
        """The policy as it is now."""
        return cls(copy.deepcopy(policy))

    @torch.no_grad()
    def score(self, rows: Rollouts) -> Tensor:
        """Its log-probs of the recorded decisions."""
        logp_NT: Tensor = self._policy.score(rows).logp_NT
        return logp_NT

    @torch.no_grad()
    def sync(self, policy: Mapping[str, Tensor], alpha: float) -> None:
        """reference ← α·policy + (1−α)·reference."""
        missing = sorted(set(policy) ^ set(self._parameters))
        if missing:
            raise ValueError(f"policy and reference have different parameters ({', '.join(missing[:3])}); cannot sync")
        for name, own in self._parameters.items():
            own.lerp_(policy[name].detach().to(own), alpha)

    def parameters(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps of it."""
        return self._parameters
