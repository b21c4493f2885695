"""What the world model's heads say: categorical latents, rewards on symexp-spaced bins, whether an episode goes on.

Samples are made of uniform numbers, given or drawn from a given generator, so that an imagined future can be had again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

UNIMIX = 0.01
"""The share of a latent's probability that is spread evenly: no class is ever impossible, no KL infinite."""
BINS = 255
LARGEST = 20.0
"""The outermost bins are symexp(±LARGEST), about ±4.9e8."""


def symlog(x: Tensor) -> Tensor:
    """sign(x)·log(1 + |x|): large numbers small, small ones unchanged."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


def symexp_bins(count: int = BINS) -> Tensor:
    """An odd number of bins, symexp of evenly spaced points; negative and positive ones mirror each other exactly."""
    half = symexp(torch.linspace(0.0, LARGEST, count // 2 + 1))
    return torch.cat([-half[1:].flip(0), half])


@dataclass(frozen=True)
class TwoHot:
    """A distribution over bins of increasing values; a number between two bins is a mixture of both."""

    logits: Tensor
    """(…, K)."""
    bins_K: Tensor

    @property
    def mean(self) -> Tensor:
        """Expected value. Mirrored bins are subtracted before anything is summed: even logits give exactly 0."""
        probs, middle = self.logits.softmax(-1), len(self.bins_K) // 2
        return ((probs[..., middle + 1 :] - probs[..., :middle].flip(-1)) * self.bins_K[middle + 1 :]).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Minus the cross entropy to the two bins around each value, (…); beyond the outermost bins, to those."""
        low, high = self.bins_K[0], self.bins_K[-1]
        value = value.to(self.bins_K).clamp(low, high).contiguous()
        below = (torch.searchsorted(self.bins_K, value, right=True) - 1).clamp(0, len(self.bins_K) - 2)
        left, right = self.bins_K[below], self.bins_K[below + 1]
        share = (value - left) / (right - left)
        logp = self.logits.log_softmax(-1).gather(-1, torch.stack([below, below + 1], -1))
        return logp[..., 0] * (1 - share) + logp[..., 1] * share


@dataclass(frozen=True)
class Bernoulli:
    """Whether it happens, by its logit."""

    logit: Tensor

    @property
    def mean(self) -> Tensor:
        """The probability that it does."""
        return self.logit.sigmoid()

    def log_prob(self, value: Tensor) -> Tensor:
        """Of what happened: 0, 1 or a share between them."""
        return -F.binary_cross_entropy_with_logits(self.logit, value.to(self.logit), reduction="none")


def uniform(shape: Sequence[int], random: torch.Generator | Tensor | None, like: Tensor) -> Tensor:
    """Numbers in [0, 1) on the device of `like`: those given, or drawn from a generator, which may live elsewhere."""
    if isinstance(random, Tensor):
        return random.to(like).reshape(*shape)
    device = like.device if random is None else random.device
    return torch.rand(*shape, generator=random, device=device, dtype=like.dtype).to(like.device)


def there(random: torch.Generator, device: torch.device) -> torch.Generator:
    """`random` where it lives on that device; else a generator there, seeded by it: many numbers need not travel."""
    if random.device.type == device.type:
        return random
    made = torch.Generator(device)
    return made.manual_seed(int(torch.randint(2**62, (), generator=random)))


def shares(logits: Tensor) -> Tensor:
    """Softmax over the classes of (…, S, C), which lie outermost in memory: few of them make it many times faster."""
    return logits.transpose(-1, -2).contiguous().softmax(-2).transpose(-1, -2)


def unimix(probs: Tensor) -> Tensor:
    """Probabilities with UNIMIX of the uniform distribution."""
    return probs * (1 - UNIMIX) + UNIMIX / probs.shape[-1]


def mixed(logits: Tensor) -> Tensor:
    """Probabilities of a latent's classes."""
    return unimix(shares(logits))


def one_hot(probs: Tensor, uniform: Tensor) -> Tensor:
    """A class for each distribution in (…, S, C), by inverting its distribution function at `uniform` (…, S)."""
    cumulative = probs.transpose(-1, -2).cumsum(-2)
    point = uniform[..., None, :] * cumulative[..., -1:, :]
    chosen = (cumulative[..., :-1, :] <= point).sum(-2, keepdim=True)
    return torch.zeros_like(cumulative).scatter_(-2, chosen, 1.0).transpose(-1, -2)


def straight_through(logits: Tensor, uniform: Tensor) -> Tensor:
    """One-hot samples, exactly; their gradient is that of the probabilities."""
    probs = mixed(logits)
    sample = one_hot(probs.detach(), uniform)
    return sample + (probs - probs.detach()) if probs.requires_grad else sample


@dataclass(frozen=True)
class Latents:
    """Categorical latents (…, S, C) by their probabilities, whose logarithms are taken once."""

    probs: Tensor
    log: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Latents:
        """`mixed`."""
        probs = mixed(logits)
        return cls(probs, probs.log())

    def detach(self) -> Latents:
        """The same without gradients."""
        return Latents(self.probs.detach(), self.log.detach())

    def kl(self, other: Latents) -> Tensor:
        """KL(self ‖ other) of all latents together, (…)."""
        return (self.probs * (self.log - other.log)).sum((-2, -1))

    def entropy(self) -> Tensor:
        """Of all latents together, (…)."""
        return -(self.probs * self.log).sum((-2, -1))
