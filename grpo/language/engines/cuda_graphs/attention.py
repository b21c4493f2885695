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

    def write(self, kept: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """(P, heads, T, width) each."""
        for pool, states in zip(kept, (key, value), strict=True):
            pool[self.block_M, :, self.offset_M] = states.transpose(1, 2).flatten(0, 1).to(pool.dtype)
