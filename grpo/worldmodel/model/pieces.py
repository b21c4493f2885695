"""What a step of the recurrence does between its products, forward and backward.

Written twice. `PLAIN`, for CPUs: operation by operation, straight to where each result is needed. `fused`, for CUDA
devices, where starting a kernel takes as long as its work: as formulas, of which torch.compile makes one kernel each.
Everything is written into what is given last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo.worldmodel.model.compiled import Compiled
from grpo.worldmodel.model.distributions import UNIMIX

_aten: Any = torch.ops.aten


class Pieces(NamedTuple):
    """K blocks, B sequences; latents are (B, C, S)."""

    norm: Callable[..., None]
    """RMS norm, gain and SiLU: x, gain·√n, n·ε → length, unit, out. The RMS of n numbers is their length / √n."""
    norm_backward: Callable[..., None]
    """Gradient of out, unit, length, gain·√n → sum of the gain's gradients, gradient of x."""
    gate: Callable[..., None]
    """old (K, B, I) → gates (K, B, 3·I), of which reset and update become shares; candidate, new."""
    gate_backward: Callable[..., None]
    """Gradient of new, gates, candidate, old → gradients of the gates, and of old beside them."""
    draw: Callable[..., None]
    """logits, points to exceed (B, C − 1, S) → whether each class lies below its point, (B, C + 1, S) with a one before
    the first and a zero for the last; probabilities, one-hot."""
    draw_backward: Callable[..., None]
    """Gradients of one-hot, twice, and of the logits, probabilities → gradient of the logits."""


# --- operation by operation -----------------------------------------------------------------------------------------


def _norm(x: Tensor, gain: Tensor, least: float, length: Tensor, unit: Tensor, out: Tensor) -> None:
    torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=length).square_().add_(least).sqrt_()
    _aten.silu.out(torch.div(x, length, out=unit) * gain, out=out)


def _norm_backward(grad: Tensor, unit: Tensor, length: Tensor, gain: Tensor, to_gain: Tensor, out: Tensor) -> None:
    grad = _aten.silu_backward(grad, unit * gain)
    here = grad * unit
    to_gain += here
    along = here.mul_(gain).sum(-1, keepdim=True)
    torch.div(grad.mul_(gain).addcmul_(unit, along, value=-1), length, out=out)


def _gate(old: Tensor, gates: Tensor, candidate: Tensor, new: Tensor) -> None:
    reset, raw, update = gates.chunk(3, -1)
    torch.mul(reset.sigmoid_(), raw, out=candidate).tanh_()
    torch.lerp(old, candidate, update.sigmoid_(), out=new)


def _gate_backward(
    to_new: Tensor, gates: Tensor, candidate: Tensor, old: Tensor, to_gates: Tensor, to_old: Tensor
) -> None:
    reset, raw, update = gates.chunk(3, -1)
    to_reset, to_raw, to_update = to_gates.chunk(3, -1)
    to_candidate = to_new * update
    to_squashed = _aten.tanh_backward(to_candidate, candidate)
    torch.mul(to_squashed, reset, out=to_raw)
    _aten.sigmoid_backward.grad_input(to_squashed.mul_(raw), reset, grad_input=to_reset)
    _aten.sigmoid_backward.grad_input((candidate - old).mul_(to_new), update, grad_input=to_update)
    torch.sub(to_new, to_candidate, out=to_old)


def _draw(logits: Tensor, points: Tensor, below: Tensor, probs: Tensor, stoch: Tensor) -> None:
    torch.le(torch.softmax(logits, 1, out=probs).cumsum(1)[:, :-1], points, out=below[:, 1:-1])
    torch.sub(below[:, :-1], below[:, 1:], out=stoch)


def _draw_backward(to_stoch: Tensor, more: Tensor, to_logits: Tensor, probs: Tensor, out: Tensor) -> None:
    to_probs = _aten._softmax_backward_data(to_stoch + more, probs, 1, probs.dtype)
    torch.add(to_logits, to_probs, alpha=1 - UNIMIX, out=out)


PLAIN = Pieces(_norm, _norm_backward, _gate, _gate_backward, _draw, _draw_backward)


# --- as formulas ----------------------------------------------------------------------------------------------------


def _norm_whole(x: Tensor, gain: Tensor, least: float, length: Tensor, unit: Tensor, out: Tensor) -> None:
    root = (x.square().sum(-1, keepdim=True) + least).sqrt()
    length.copy_(root)
    unit.copy_(x / root)
    out.copy_(F.silu(x / root * gain))


def _norm_backward_whole(
    grad: Tensor, unit: Tensor, length: Tensor, gain: Tensor, to_gain: Tensor, out: Tensor
) -> None:
    inner = unit * gain
    share = inner.sigmoid()
    grad = grad * share * (1 + inner * (1 - share))
    along = (grad * inner).sum(-1, keepdim=True)
    to_gain.add_(grad * unit)
    out.copy_((grad * gain - unit * along) / length)


def _gate_whole(old: Tensor, gates: Tensor, candidate: Tensor, new: Tensor) -> None:
    reset, raw, update = gates.chunk(3, -1)
    reset, update = reset.sigmoid(), update.sigmoid()
    tried = (reset * raw).tanh()
    candidate.copy_(tried)
    new.copy_(old + update * (tried - old))
    gates.copy_(torch.cat([reset, raw, update], -1))


def _gate_backward_whole(
    to_new: Tensor, gates: Tensor, candidate: Tensor, old: Tensor, to_gates: Tensor, to_old: Tensor
) -> None:
    reset, raw, update = gates.chunk(3, -1)
    to_squashed = to_new * update * (1 - candidate * candidate)
    to_update = to_new * (candidate - old) * update * (1 - update)
    to_gates.copy_(torch.cat([to_squashed * raw * reset * (1 - reset), to_squashed * reset, to_update], -1))
    to_old.copy_(to_new * (1 - update))


def _draw_whole(logits: Tensor, points: Tensor, below: Tensor, probs: Tensor, stoch: Tensor) -> None:
    found = logits.softmax(1)
    probs.copy_(found)
    inner = (found.cumsum(1)[:, :-1] <= points).to(found)
    stoch.copy_(torch.cat([below[:, :1], inner], 1) - torch.cat([inner, below[:, -1:]], 1))


def _draw_backward_whole(to_stoch: Tensor, more: Tensor, to_logits: Tensor, probs: Tensor, out: Tensor) -> None:
    weighted = (to_stoch + more) * probs
    out.copy_(to_logits + (1 - UNIMIX) * (weighted - probs * weighted.sum(1, keepdim=True)))


WHOLE = Pieces(_norm_whole, _norm_backward_whole, _gate_whole, _gate_backward_whole, _draw_whole, _draw_backward_whole)


@cache
def fused() -> Pieces:
    """The formulas, compiled."""
    return Pieces(*(Compiled(whole, plain) for whole, plain in zip(WHOLE, PLAIN, strict=True)))
