"""What a module's layers attend with while they are decoded: our handler, behind transformers' attention interface.

Letters: P prompts, T their tokens, M tokens of all of them, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo.language.engines.cuda_graphs.kernels import Attention
from grpo.language.scoring.attention_switch import attention_switched
from grpo.language.scoring.decoder_layout import Unsupported

SCORES = 1 << 27
"""Attention scores at a time, where they are written down at all."""

Handler = Callable[[Any, Tensor, Tensor, Tensor, Attention], Tensor]
"""A layer, its queries, keys and values, and how it attends; what attention finds."""


@contextmanager
def attending(model: Any, handler: Handler) -> Iterator[None]:
    """Inside, the model's attention is ours; transformers' table knows of it no longer than that."""
    name = f"grpo_decode_{id(handler)}"  # its own: another model may be decoded inside
    ALL_ATTENTION_FUNCTIONS[name] = partial(_interface, handler)
    try:
        with attention_switched(model, name):
            yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-untyped-call]


def _interface(
    handler: Handler,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Called by the model's layers; (B, heads, T, width) each."""
    for name in ("s_aux", "position_bias"):
        if more.get(name) is not None:
            raise Unsupported(f"its attention takes {name}")
    if key.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise Unsupported("its keys and values differ in width")
    if not getattr(module, "is_causal", True):
        raise Unsupported("its attention looks ahead")
    how = Attention(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=key.shape[-1],
        scale=float(key.shape[-1] ** -0.5 if scaling is None else scaling),
        window=more.get("sliding_window"),
        softcap=more.get("softcap"),
    )
    return handler(module, query, key, value, how), None


def causal(query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
    """Whole sequences, padded on the right at most: every token sees what comes before it; (B, T, heads, width)."""
    steps = query.shape[2]
    if how.softcap is None and (how.window is None or steps <= how.window):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=how.scale, enable_gqa=how.heads != how.kv_heads
        )
        return out.transpose(1, 2)
    key, value = (states.repeat_interleave(how.heads // how.kv_heads, 1) for states in (key, value))
    at, found = torch.arange(steps, device=query.device), []
    for some in torch.split(at, max(SCORES // (query.shape[0] * how.heads * steps), 1)):
        score = torch.matmul(query[:, :, some], key.transpose(2, 3)).float() * how.scale
        if how.softcap is not None:
            score = how.softcap * torch.tanh(score / how.softcap)
        behind = some[:, None] - at[None, :]
        sees = (behind >= 0) & (behind < (how.window or steps))
        weight = score.masked_fill(~sees, -torch.inf).softmax(-1).to(value.dtype)
        found.append(torch.matmul(weight, value))
    return torch.cat(found, 2).transpose(1, 2)


@dataclass(frozen=True)
class Places:
    """Where tokens of prompts, padded on the right, are kept; padding goes to block 0, which nobody reads."""

    block_M: Tensor
    offset_M: Tensor

    @classmethod
    def of(
        cls, table_PB: Tensor, length_P: Tensor, steps: int, block_size: int, first_P: Tensor | None = None
    ) -> Places:
        """Of (P, steps) tokens; the tables are of those from `first_P` on, and the others go where padding goes."""
        at_T = torch.arange(steps, device=table_PB.device)
        if first_P is None:
            block_PT = table_PB[:, : -(-steps // block_size)].repeat_interleave(block_size, 1)[:, :steps].long()
            block_PT = torch.where(at_T[None] < length_P[:, None], block_PT, 0)
            return cls(block_PT.flatten(), (at_T % block_size).repeat(len(table_PB)))
        own_PT = at_T[None] - first_P[:, None].long()
        block_PT = table_PB.long().gather(1, (own_PT // block_size).clamp(0, table_PB.shape[1] - 1))
        block_PT = torch.where((own_PT >= 0) & (at_T[None] < length_P[:, None]), block_PT, 0)
        return cls(block_PT.flatten(), (own_PT % block_size).flatten())

    @classmethod
    def behind(cls, table_PB: Tensor, length_P: Tensor, past_P: Tensor, steps: int, block_size: int) -> Places:
        """Of (P, steps) tokens that come behind `past_P` others in the same blocks."""
        at_T = torch.arange(steps, device=table_PB.device)
        at_PT = past_P[:, None].long() + at_T[None]
        block_PT = table_PB.long().gather(1, (at_PT // block_size).clamp(0, table_PB.shape[1] - 1))
        block_PT = torch.where(at_T[None] < length_P[:, None], block_PT, 0)
        return cls(block_PT.flatten(), (at_PT % block_size).flatten())

    def write(self, kept: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """(P, heads, T, width) each."""
        for pool, states in zip(kept, (key, value), strict=True):
            pool[self.block_M, :, self.offset_M] = states.transpose(1, 2).flatten(0, 1).to(pool.dtype)


@dataclass(frozen=True)
class Past:
    """Tokens that lie in blocks already, for new ones that come behind them."""

    table_PB: Tensor
    sees_PTC: Tensor
    """Which of the past, then of the new tokens, a new one sees."""
    width: int
    """Tokens of the longest past."""

    @classmethod
    def of(cls, table_PB: Tensor, past_P: Tensor, steps: int, width: int) -> Past:
        """Of so many new tokens."""
        at_C, at_T = torch.arange(width, device=past_P.device), torch.arange(steps, device=past_P.device)
        old_PTC = (at_C[None] < past_P[:, None])[:, None].expand(-1, steps, -1)
        new_PTC = (at_T[None] <= at_T[:, None])[None].expand(len(past_P), -1, -1)
        return cls(table_PB.long(), torch.cat([old_PTC, new_PTC], 2), width)

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, pools: tuple[Tensor, Tensor], how: Attention
    ) -> Tensor:
        """(P, T, heads, width) what new tokens find in the past and in each other."""
        keys, values = (
            torch.cat([pool[self.table_PB].transpose(1, 2).flatten(2, 3)[:, :, : self.width].to(new.dtype), new], 2)
            for pool, new in zip(pools, (key, value), strict=True)
        )
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self.sees_PTC[:, None], scale=how.scale, enable_gqa=how.heads != how.kv_heads
        )
        return out.transpose(1, 2)
