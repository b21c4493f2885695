"""Decoders of the common layout: the module's arithmetic in fewer kernels.

Letters: P prompts, T their tokens, M tokens of all of them, S slots, F fields of a slot's state, B blocks, D width,
R ranks of adapters, O rows of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grpo.language.engines.cuda_graphs.attention import Past, Places, causal
from grpo.language.engines.cuda_graphs.blocks import BlockManager
from grpo.language.engines.cuda_graphs.kernels import Attention, add_norm, attend, rope_and_store
from grpo.language.engines.cuda_graphs.module_decoder import ModuleDecoder
from grpo.language.scoring.decoder_layout import DecoderLayout, LayerParts, Norm, Unsupported, unwrapped
from grpo.language.scoring.head import product, wide
from grpo.language.scoring.kernels.layers import gate
from grpo.language.scoring.projections import factor_copies, rounded, side_by_side

WIDE_TOKENS = 32_768
"""That go through an MLP at a time."""


class Linears:
    """Projections that read the same input, as one product; adapters (LoRA) beside it."""

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        found = [unwrapped(module) for module in modules]
        if odd := [type(base).__name__ for base, _ in found if type(base) is not nn.Linear]:
            raise Unsupported(f"it has a {odd[0]}")
        self._adapters = [adapter for _, adapter in found]
        self._sources = [base.weight for base, _ in found]
        self.sizes = [int(base.out_features) for base, _ in found]
        # One memory for both where the type is the same: what training changes here is changed there.
        shared = side_by_side(self._sources, dtype)
        self._rounded = shared is None
        self.weight = rounded(self._sources, dtype) if shared is None else shared
        self._biases = [base.bias for base, _ in found]
        self.bias = None
        if any(bias is not None for bias in self._biases):
            self.bias = torch.zeros(sum(self.sizes), dtype=dtype, device=self.weight.device)
        ranks = sum(adapter.rank for adapter in self._adapters if adapter is not None)
        self.a_RD = self.b_OR = None
        if ranks:
            self.a_RD = torch.zeros(ranks, self.weight.shape[1], dtype=dtype, device=self.weight.device)
            self.b_OR = torch.zeros(sum(self.sizes), ranks, dtype=dtype, device=self.weight.device)

    def copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What is rounded before a rollout: to, from."""
        if self._rounded:
            yield from zip(torch.split(self.weight, self.sizes), self._sources, strict=True)
        if self.bias is not None:
            for part, bias in zip(torch.split(self.bias, self.sizes), self._biases, strict=True):
                if bias is not None:
                    yield part, bias
        if self.a_RD is not None and self.b_OR is not None:
            yield from factor_copies(self._adapters, self.sizes, self.a_RD, self.b_OR)

    def __call__(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if self.a_RD is None or self.b_OR is None:
            return out
        return out.addmm_(F.linear(x, self.a_RD), self.b_OR.t())

    def wide(self, x: Tensor) -> Tensor:
        """The same, where it can be not rounded to a narrower type: logits around 20 would lose their second digit."""
        if self.a_RD is not None or self.bias is not None or not wide("mm", x.dtype, x.device):
            return self(x)
        out = torch.empty(len(x), len(self.weight), dtype=torch.float32, device=x.device)
        product(x, self.weight.t(), out)
        return out


@dataclass(frozen=True)
class Layer:
    """One layer of the common layout."""

    how: Attention
    before: Norm
    qkv: Linears
    qk_norms: tuple[Tensor, Tensor, float] | None
    """Weights for queries and for keys."""
    out: Linears
    between: Norm
    gate_up: Linears
    down: Linears


class FusedDecoder:
    """norm → q, k, v → attention → out → norm → gate, up → down, in eight kernels a layer."""

    def __init__(self, module: ModuleDecoder, positions: int) -> None:
        model: Any = module.model.get_base_model() if hasattr(module.model, "get_base_model") else module.model
        layout = DecoderLayout.of(model)
        self.gelu, self.dtype, self.vocabulary = layout.gelu, module.dtype, module.vocabulary
        self.layers: Sequence[Attention] = module.layers
        self.embedding = layout.embedding.weight.data
        self.parts = [self._layer(parts, how) for parts, how in zip(layout.layers, self.layers, strict=True)]
        self.norm = layout.norm
        self.head = Linears([layout.head], self.dtype)
        self.cos, self.sin = layout.rotations(torch.arange(positions, device=self.embedding.device))
        self.refresh()

    def _layer(self, parts: LayerParts, how: Attention) -> Layer:
        norms = None
        if parts.q_norm is not None and parts.k_norm is not None:
            norms = parts.q_norm.weight.data, parts.k_norm.weight.data, parts.q_norm.eps
        return Layer(
            how,
            parts.before,
            Linears([parts.q, parts.k, parts.v], self.dtype),
            norms,
            Linears([parts.out], self.dtype),
            parts.between,
            Linears([parts.gate, parts.up], self.dtype),
            Linears([parts.down], self.dtype),
        )

    def _linears(self) -> Iterator[Linears]:
        for layer in self.parts:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self.head

    def refresh(self) -> None:
        """Round what is kept in a wider type again."""
        copies = [pair for part in self._linears() for pair in part.copies()]
        if copies:
            to, of = zip(*copies, strict=True)
            torch._foreach_copy_(list(to), list(of))

    def body(self, ids_M: Tensor, attention: Callable[[int, Layer, Tensor], Tensor]) -> Tensor:
        """(M, D) what the head reads; `attention` gets q, k and v side by side."""
        hidden_MD, delta_MD = F.embedding(ids_M, self.embedding), None
        for number, layer in enumerate(self.parts):
            x_MD = add_norm(hidden_MD, delta_MD, layer.before.weight.data, layer.before.eps, self.dtype)
            x_MD = layer.out(attention(number, layer, layer.qkv(x_MD)))
            x_MD = add_norm(hidden_MD, x_MD, layer.between.weight.data, layer.between.eps, self.dtype)
            # A part of very many tokens at a time: between the products a token is widest.
            parts = [layer.down(gate(layer.gate_up(part), self.gelu)) for part in torch.split(x_MD, WIDE_TOKENS)]
            delta_MD = parts[0] if len(parts) == 1 else torch.cat(parts)
        return add_norm(hidden_MD, delta_MD, self.norm.weight.data, self.norm.eps, self.dtype)

    def decode(
        self, state_FS: Tensor, table_SB: Tensor, blocks: BlockManager, share_prompts: bool = False, long_rows: int = 0
    ) -> Tensor:
        """(S, V) logits behind each slot's token."""

        def attention(number: int, layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = torch.split(qkv, layer.qkv.sizes, 1)
            kept, rope, norm = blocks.kv_cache[number], (self.cos, self.sin), layer.qk_norms
            how: dict[str, Any] = {"rope": rope, "norm": norm, "share_prompts": share_prompts, "long_rows": long_rows}
            return attend(layer.how, q, k, v, *kept, table_SB, state_FS, **how)

        return self.logits(self.body(state_FS[1, : len(table_SB)], attention))

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """(M, V) of what the head reads."""
        return self.head.wide(hidden_MD)

    def prefill(
        self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, blocks: BlockManager, first_P: Tensor | None = None
    ) -> Tensor:
        """Keys and values of prompts, padded on the right, into their blocks; of those from `first_P` on."""
        rows, steps = ids_PT.shape
        places = Places.of(table_PB, length_P, steps, blocks.block_size, first_P)

        def attention(number: int, layer: Layer, qkv: Tensor) -> Tensor:
            where = *blocks.kv_cache[number], places.block_M, places.offset_M
            q, k = rope_and_store(layer.how, qkv, *where, steps, (self.cos, self.sin), layer.qk_norms)
            v = qkv[:, -layer.qkv.sizes[-1] :]
            q, k, v = (states.view(rows, steps, -1, layer.how.head_dim).transpose(1, 2) for states in (q, k, v))
            return causal(q, k, v, layer.how).reshape(rows * steps, -1)

        return self.body(ids_PT.flatten(), attention)

    def prefill_behind(
        self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, past_P: Tensor, width: int, blocks: BlockManager
    ) -> None:
        """Keys and values of tokens behind `past_P` others, `width` at most, that lie in the same blocks already."""
        rows, steps = ids_PT.shape
        places = Places.behind(table_PB, length_P, past_P, steps, blocks.block_size)
        past = Past.of(table_PB, past_P, steps, width)
        at_M = (past_P[:, None].long() + torch.arange(steps, device=ids_PT.device)).clamp(max=len(self.cos) - 1)
        rope = self.cos[at_M.flatten()].contiguous(), self.sin[at_M.flatten()].contiguous()

        def attention(number: int, layer: Layer, qkv: Tensor) -> Tensor:
            pools = blocks.kv_cache[number]
            where = *pools, places.block_M, places.offset_M
            q, k = rope_and_store(layer.how, qkv, *where, rows * steps, rope, layer.qk_norms)
            v = qkv[:, -layer.qkv.sizes[-1] :]
            q, k, v = (states.view(rows, steps, -1, layer.how.head_dim).transpose(1, 2) for states in (q, k, v))
            return past.attended(q, k, v, pools, layer.how).reshape(rows * steps, -1)

        self.body(ids_PT.flatten(), attention)
