"""Attention of a flat row of tokens in which a group's completions share their prompt: no masks, no padding.

    prompt₁ prompt₂ … │ its completions …, its completions …

Every segment attends to itself, causally; completions also attend to their prompt, all of it. These are two calls of
the flash kernel that torch carries, for ranges of different lengths (long segments to themselves: `dense`, one by one);
their results are merged by their log-sum-exps, which is exact. Backward, each call is given the merged result: with it
the kernel finds its share of the gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from grpo.language.scoring import dense
from grpo.language.scoring.flash import TokenRanges, flash_backward, flash_forward

INTERFACE = "grpo_segments"
"""Among transformers' attention functions: `sdpa`, unless it is given segments."""
RANDOM = 2
"""Tensors of a random state that a kernel leaves for its way back, though nothing is random here."""


@dataclass(frozen=True)
class Run:
    """Segments one behind the other that are computed together: a long one, or all up to the next long one."""

    tokens: slice
    each: TokenRanges
    """Counted from the run's first token."""
    long: bool

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> tuple[Run, ...]:
        """All segments of these lengths."""
        found, first = [], 0
        for long, grouped in groupby(lengths, lambda length: length >= dense.LONG):
            together = list(grouped)
            for mine in [[length] for length in together] if long else [together]:
                found.append(cls(slice(first, first + sum(mine)), TokenRanges.of(mine, device), long))
                first += sum(mine)
        return tuple(found)


@dataclass(frozen=True)
class Segments:
    """What attends to what."""

    each: TokenRanges
    """All prompts, then all completions."""
    runs: tuple[Run, ...]
    """The same."""
    prompts: TokenRanges
    groups: TokenRanges
    """The completions of each prompt, counted from the first of all completions."""
    prompt_tokens: int

    @classmethod
    def of(cls, prompts: Sequence[int], completions: Sequence[Sequence[int]], device: torch.device) -> Segments:
        """Of prompts of these lengths, and their completions'."""
        flat = [*prompts, *(length for group in completions for length in group)]
        return cls(
            TokenRanges.of(flat, device),
            Run.of(flat, device),
            TokenRanges.of(prompts, device),
            TokenRanges.of([sum(group) for group in completions], device),
            sum(prompts),
        )


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """(L, heads, width) what is found, (heads, L) log-sum-exps, and what each call leaves for the backward pass."""
    n = segments.prompt_tokens
    out, lse, random = _own(q, k, v, segments.runs, scale)
    if not n or n == len(q):
        return out, lse, (random, ())
    seen, seen_lse, further = flash_forward(q[n:], k[:n], v[:n], segments.groups, segments.prompts, False, scale)
    _merge(out[n:], lse[:, n:], seen, seen_lse)
    return out, lse, (random, further)


def _own(q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Run], scale: float) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Every segment to itself."""
    if len(runs) == 1:
        return _run(runs[0], q, k, v, scale)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[1], len(q), dtype=_wide(q))
    left: list[Tensor] = []
    for run in runs:
        here = run.tokens
        out[here], lse[:, here], random = _run(run, q[here], k[here], v[here], scale)
        left += random
    return out, lse, left


def _run(run: Run, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    if run.long and dense.usable(q, k):
        return dense.forward(q, k, v, scale)
    return flash_forward(q, k, v, run.each, run.each, True, scale)


def _own_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Sequence[Tensor],
    runs: Sequence[Run],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of every segment by itself."""
    if len(runs) == 1:
        return _run_backward(runs[0], grad, q, k, v, out, lse, random, scale)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    for number, run in enumerate(runs):
        here, mine = run.tokens, random[number * RANDOM : (number + 1) * RANDOM]
        dq[here], dk[here], dv[here] = _run_backward(
            run, grad[here], q[here], k[here], v[here], out[here], lse[:, here].contiguous(), mine, scale
        )
    return dq, dk, dv


def _run_backward(
    run: Run,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if run.long and dense.usable(q, k):
        return dense.backward(grad, q, k, v, out, lse, random, scale)
    return flash_backward(grad, q, k, v, out, lse, random, run.each, run.each, True, scale)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


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
    (random, further), n = left, segments.prompt_tokens
    dq, dk, dv = _own_backward(grad, q, k, v, out, lse, random, segments.runs, scale)
    if further:
        rest = (grad[n:], q[n:], k[:n], v[:n], out[n:], lse[:, n:].contiguous(), further)
        more_q, more_k, more_v = flash_backward(*rest, segments.groups, segments.prompts, False, scale)
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
