"""Hidden states → log-probs and entropies of tokens, on a GPU: a tile of logits at a time, two products and one kernel.

    forward    tile of hidden · weightᵀ ─► logits ─► log-sum-exp, log-prob, entropy          (M,) each is kept
    backward   the same logits again ─► d logits, over them ─► · weight = d hidden;  d logitsᵀ · hidden += d weight

An adapter (LoRA) on the head is two thin products more of each tile, forward and back; a frozen weight costs none.

Products are in the type that is computed in, logits and the sum of the weight's gradients in float32. All products are
written to memory that is there (`out=`): autocast leaves these alone, and there is never a second tile.

Letters: M tokens, D width, V vocabulary, R an adapter's rank.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo.language.scoring.decoder_layout import Adapter, Unsupported, unwrapped

if TYPE_CHECKING:
    from grpo.language.scoring.kernels.head import Summaries

TILE_BYTES = 512 * 2**20
"""Of the float32 logits of a tile."""


def fuses(head: nn.Module, hidden_MD: Tensor) -> bool:
    """Whether `log_probs` does what this head does: a plain layer on a GPU, nothing hung onto it but perhaps LoRA."""
    try:
        base, _ = unwrapped(head)
    except Unsupported:
        return False
    return (
        hidden_MD.is_cuda
        and hidden_MD.dtype != torch.float64
        and type(base) is nn.Linear  # a quantised one is another class
        and importlib.util.find_spec("triton") is not None
    )


def log_probs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    target_M: Tensor,
    temperature: float,
    *,
    bias_V: Tensor | None = None,
    adapter: Adapter | None = None,
    entropy: bool = False,
    tile: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log π(target) and, where asked for, the entropy, both float32 and differentiable.

    π = softmax((hidden · weightᵀ + bias) / temperature), the adapter added to the weight. tile: tokens at a time; None:
    by `TILE_BYTES`.
    """
    if tile is None:
        tile = max(TILE_BYTES // (4 * len(weight_VD)) // 128 * 128, 128)  # rows that fill the matrix units
    kind = hidden_MD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_MD.dtype
    apply: Any = _LogProbs.apply
    a_RD, b_VR, scale = (None, None, 1.0) if adapter is None else (adapter.a_RD, adapter.b_OR, adapter.scale)
    return apply(
        hidden_MD, weight_VD, bias_V, a_RD, b_VR, scale, target_M.contiguous(), temperature, entropy, tile, dtype
    )  # fmt: skip


def summaries(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    target_M: Tensor,
    temperature: float,
    bias_V: Tensor | None,
    entropy: bool,
    tile: int,
    beside: tuple[Tensor, Tensor] | None = None,
) -> Summaries:
    """Of each token's distribution, without gradient; entropy: Σπ², too. beside: the factors of an adapter."""
    from grpo.language.scoring.kernels.head import room_for, summarise

    out = room_for(len(hidden_MD), entropy, hidden_MD.device)
    for first, rows, logits in _tiles(hidden_MD, weight_VD, tile, beside):
        summarise(logits, target_M[rows], temperature, bias_V, out, first)
    return out


@contextmanager
def unrounded(head: Any) -> Iterator[None]:
    """Inside, a plain head on a GPU gives the logits that `log_probs` computes with: not rounded to a narrower type."""
    weight = getattr(head, "weight", None)
    if weight is None or "forward" in vars(head) or hasattr(head, "base_layer") or not fuses(head, weight):
        yield
        return

    def forward(hidden: Tensor) -> Tensor:
        kind, weight, bias = hidden.device.type, head.weight, head.bias
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
        out = torch.empty(len(flat), len(weight), dtype=torch.float32, device=hidden.device)
        product(flat, weight.to(dtype).t(), out)
        return (out if bias is None else out.add_(bias)).view(*hidden.shape[:-1], -1)

    vars(head)["forward"] = forward
    try:
        yield
    finally:
        vars(head).pop("forward", None)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        a_RD: Tensor | None,
        b_VR: Tensor | None,
        scale: float,
        target_M: Tensor,
        temperature: float,
        entropy: bool,
        tile: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        rounded_MD, beside = hidden_MD.to(dtype), _factors(a_RD, b_VR, scale, dtype)
        found = summaries(rounded_MD, weight_VD.to(dtype), target_M, temperature, bias_V, entropy, tile, beside)
        # The weight is rounded once more on the way back: cheaper than holding the copy until then.
        ctx.save_for_backward(rounded_MD, weight_VD, bias_V, a_RD, b_VR, target_M, found.lse_M, found.entropy_M)
        ctx.temperature, ctx.tile, ctx.hidden_dtype, ctx.scale = temperature, tile, hidden_MD.dtype, scale
        ctx.set_materialize_grads(False)
        return found.logp_M, found.entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logp_M: Tensor | None, d_entropy_M: Tensor | None) -> tuple[Tensor | None, ...]:
        from grpo.language.scoring.kernels.head import differentiate

        hidden_MD, weight_VD, bias_V, a_RD, b_VR, target_M, lse_M, entropy_M = ctx.saved_tensors
        for_hidden, for_weight, for_bias, for_a, for_b, *others = ctx.needs_input_grad
        d_hidden_MD = torch.empty_like(hidden_MD, dtype=ctx.hidden_dtype) if for_hidden else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if for_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if for_bias else None
        d_logp_M = torch.zeros_like(lse_M) if d_logp_M is None else d_logp_M.contiguous()
        d_entropy_M = None if d_entropy_M is None else d_entropy_M.contiguous()
        rounded_VD, beside = weight_VD.to(hidden_MD.dtype), _factors(a_RD, b_VR, ctx.scale, hidden_MD.dtype)
        d_a, d_b = (torch.zeros_like(x, dtype=torch.float32) if need else None
                    for x, need in ((a_RD, for_a), (b_VR, for_b)))  # fmt: skip
        for _, rows, logits in _tiles(hidden_MD, rounded_VD, ctx.tile, beside):
            grad = differentiate(
                logits,
                target_M[rows],
                ctx.temperature,
                bias_V,
                lse_M[rows],
                entropy_M if entropy_M is None else entropy_M[rows],
                d_logp_M[rows],
                d_entropy_M if d_entropy_M is None else d_entropy_M[rows],
                hidden_MD.dtype,
            )
            if d_hidden_MD is not None:
                product(grad, rounded_VD, d_hidden_MD[rows])
            if d_weight_VD is not None:
                added(d_weight_VD, grad.t(), hidden_MD[rows], out=d_weight_VD)
            if d_bias_V is not None:
                d_bias_V += grad.sum(0, dtype=torch.float32)
            if beside is not None:
                _beside_back(
                    grad, hidden_MD[rows], beside, None if d_hidden_MD is None else d_hidden_MD[rows], d_a, d_b
                )
        return (
            d_hidden_MD,
            None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype),
            None if d_bias_V is None else d_bias_V.to(bias_V.dtype),
            None if d_a is None else d_a.to(a_RD.dtype),
            None if d_b is None else (d_b * ctx.scale).to(b_VR.dtype),
            *(None for _ in others),
        )


def _factors(
    a_RD: Tensor | None, b_VR: Tensor | None, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Of an adapter, in the type that is computed in; B with its scale."""
    return None if a_RD is None or b_VR is None else (a_RD.to(dtype), (b_VR * scale).to(dtype))


def _beside_back(
    grad_MV: Tensor,
    hidden_MD: Tensor,
    beside: tuple[Tensor, Tensor],
    d_hidden_MD: Tensor | None,
    d_a_RD: Tensor | None,
    d_b_VR: Tensor | None,
) -> None:
    """An adapter's share of a tile's gradients, added to what is there; by B as if its scale were 1."""
    a_RD, b_VR = beside
    side_MR = grad_MV @ b_VR
    if d_hidden_MD is not None:
        added(d_hidden_MD, side_MR, a_RD, out=d_hidden_MD)
    if d_a_RD is not None:
        added(d_a_RD, side_MR.t(), hidden_MD, out=d_a_RD)
    if d_b_VR is not None:
        added(d_b_VR, grad_MV.t(), hidden_MD @ a_RD.t(), out=d_b_VR)


def _tiles(
    hidden_MD: Tensor, weight_VD: Tensor, tile: int, beside: tuple[Tensor, Tensor] | None
) -> Iterator[tuple[int, slice, Tensor]]:
    """The first row, the rows and the logits of each tile; all of them in the same memory."""
    count, vocabulary = len(hidden_MD), len(weight_VD)
    dtype = torch.float32 if wide("mm", hidden_MD.dtype, hidden_MD.device) else hidden_MD.dtype
    columns = -(-vocabulary // 64) * 64  # rows begin where wide loads may
    room = torch.empty(min(tile, count), columns, dtype=dtype, device=hidden_MD.device)[:, :vocabulary]
    for first in range(0, count, tile):
        rows = slice(first, min(first + tile, count))
        logits = room[: rows.stop - first]
        product(hidden_MD[rows], weight_VD.t(), logits)
        if beside is not None:
            a_RD, b_VR = beside
            added(logits, hidden_MD[rows] @ a_RD.t(), b_VR.t(), out=logits)
        yield first, rows, logits


@functools.cache
def wide(product: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether factors of this type can be multiplied (mm), or multiplied and added (addmm), into float32."""
    if dtype == torch.float32:
        return True
    some, out = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    added = [out] if product == "addmm" else []
    call: Any = getattr(torch, product)
    try:
        call(*added, some, some, out_dtype=torch.float32, out=out)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # this torch, or this device, cannot
        return False
    return True


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left · right; `out` may be wider than the factors."""
    multiply: Any = torch.mm
    if out.dtype == left.dtype:
        multiply(left, right, out=out)
    elif out.dtype == torch.float32 and wide("mm", left.dtype, left.device):
        multiply(left, right, out_dtype=torch.float32, out=out)
    else:
        out.copy_(multiply(left, right, out=left.new_empty(out.shape)))


def added(to: Tensor, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """to + left · right, in the type of `to`, which may be float32 where the factors are narrower."""
    add: Any = torch.addmm
    if left.dtype == to.dtype:
        return add(to, left, right, out=out)
    if to.dtype == torch.float32 and wide("addmm", left.dtype, left.device):
        return add(to, left, right, out_dtype=torch.float32, out=out)
    more = torch.empty_like(to)
    product(left, right, more)
    return torch.add(to, more, out=out)
