"""The body of a decoder of the common layout over one flat row of tokens, with a backward pass written by hand.

    x ─ norm ─ q, k, v ─ rope ─ attend ─ out ─(+ x)─ norm ─ gate, up ─ act ─ down ─(+)─

A layer is one function for autograd: products by `projections`, adapters beside them, `kernels.layers` between them.
What is kept for the backward pass is the memory of training, so it can be chosen (`decoder_layout.KEEP`); norms and
activations are always computed again, which costs one reading. The MLP, which is four to six times as wide as what
goes through the layer, is computed for a tile of tokens at a time. What goes from layer to layer is in the weights' own
type, as in the module, and so are their gradients.

Letters: L tokens of the row, M of them that are asked for, D width, C half a head, I and O a projection's sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo.language.scoring import segments
from grpo.language.scoring.decoder_layout import HOSTED, DecoderLayout, LayerParts, Norm
from grpo.language.scoring.host import AT_ONCE, HostMemory, Offload, free_bytes
from grpo.language.scoring.kernels.layers import Norms, gate, gate_backward, norm, norm_backward, rope, rope_backward
from grpo.language.scoring.memory import MLP_TILE, LayerSizes
from grpo.language.scoring.projections import Copies, Gradients, Packed, Projections
from grpo.language.scoring.segments import Segments

IN_USE = 0.8
"""Of the host's memory that is free, what layers may take."""
ALIGNED = 128
"""Tokens of a tile are a multiple of it: what fills the matrix units."""


@dataclass(frozen=True)
class PassContext:
    """What all layers are told of a pass."""

    cos_LC: Tensor
    sin_LC: Tensor
    segments: Segments
    keep: str
    host: Offload | None
    """Where layers keep what they keep on the host."""


@dataclass(frozen=True)
class Layer:
    """A layer as it is in one pass."""

    number: int
    before: Norm
    between: Norm
    qk_norms: tuple[Norm, Norm] | None
    qkv: Projections
    out: Projections
    gate_up: Projections
    down: Projections
    heads: int
    kv_heads: int
    scale: float
    gelu: bool
    dtype: torch.dtype
    tile: int
    """Tokens of the MLP at a time."""

    @property
    def projections(self) -> tuple[Projections, ...]:
        """In the order of the parameters."""
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def norm_weights(self) -> list[Tensor]:
        """In the order of the parameters."""
        return [how.weight for how in (self.before, self.between, *(self.qk_norms or ()))]

    @property
    def parameters(self) -> list[Tensor]:
        """As autograd is told of them."""
        return [*self.norm_weights, *(p for packed in self.projections for p in packed.parameters)]

    @property
    def norms(self) -> Norms | None:
        """Of queries and keys."""
        if self.qk_norms is None:
            return None
        q, k = self.qk_norms
        return q.weight.detach(), k.weight.detach(), q.eps

    def normed(self, x_LD: Tensor, how: Norm) -> Tensor:
        """What projections read."""
        return norm(x_LD, how.weight.detach(), how.eps, self.dtype)

    def attention(self, x_LD: Tensor, context: PassContext) -> tuple[Tensor, ...]:
        """The projections, what attention finds, its log-sum-exps, then what its kernels leave."""
        qkv = self.qkv(self.normed(x_LD, self.before))
        q, k, v = rope(qkv, self.heads, self.kv_heads, context.cos_LC, context.sin_LC, self.norms)
        out, lse, (own, further) = segments.forward(q, k, v, context.segments, self.scale)
        return qkv, out, lse, *own, *further

    def attention_backward(
        self, grad: Tensor, kept: list[Tensor], context: PassContext
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients by the projections, and by the norms of queries and keys; `kept` is used up."""
        qkv, out, lse, *left = kept
        kept.clear()
        q, k, v = rope(qkv, self.heads, self.kv_heads, context.cos_LC, context.sin_LC, self.norms)
        ours = segments.RANDOM * len(context.segments.runs)
        grads = segments.backward(
            grad.view_as(out), q, k, v, out, lse, (left[:ours], left[ours:]), context.segments, self.scale
        )  # fmt: skip
        del grad, q, k, v, out
        d_qkv, *d_norms = rope_backward(qkv, *grads, context.cos_LC, context.sin_LC, self.norms)
        return d_qkv, d_norms

    def tiles(self, tokens: int, keep: str = "") -> list[slice]:
        """Of the MLP, all about the same size; one where gate and up of all tokens are kept anyway."""
        count = 1 if keep == "everything" else -(-tokens // self.tile)
        each = -(-tokens // count // ALIGNED) * ALIGNED if count > 1 else tokens
        return [slice(first, min(first + each, tokens)) for first in range(0, tokens, each)]

    def both(self, middle_LD: Tensor) -> Tensor:
        """Gate and up."""
        return self.gate_up(self.normed(middle_LD, self.between))

    def mlp(self, middle_LD: Tensor, keep: str) -> tuple[Tensor, Tensor | None]:
        """What the layer gives; gate and up where they are to be kept."""
        out_LD, both = torch.empty_like(middle_LD), None
        for rows in self.tiles(len(middle_LD), keep):
            both = self.both(middle_LD[rows])
            self.down.onto(middle_LD[rows], gate(both, self.gelu), out_LD[rows])
        return out_LD, both if keep == "everything" else None

    def mlp_backward(
        self, grad_LD: Tensor, middle_LD: Tensor, both: Tensor | None, needed: Sequence[Sequence[bool]]
    ) -> tuple[Tensor, Tensor, list[Tensor | None], list[Tensor | None], Tensor]:
        """The gradient by what lies between attention and MLP, also in the type that is computed in; by gate and up, by
        down, and by the norm."""
        tiles = self.tiles(len(middle_LD), "" if both is None else "everything")
        of_both, of_down = (
            Gradients(packed, needs, len(tiles))
            for packed, needs in zip((self.gate_up, self.down), needed, strict=True)
        )
        back_LD, how, d_norm = torch.empty_like(middle_LD), self.between, torch.zeros((), device=grad_LD.device)
        low_LD = back_LD if middle_LD.dtype == self.dtype else torch.empty_like(middle_LD, dtype=self.dtype)
        for rows in tiles:
            middle, low = middle_LD[rows], grad_LD[rows].to(self.dtype)
            side = self.down.side_back(low)
            here = self.both(middle) if both is None else both
            act, d_both = gate_backward(self.down.back(low, side), here, self.gelu)
            of_down.add(low, side, act)
            del act, here
            side = self.gate_up.side_back(d_both)
            if of_both.wanted:
                of_both.add(d_both, side, self.normed(middle, how))
            into = self.gate_up.back(d_both, side)
            del d_both
            room = back_LD[rows], low_LD[rows]
            d_norm = d_norm + norm_backward(into, middle, how.weight, how.eps, grad_LD[rows], room)[2]
        return back_LD, low_LD, of_both.found(), of_down.found(), d_norm


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LD: Tensor, layer: Layer, context: PassContext, *parameters: Tensor) -> Tensor:
        attended = layer.attention(x_LD, context)
        middle_LD = layer.out.onto(x_LD, attended[1].flatten(1))
        out_LD, both = layer.mlp(middle_LD, context.keep)
        ctx.layer, ctx.context = layer, context
        _keep(ctx, x_LD, middle_LD, attended, both)
        return out_LD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LD: Tensor) -> tuple[Tensor | None, ...]:
        layer, context = ctx.layer, ctx.context
        x_LD, middle_LD, attended, both = _recalled(ctx)
        for_x, for_norms, (of_qkv, of_out, *of_mlp) = _needed(ctx)

        grad_LD, low_LD, d_both, d_down, d_between = layer.mlp_backward(grad_LD.contiguous(), middle_LD, both, of_mlp)
        del both, middle_LD
        side, found = layer.out.side_back(low_LD), Gradients(layer.out, of_out)
        found.add(low_LD, side, attended[1].flatten(1))
        d_out = found.found()
        d_qkv, d_norms = layer.attention_backward(layer.out.back(low_LD, side), attended, context)
        del attended, low_LD
        side, found = layer.qkv.side_back(d_qkv), Gradients(layer.qkv, of_qkv)
        if found.wanted:
            found.add(d_qkv, side, layer.normed(x_LD, layer.before))
        d_x, d_before = None, None
        if for_x or for_norms[0]:
            how, into = layer.before, layer.qkv.back(d_qkv, side)
            d_x, _, d_before = norm_backward(into, x_LD, how.weight, how.eps, grad_LD)
        typed = [
            None if d is None or not wanted else d.to(weight.dtype)
            for d, weight, wanted in zip(
                [d_before, d_between, *d_norms][: len(for_norms)], layer.norm_weights, for_norms, strict=True
            )
        ]
        return d_x, None, None, *typed, *found.found(), *d_out, *d_both, *d_down


def _keep(ctx: Any, x_LD: Tensor, middle_LD: Tensor, attended: Sequence[Tensor], both: Tensor | None) -> None:
    """For the backward pass, as much as is to be kept."""
    keep, host = ctx.context.keep, ctx.context.host
    _, out, lse, *left = attended
    if host is not None and keep == "host":
        host.put(ctx.layer.number, [x_LD, out, lse])
        ctx.save_for_backward(*left)
    elif host is not None:
        host.put(ctx.layer.number, [x_LD])
    elif keep == "input":
        ctx.save_for_backward(x_LD)
    else:
        ctx.save_for_backward(x_LD, middle_LD, *attended, *([] if both is None else [both]))


def _recalled(ctx: Any) -> tuple[Tensor, Tensor, list[Tensor], Tensor | None]:
    """What the layer read, what lies between its halves, what attention gave, gate and up: kept, or computed again."""
    layer, context, saved = ctx.layer, ctx.context, list(ctx.saved_tensors)
    if context.keep in ("everything", "attention"):
        both = saved.pop() if context.keep == "everything" else None
        x_LD, middle_LD, *attended = saved
        return x_LD, middle_LD, attended, both
    if context.host is not None and context.keep == "host":
        x_LD, *found = context.host.take(layer.number)
        attended = [layer.qkv(layer.normed(x_LD, layer.before)), *found, *saved]
    else:
        x_LD = saved[0] if context.host is None else context.host.take(layer.number)[0]
        attended = list(layer.attention(x_LD, context))
    return x_LD, layer.out.onto(x_LD, attended[1].flatten(1)), attended, None


def _needed(ctx: Any) -> tuple[bool, list[bool], list[list[bool]]]:
    """Which gradients are: of what the layer read, of its norms, of each of its projections."""
    for_x, _, _, *rest = ctx.needs_input_grad
    left: Iterator[bool] = iter(rest)
    norms = list(islice(left, len(ctx.layer.norm_weights)))
    return for_x, norms, [list(islice(left, len(packed.parameters))) for packed in ctx.layer.projections]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_LD, weight_D)
        ctx.eps = eps
        return norm(x_LD, weight_D, eps, x_LD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_LD, weight_D = ctx.saved_tensors
        d_x, _, d_weight = norm_backward(grad_LD.contiguous(), x_LD, weight_D, ctx.eps)
        return d_x, d_weight.to(weight_D.dtype), None


class Block:
    """A layer's modules: what lasts from pass to pass."""

    def __init__(self, number: int, parts: LayerParts, gelu: bool, dtype: torch.dtype) -> None:
        self.number, self.parts, self.gelu, self.dtype = number, parts, gelu, dtype
        self.qkv = Packed([parts.q, parts.k, parts.v], dtype)
        self.out, self.down = Packed([parts.out], dtype), Packed([parts.down], dtype)
        self.gate_up = Packed([parts.gate, parts.up], dtype)
        self.heads, self.kv_heads = (size // parts.head_dim for size in self.qkv.sizes[:2])
        self.tile = max(MLP_TILE // (sum(self.gate_up.sizes) * dtype.itemsize) // ALIGNED * ALIGNED, ALIGNED)

    def layer_sizes(self, wide: int, low: int) -> LayerSizes:
        """What its memory follows from; the bytes of a number that goes on, and of one that is computed with."""
        width, inner = self.qkv.width, self.down.width
        return LayerSizes(width, inner, self.heads, self.kv_heads, self.parts.head_dim, wide, low)

    def now(self, copies: Copies) -> Layer:
        """As it is at this moment, adapters included; what is to be rounded first goes to `copies`."""
        parts = self.parts
        return Layer(
            number=self.number,
            before=parts.before,
            between=parts.between,
            qk_norms=None if parts.q_norm is None or parts.k_norm is None else (parts.q_norm, parts.k_norm),
            qkv=self.qkv.now(copies),
            out=self.out.now(copies),
            gate_up=self.gate_up.now(copies),
            down=self.down.now(copies),
            heads=self.heads,
            kv_heads=self.kv_heads,
            scale=parts.scale,
            gelu=self.gelu,
            dtype=self.dtype,
            tile=self.tile,
        )


class Layers:
    """A causal model's body: token ids to what its head reads."""

    def __init__(self, causal: Any, dtype: torch.dtype) -> None:
        self._layout, self.dtype = DecoderLayout.of(causal), dtype
        self.blocks = [Block(n, parts, self._layout.gelu, dtype) for n, parts in enumerate(self._layout.layers)]
        self._host: HostMemory | None = None

    def __call__(self, ids_L: Tensor, position_L: Tensor, where: Segments, at_M: Tensor, keep: str) -> Tensor:
        """(M, D) of the tokens at `at_M`."""
        copies: Copies = []
        layers = [block.now(copies) for block in self.blocks]
        if copies:
            to, of = zip(*copies, strict=True)
            torch._foreach_copy_(list(to), list(of))
        context = PassContext(*self._layout.rotations(position_L), where, keep, self._offload(keep, ids_L.device))
        x_LD = self._layout.embedding(ids_L)
        apply: Any = _Layer.apply
        for layer in layers:
            x_LD = apply(x_LD, layer, context, *layer.parameters)
        last, apply = self._layout.norm, _Norm.apply
        found: Tensor = apply(x_LD[at_M], last.weight, last.eps)
        return found

    def _offload(self, keep: str, device: torch.device) -> Offload | None:
        if not torch.is_grad_enabled() or keep not in HOSTED:
            return None
        self._host = self._host or HostMemory(device)
        return self._host.begin(len(self.blocks))

    def host_level(self, tokens: int) -> str:
        """As much of a pass as the host has memory for; see `decoder_layout.HOSTED`."""
        free = IN_USE * (free_bytes() + (0 if self._host is None else self._host.held))
        return HOSTED[0] if tokens * self.hosted_bytes() < free else HOSTED[1]

    def kept_bytes(self, keep: str) -> int:
        """Of each token of a pass, until the backward pass has come by; on the host: of those layers that are here."""
        if keep in HOSTED:
            return AT_ONCE * max(sizes.hosted(keep) for sizes in self._sizes())
        return sum(sizes.kept(keep) for sizes in self._sizes())

    def hosted_bytes(self) -> int:
        """Of each token of a pass, in the host's memory."""
        return sum(sizes.hosted(HOSTED[0]) for sizes in self._sizes())

    def passing_bytes(self, tokens: float, keep: str) -> int:
        """Of each token of a pass of so many, what one layer's backward pass takes for a while."""
        return max(sizes.passing(tokens, keep) for sizes in self._sizes())

    def _sizes(self) -> list[LayerSizes]:
        wide, low = self._layout.embedding.weight.element_size(), self.dtype.itemsize
        return [block.layer_sizes(wide, low) for block in self.blocks]
