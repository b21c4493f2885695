"""Causal attention of one long range of tokens to itself by cuDNN's kernel: no ranges, but nearly twice as fast.

cuDNN plans a kernel for every length, which takes a tenth of a second: lengths are rounded up, at most by a sixteenth,
but for those that are so long that copies would cost more. What is added comes last, where no other token looks; on the
way back its log-sum-exps are so high that it weighs nothing.

Letters: N tokens of the range, P with those that were added.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.language.scoring.flash import TokenRanges, flash_backward, flash_forward

LONG = 4096
"""Tokens of a range from which on this is faster than the kernel for all ranges at once."""
EXACT = 32_768
"""Tokens from which on lengths are left as they are."""
OUT_OF_REACH = 1e30


def usable(q: Tensor, k: Tensor) -> bool:
    """Whether there is such a kernel for these heads; it is tried once beside the other."""
    return q.is_cuda and _agrees(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])


def rounded(length: int) -> int:
    """Up to sixteenths of a power of two."""
    if length >= EXACT:
        return length
    step = max(1 << max(length.bit_length() - 5, 0), 1)
    return -(-length // step) * step


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """(N, heads, width) what is found, (heads, N) log-sum-exps, and what the backward pass needs."""
    length, size = len(q), rounded(len(q))
    out, lse, random = _kernel(_padded(q, size), _padded(k, size), _padded(v, size), scale)
    return out[:length], lse[:, :length], random


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q, k and v."""
    length, size = len(q), rounded(len(q))
    high = torch.nn.functional.pad(lse, (0, size - length), value=OUT_OF_REACH).contiguous()
    grad, q, k, v, out = (_padded(x, size) for x in (grad, q, k, v, out))
    dq, dk, dv = _kernel_backward(grad, q, k, v, out, high, random, scale)
    return dq[:length], dk[:length], dv[:length]


def _padded(x: Tensor, size: int) -> Tensor:
    if len(x) == size:
        return x
    whole = x.new_zeros(size, *x.shape[1:])
    whole[: len(x)] = x
    return whole


def _kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    given = (x[None].transpose(1, 2) for x in (q, k, v))
    out, lse, _, _, _, _, *random, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *given, None, True, 0.0, True, False, scale=scale
    )
    return out[0].transpose(0, 1).contiguous(), lse.reshape(lse.shape[1:3]), random


def _kernel_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    call: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    given = (x[None].transpose(1, 2) for x in (grad, q, k, v, out))
    found = call(*given, lse[None, :, :, None], *random, None, None, None, len(q), len(q), 0.0, True, scale=scale)
    dq, dk, dv = (x[0].transpose(0, 1) for x in found)
    return dq, dk, dv


@functools.cache
def _agrees(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> bool:
    """Forward and back beside the kernel for ranges, of a length that is rounded up."""
    drawn = torch.Generator(device).manual_seed(0)
    shapes = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (torch.randn(130, n, width, generator=drawn, device=device).to(dtype) for n in shapes)
    where, scale = TokenRanges.of([len(q)], device), width**-0.5
    try:
        out, lse, random = flash_forward(q, k, v, where, where, True, scale)
        expected = out, lse, *flash_backward(grad, q, k, v, out, lse, random, where, where, True, scale)
        out, lse, random = forward(q, k, v, scale)
        found = out, lse, *backward(grad, q, k, v, out, lse, random, scale)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):  # this torch, this device or these heads
        return False
    return all(bool((a.float() - b.float()).norm() <= 2e-2 * b.float().norm())
               for a, b in zip(found, expected, strict=True))  # fmt: skip
