"""The flash kernel that torch carries, for ranges of tokens of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRanges:
    """Consecutive ranges of tokens: where each begins, and where the last one ends."""

    starts: Tensor
    """int32"""
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> TokenRanges:
        """Of these lengths."""
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(starts.to(device), max(lengths, default=0))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, at_q: TokenRanges, at_k: TokenRanges, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """(L, heads, width) what is found, (heads, L) log-sum-exps, and what the backward pass needs."""
    out, lse, *random, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, at_q.starts, at_k.starts, at_q.longest, at_k.longest, 0.0, causal, False, scale=scale
    )
    return out, lse, random


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Sequence[Tensor],
    at_q: TokenRanges,
    at_k: TokenRanges,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q, k and v."""
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, at_q.starts, at_k.starts, at_q.longest, at_k.longest, 0.0, causal, *random, scale=scale
    )
    return grads
