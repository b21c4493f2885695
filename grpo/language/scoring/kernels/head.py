"""The Triton kernels between a head's logits and log-probs, one program a row.

    summarise      logits → log-sum-exp, the target's log-prob, entropy and Σπ², the row read once
    differentiate  logits → the gradient of the loss by them, written over them

Sums are kept relative to the highest logit so far, so that neither overflows nor cancels. Logarithms are to base 2
inside, which is what the hardware has.

Letters: M tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 4096
"""Columns that a program has in hand at once."""


class Summaries(NamedTuple):
    """What is kept of each token's distribution, float32."""

    logp_M: Tensor
    """Of the target."""
    lse_M: Tensor
    """log Σ exp(logit / temperature)."""
    entropy_M: Tensor | None
    sum_of_squares_M: Tensor | None
    """Σπ², the chance that two draws are the same."""


def room_for(count: int, entropy: bool, device: torch.device) -> Summaries:
    """Of so many tokens, to be filled; entropy: Σπ², too."""
    logp_M, lse_M, entropy_M, squares_M = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(4))
    return Summaries(logp_M, lse_M, entropy_M if entropy else None, squares_M if entropy else None)


@triton.jit
def _scaled(row_ptr, bias_ptr, v, in_v, scale, BIAS: tl.constexpr):
    x = tl.load(row_ptr + v, mask=in_v, other=float("-inf")).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + v, mask=in_v, other=0.0).to(tl.float32)
    return x * scale


@triton.jit
def _summarise(
    logits_ptr, bias_ptr, target_ptr, logp_ptr, lse_ptr, entropy_ptr, squares_ptr, vocabulary, stride, temperature,
    BIAS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    scale = 1.0 / (temperature * LN2)
    best = tl.full((), -1e38, tl.float32)  # below every logit, and finite: it is multiplied by an empty sum at first
    total = tl.zeros((), tl.float32)  # Σ 2^(x − best)
    moment = tl.zeros((), tl.float32)  # Σ 2^(x − best) · (x − best)
    squares = tl.zeros((), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = _scaled(logits_ptr, bias_ptr, v, v < vocabulary, scale, BIAS)
        higher = tl.maximum(best, tl.max(x, 0))
        less = tl.exp2(best - higher)
        above = x - higher
        weight = tl.exp2(above)
        if ENTROPY:
            moment = (moment + (best - higher) * total) * less
            moment += tl.sum(tl.where(weight == 0.0, 0.0, weight * above), 0)  # 0 · −∞ is 0 here
            squares = squares * less * less + tl.sum(weight * weight, 0)
        total = total * less + tl.sum(weight, 0)
        best = higher
    target = tl.load(target_ptr + row)
    x = _scaled(logits_ptr, bias_ptr, target, target >= 0, scale, BIAS)
    bits = tl.log2(total)
    tl.store(logp_ptr + row, (x - best - bits) * LN2)
    tl.store(lse_ptr + row, (best + bits) * LN2)
    if ENTROPY:
        tl.store(entropy_ptr + row, (bits - moment / total) * LN2)
        tl.store(squares_ptr + row, squares / (total * total))


@triton.jit
def _differentiate(
    logits_ptr, grad_ptr, bias_ptr, target_ptr, lse_ptr, entropy_ptr, d_logp_ptr, d_entropy_ptr,
    vocabulary, stride, grad_stride, temperature,
    BIAS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂logp/∂x = [target] − π and ∂H/∂x = −π (log π + H), for x = logits / temperature."""
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    grad_ptr += row.to(tl.int64) * grad_stride
    scale = 1.0 / (temperature * LN2)
    lse = tl.load(lse_ptr + row) / LN2
    target = tl.load(target_ptr + row)
    d_logp = tl.load(d_logp_ptr + row) / temperature
    if ENTROPY:
        d_entropy = tl.load(d_entropy_ptr + row) / temperature
        entropy = tl.load(entropy_ptr + row)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        bits = _scaled(logits_ptr, bias_ptr, v, v < vocabulary, scale, BIAS) - lse
        p = tl.exp2(bits)
        grad = tl.where(v == target, d_logp, 0.0) - d_logp * p
        if ENTROPY:
            grad -= tl.where(p == 0.0, 0.0, d_entropy * p * (bits * LN2 + entropy))
        # A narrower gradient takes the first half of its row's memory: a block is written where logits have been read
        # already, by every thread once they have met here.
        tl.debug_barrier()
        tl.store(grad_ptr + v, grad.to(grad_ptr.dtype.element_ty), mask=v < vocabulary)


def _block(vocabulary: int) -> int:
    return min(BLOCK_V, triton.next_power_of_2(vocabulary))


def summarise(
    logits_MV: Tensor, target_M: Tensor, temperature: float, bias_V: Tensor | None, out: Summaries, first: int = 0
) -> None:
    """Fill `out` from the row `first` on; its columns may be apart, not its rows' elements."""
    rows, vocabulary = logits_MV.shape
    mine = [None if value is None else value[first:] for value in out]
    absent = out.lse_M  # a pointer that nobody follows
    _summarise[(rows,)](
        logits_MV, absent if bias_V is None else bias_V, target_M,
        *(absent if value is None else value for value in mine),
        vocabulary, logits_MV.stride(0), temperature,
        BIAS=bias_V is not None, ENTROPY=out.entropy_M is not None, BLOCK=_block(vocabulary), num_warps=8,
    )  # fmt: skip


def differentiate(
    logits_MV: Tensor,
    target_M: Tensor,
    temperature: float,
    bias_V: Tensor | None,
    lse_M: Tensor,
    entropy_M: Tensor | None,
    d_logp_M: Tensor,
    d_entropy_M: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """d loss / d logits in `dtype`, no wider than the logits, whose memory it takes."""
    rows, vocabulary = logits_MV.shape
    grad_MV = logits_MV.view(dtype)[:, :vocabulary]
    absent = lse_M
    _differentiate[(rows,)](
        logits_MV, grad_MV, absent if bias_V is None else bias_V, target_M, lse_M,
        absent if entropy_M is None else entropy_M, d_logp_M, absent if d_entropy_M is None else d_entropy_M,
        vocabulary, logits_MV.stride(0), grad_MV.stride(0), temperature,
        BIAS=bias_V is not None, ENTROPY=d_entropy_M is not None, BLOCK=_block(vocabulary), num_warps=8,
    )  # fmt: skip
    return grad_MV
