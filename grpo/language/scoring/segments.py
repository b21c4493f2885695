"""Attention of a flat row of tokens in which a group's completions share their prompt: no masks, no padding.

    prompt₁ prompt₂ … │ its completions …, its completions …

Every segment attends to itself, causally; completions also attend to their prompt, all of it. These are two calls of
the flash kernel that torch carries, for ranges of different lengths; their results are merged by their log-sum-exps,
which is exact. Backward, each call is given the merged result: with it the kernel finds its share of the gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

INTERFACE = "grpo_segments"
"""Among transformers' attention functions: `sdpa`, unless it is given segments."""


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


@dataclass(frozen=True)
class Segments:
    """What attends to what."""

    each: TokenRanges
    """All prompts, then all completions."""
    prompts: TokenRanges
    groups: TokenRanges
    """The completions of each prompt, counted from the first of all completions."""
    prompt_tokens: int

    @classmethod
    def of(cls, prompts: Sequence[int], completions: Sequence[Sequence[int]], device: torch.device) -> Segments:
        """Of prompts of these lengths, and their completions'."""
        flat = [length for group in completions for length in group]
        return cls(
            TokenRanges.of([*prompts, *flat], device),
            TokenRanges.of(prompts, device),
            TokenRanges.of([sum(group) for group in completions], device),
            sum(prompts),
        )


# --- the flash kernel that torch carries ----------------------------------------------------------------------------


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, at_q: TokenRanges, at_k: TokenRanges, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """(L, heads, width) what is found, (heads, L) log-sum-exps, and what the backward pass needs."""
    out, lse, *random, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, at_q.starts, at_k.starts, at_q.longest, at_k.longest, 0.0, causal, False, scale=scale
    )
    return out, lse, random


def _flash_backward(
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
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, at_q.starts, at_k.starts, at_q.longest, at_k.longest, 0.0, causal, *random, scale=scale
    )
    return grads


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """(L, heads, width) what is found, (heads, L) log-sum-exps, and what each call leaves for the backward pass."""
    own, n = segments.each, segments.prompt_tokens
    out, lse, random = _flash_forward(q, k, v, own, own, True, scale)
    if not n or n == len(q):
        return out, lse, (random, ())
    seen, seen_lse, further = _flash_forward(q[n:], k[:n], v[:n], segments.groups, segments.prompts, False, scale)
    _merge(out[n:], lse[:, n:], seen, seen_lse)
    return out, lse, (random, further)


def _merge(out: Tensor, lse: Tensor, seen: Tensor, seen_lse: Tensor) -> None:
    """What was found in one range of keys, changed into what is found in both."""
    if out.is_cuda and importlib.util.find_spec("triton") is not None:
        from grpo.language.scoring.kernels.layers import merge

        merge(out, lse, seen, seen_lse)
        return
    whole = torch.logaddexp(lse, seen_lse)
    share, seen_share = ((part - whole).exp().t()[..., None] for part in (lse, seen_lse))
    out.copy_(out * share + seen * seen_share)
    lse.copy_(whole)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    left: tuple[Sequence[Tensor], Sequence[Tensor]],
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q, k and v."""
    (random, further), own, n = left, segments.each, segments.prompt_tokens
    dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, random, own, own, True, scale)
    if further:
        rest = (grad[n:], q[n:], k[:n], v[:n], out[n:], lse[:, n:].contiguous(), further)
        more_q, more_k, more_v = _flash_backward(*rest, segments.groups, segments.prompts, False, scale)
        dq[n:] += more_q
        dk[:n] += more_k
        dv[:n] += more_v
    return dq, dk, dv


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        out, lse, (random, further) = forward(q, k, v, segments, scale)
        ctx.save_for_backward(q, k, v, out, lse, *random, *further)
        ctx.segments, ctx.scale, ctx.ours = segments, scale, len(random)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, *random = ctx.saved_tensors
        left = random[: ctx.ours], random[ctx.ours :]
        return *backward(grad.contiguous(), q, k, v, out, lse, left, ctx.segments, ctx.scale), None, None


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """(L, heads, width): every segment to itself, completions to their prompt as well."""
    found: Tensor = _Attend.apply(q, k, v, segments, scale)  # type: ignore[no-untyped-call]
    return found


# --- behind transformers' attention interface -----------------------------------------------------------------------


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **further: Any
) -> tuple[Tensor, None]:
    segments = further.pop("segments", None)
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **further)
    scaling = further.get("scaling")
    for name in ("s_aux", "position_bias", "softcap", "sliding_window"):
        if further.get(name) is not None:
            raise ValueError(f"attention in segments knows no {name}")
    dtype = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else query.dtype
    q, k, v = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    return attend(q, k, v, segments, scale)[None], None


# At import and for good: it holds no state, and a model that attends so keeps the name for as long as it lives.
AttentionInterface.register(INTERFACE, _attention)
AttentionMaskInterface.register(INTERFACE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
assert INTERFACE in ALL_ATTENTION_FUNCTIONS


def arguments(segments: Segments) -> dict[str, Any]:
    """What the module is called with beside ids and positions; a mask of four dimensions is passed on as it is."""
    return {"segments": segments, "attention_mask": torch.zeros(1, 1, 1, 1, device=segments.each.starts.device)}
