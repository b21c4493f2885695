"""Between what an action head records and what the world model reads; and drawing actions for many futures at once.

The model reads an action as numbers in [−1, 1]: a choice as one-hot, a switch as ±1, a Box in units of its bounds.

Letters: A numbers of a code, F numbers that the actor gives for a decision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo.envs.heads import Bernoulli, Choices, Gaussian, Head, Real

TINY = 1e-20
"""The smallest uniform number whose double logarithm is taken."""


class Actions:
    """Codes and draws for one action head."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._shape = head.shape
        """Of what is random about a decision: a number for each value of each choice, or for each real number."""
        if isinstance(head, Choices):
            like = next(head.buffers(), torch.zeros(0))
            self._shape = tuple(head.logits(torch.zeros(1, head.size, device=like.device)).shape[1:])
        self.width = math.prod(head.shape if isinstance(head, Bernoulli) else self._shape)
        """Numbers of a code."""

    def code(self, recorded: Tensor) -> Tensor:
        """(…, *shape) as the head records it → (…, A)."""
        if isinstance(self.head, Bernoulli):
            return 2.0 * recorded.float() - 1.0
        if isinstance(self.head, Choices):
            hot = (recorded[..., None] == torch.arange(self._shape[-1], device=recorded.device)).float()
            return hot.flatten(-2) if self.head.shape else hot
        assert isinstance(self.head, Real)
        unit: Tensor = self.head.unit(recorded)
        return unit.clamp(-1.0, 1.0)

    def noise(self, lead: tuple[int, ...], random: torch.Generator, like: Tensor) -> Tensor:
        """All that is random about so many decisions, on the device of `like`."""
        if not isinstance(self.head, Choices):
            return torch.randn(*lead, *self._shape, generator=random, device=random.device).to(like)
        uniform = torch.rand(*lead, *self._shape, generator=random, device=random.device).clamp(min=TINY)
        return -torch.log((-torch.log(uniform)).clamp(min=TINY)).to(like)  # Gumbel: its argmax is a categorical draw

    def draw(self, out_NF: Tensor, noise: Tensor) -> Tensor:
        """Records of N decisions."""
        if isinstance(self.head, Choices):
            chosen_N: Tensor = (self.head.logits(out_NF) + noise).argmax(-1)
            return chosen_N
        assert isinstance(self.head, Gaussian)
        mean, log_std = self.head.describe(out_NF).chunk(2, -1)
        return mean + log_std.exp() * noise
