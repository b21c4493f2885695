"""The body of a decoder of the common layout over one flat row of tokens, with a backward pass written by hand.

    x ─ norm ─ q, k, v ─ rope ─ attend ─ out ─(+ x)─ norm ─ gate, up ─ act ─ down ─(+)─

A layer is one function for autograd: products by torch, `kernels.layers` between them. What is kept for the backward
pass is the memory of training, so it can be chosen (`decoder_layout.KEEP`); norms and activations are always computed
again, which costs one reading. Weights that are kept in a wider type are rounded before every pass into memory that
stays. What goes from layer to layer is in the weights' own type, as in the module, and so are their gradients.

Letters: L tokens of the row, M of them that are asked for, D width, C half a head, I and O a projection's sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grpo.language.scoring import segments
from grpo.language.scoring.decoder_layout import DecoderLayout, LayerParts, Norm, Unsupported
from grpo.language.scoring.head import added, product
from grpo.language.scoring.kernels.layers import Norms, gate, gate_backward, norm, norm_backward, rope, rope_backward
from grpo.language.scoring.memory import LayerSizes
from grpo.language.scoring.segments import Segments


class Packed:
    """Projections of one input, one below the other, in the type that is computed in."""

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        if any(type(module) is not nn.Linear or module._forward_hooks for module in modules):
            raise Unsupported("its projections are not plain")
        linear: list[Any] = list(modules)
        self.weights: list[Tensor] = [module.weight for module in linear]
        self.biases: list[Tensor] = [module.bias for module in linear if module.bias is not None]
        if len(self.biases) not in (0, len(linear)):
            raise Unsupported("some of its projections have a bias")
        self._dtype = dtype
        self._copies: dict[int, Tensor] = {}
        self.weight, self.bias = self.weights[0], None if not self.biases else self.biases[0]

    @property
    def parameters(self) -> list[Tensor]:
        """As autograd is told of them."""
        return [*self.weights, *self.biases]

    def laid(self) -> list[tuple[Tensor, Tensor]]:
        """Take the weights as they are now; what is to be rounded or moved first: to, from."""
        copies: list[tuple[Tensor, Tensor]] = []
        self.weight = self._together(0, self.weights, copies)
        if self.biases:
            self.bias = self._together(1, self.biases, copies)
        return copies

    def _together(self, number: int, parts: list[Tensor], copies: list[tuple[Tensor, Tensor]]) -> Tensor:
        if (whole := _one_memory(parts, self._dtype)) is not None:
            self._copies.pop(number, None)
            return whole
        if number not in self._copies:
            self._copies[number] = torch.cat([part.detach().to(self._dtype) for part in parts])
        whole = self._copies[number]
        copies += zip(torch.split(whole, [len(part) for part in parts]), (p.detach() for p in parts), strict=True)
        return whole

    def __call__(self, x_LD: Tensor) -> Tensor:
        return F.linear(x_LD, self.weight, self.bias)

    def onto(self, x_LD: Tensor, y_LI: Tensor) -> Tensor:
        """x + projection of y, where x may be wider."""
        out = added(x_LD, y_LI, self.weight.t())
        return out if self.bias is None else out.add_(self.bias)

    def backward(self, grad_LO: Tensor, x_LD: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The parameters' gradients, in their own type."""
        sizes = [len(weight) for weight in self.weights]
        found: list[Tensor | None] = []
        for_weights, for_biases = any(needed[: len(sizes)]), any(needed[len(sizes) :])
        if for_weights:
            out = torch.empty(sum(sizes), x_LD.shape[1], dtype=self.weights[0].dtype, device=x_LD.device)
            product(grad_LO.t(), x_LD, out)
            found += torch.split(out, sizes)
        else:
            found += [None] * len(sizes)
        if self.biases:
            total = grad_LO.sum(0, dtype=torch.float32).to(self.biases[0].dtype) if for_biases else None
            found += [None] * len(sizes) if total is None else list(torch.split(total, sizes))
        return [grad if wanted else None for grad, wanted in zip(found, needed, strict=True)]


def _one_memory(parts: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The parts as one tensor where they lie in memory like that: an engine may have put them so."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.dtype != dtype or not part.is_contiguous() or part.data_ptr() != at:
            return None
        at += part.numel() * part.element_size()
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


@dataclass(frozen=True)
class PassContext:
    """What all layers are told of a pass."""

    cos_LC: Tensor
    sin_LC: Tensor
    segments: Segments
    keep: str


class Block:
    """A layer: its projections, norms and sizes."""

    def __init__(self, parts: LayerParts, gelu: bool, dtype: torch.dtype) -> None:
        self.before, self.between, self.gelu, self.scale = parts.before, parts.between, gelu, parts.scale
        self.dtype = dtype
        self.qkv = Packed([parts.q, parts.k, parts.v], dtype)
        self.out, self.down = Packed([parts.out], dtype), Packed([parts.down], dtype)
        self.gate_up = Packed([parts.gate, parts.up], dtype)
        self.qk_norms = None if parts.q_norm is None or parts.k_norm is None else (parts.q_norm, parts.k_norm)
        self.head_dim = parts.head_dim
        self.heads, self.kv_heads = (len(weight) // parts.head_dim for weight in self.qkv.weights[:2])
        norms = [norm.weight for norm in (self.before, self.between, *(self.qk_norms or ()))]
        self.projections = (self.qkv, self.out, self.gate_up, self.down)
        self.parameters: list[Tensor] = [*norms, *(p for packed in self.projections for p in packed.parameters)]

    @property
    def norms(self) -> Norms | None:
        """Of queries and keys."""
        if self.qk_norms is None:
            return None
        q, k = self.qk_norms
        return q.weight.detach(), k.weight.detach(), q.eps

    def sizes(self, wide: int, low: int) -> LayerSizes:
        """What its memory follows from; the bytes of a number that goes on, and of one that is computed with."""
        width, inner = self.down.weights[0].shape
        return LayerSizes(width, inner, self.heads, self.kv_heads, self.head_dim, wide, low)

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
        self, grad: Tensor, kept: Sequence[Tensor], context: PassContext
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients by the projections, and by the norms of queries and keys."""
        qkv, out, lse, *left = kept
        q, k, v = rope(qkv, self.heads, self.kv_heads, context.cos_LC, context.sin_LC, self.norms)
        whole = context.segments.prompt_tokens in (0, len(q))
        ours = len(left) if whole else len(left) // 2
        grads = segments.backward(
            grad.view_as(out), q, k, v, out, lse, (left[:ours], left[ours:]), context.segments, self.scale
        )  # fmt: skip
        d_qkv, *d_norms = rope_backward(qkv, *grads, context.cos_LC, context.sin_LC, self.norms)
        return d_qkv, d_norms

    def both(self, middle_LD: Tensor) -> Tensor:
        """Gate and up."""
        return self.gate_up(self.normed(middle_LD, self.between))


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LD: Tensor, block: Block, context: PassContext, *parameters: Tensor) -> Tensor:
        attended = block.attention(x_LD, context)
        middle_LD = block.out.onto(x_LD, attended[1].flatten(1))
        both = block.both(middle_LD)
        kept: list[Tensor] = [x_LD]
        if context.keep != "input":
            kept += [middle_LD, *attended]
        if context.keep == "everything":
            kept += [both]
        ctx.save_for_backward(*kept)
        ctx.block, ctx.context = block, context
        return block.down.onto(middle_LD, gate(both, block.gelu))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LD: Tensor) -> tuple[Tensor | None, ...]:
        block, context, needed = ctx.block, ctx.context, list(ctx.needs_input_grad[3:])
        x_LD, *kept = ctx.saved_tensors
        grad_LD = grad_LD.contiguous()
        if context.keep == "input":
            attended = block.attention(x_LD, context)
            middle_LD = block.out.onto(x_LD, attended[1].flatten(1))
        else:
            middle_LD, *attended = kept
        both = attended.pop() if context.keep == "everything" else block.both(middle_LD)

        norms = 4 if block.qk_norms else 2
        sizes = [len(packed.parameters) for packed in block.projections]
        of_qkv, of_out, of_both, of_down = (
            list(islice(rest, size)) for rest in [iter(needed[norms:])] for size in sizes
        )

        low_LD = grad_LD.to(block.dtype)
        act, d_both = gate_backward(low_LD @ block.down.weight, both, block.gelu)
        d_down = block.down.backward(low_LD, act, of_down)
        del act, both
        d_gate_up = block.gate_up.backward(d_both, block.normed(middle_LD, block.between), of_both)
        into = d_both @ block.gate_up.weight
        grad_LD, low_LD, d_between = norm_backward(into, middle_LD, block.between.weight, block.between.eps, grad_LD)
        del d_both, into
        d_out = block.out.backward(low_LD, attended[1].flatten(1), of_out)
        d_qkv, d_norms = block.attention_backward(low_LD @ block.out.weight, attended, context)
        d_projections = block.qkv.backward(d_qkv, block.normed(x_LD, block.before), of_qkv)
        into = d_qkv @ block.qkv.weight
        grad_LD, _, d_before = norm_backward(into, x_LD, block.before.weight, block.before.eps, grad_LD)
        of_norms = [d_before, d_between, *(d_norms if block.qk_norms else ())]
        typed = [
            g.to(p.dtype) if want else None for g, p, want in zip(of_norms, block.parameters, needed, strict=False)
        ]
        return grad_LD, None, None, *typed, *d_projections, *d_out, *d_gate_up, *d_down


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


class Layers:
    """A causal model's body: token ids to what its head reads."""

    def __init__(self, causal: Any, dtype: torch.dtype) -> None:
        self._layout, self.dtype = DecoderLayout.of(causal), dtype
        self.blocks = [Block(parts, self._layout.gelu, dtype) for parts in self._layout.layers]

    def __call__(self, ids_L: Tensor, position_L: Tensor, where: Segments, at_M: Tensor, keep: str) -> Tensor:
        """(M, D) of the tokens at `at_M`."""
        copies = [pair for block in self.blocks for packed in block.projections for pair in packed.laid()]
        if copies:
            to, of = zip(*copies, strict=True)
            torch._foreach_copy_(list(to), list(of))
        context = PassContext(*self._layout.rotations(position_L), where, keep)
        x_LD = self._layout.embedding(ids_L)
        layer: Any = _Layer.apply
        for block in self.blocks:
            x_LD = layer(x_LD, block, context, *block.parameters)
        last, apply = self._layout.norm, _Norm.apply
        found: Tensor = apply(x_LD[at_M], last.weight, last.eps)  # type: ignore[no-untyped-call]
        return found

    def kept_bytes(self, keep: str) -> int:
        """Of each token of a pass, until the backward pass has come by."""
        return sum(sizes.kept(keep) for sizes in self._sizes())

    def passing_bytes(self) -> int:
        """Of each token, what one layer's backward pass takes for a while."""
        return max(sizes.passing() for sizes in self._sizes())

    def _sizes(self) -> list[LayerSizes]:
        wide, low = self._layout.embedding.weight.element_size(), self.dtype.itemsize
        return [block.sizes(wide, low) for block in self.blocks]
