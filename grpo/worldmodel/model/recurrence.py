"""The recurrence: a step of it as torch differentiates it, and all T of them with a backward pass of their own.

In `Scan` a step is a handful of small products, so everything around them counts: results go straight to where the
backward pass finds them, (T, B, …), and every weight's gradient is one product after the loop. What does not depend on
the recurrence has been computed before it.

Letters: B sequences, T steps, D memory in K blocks of I, H hidden layer, S × C discrete latents, X and J: `Weights`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grpo.threads import few_threads
from grpo.worldmodel.model.distributions import UNIMIX
from grpo.worldmodel.model.networks import EPS, in_blocks, joined
from grpo.worldmodel.model.pieces import Pieces


class Weights(NamedTuple):
    """Of what happens inside the loop."""

    deter_HD: Tensor
    stoch_HS: Tensor
    bias_2H: Tensor
    gain_2H: Tensor
    mix_DX: Tensor
    """X = 2·hidden."""
    block_KII: Tensor
    gain_D: Tensor
    gru_KIJ: Tensor
    """J = 3·I: reset, candidate and update of each block."""
    gru_bias_K1J: Tensor
    posterior_HD: Tensor
    gain_H: Tensor
    logits_SH: Tensor
    logits_bias_S: Tensor


# --- a step ---------------------------------------------------------------------------------------------------------


def normed(x: Tensor, gain: Tensor) -> Tensor:
    """RMS norm, gain and SiLU."""
    return F.silu(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * gain)


def remember(w: Weights, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
    """The next memory, from the last (B, D), its latents (B, S·C) and the action's part of the hidden layer (B, D).

    Under autocast products are coarser; what lies between them is as fine as the memory.
    """
    old = in_blocks(deter, len(w.block_KII))
    seen = torch.stack([F.linear(deter, w.deter_HD), F.linear(stoch, w.stoch_HS)], 1) + w.bias_2H
    hidden = torch.addmm(action, normed(seen, w.gain_2H).flatten(1), w.mix_DX.t()).to(deter)
    hidden = hidden + joined(torch.bmm(old, w.block_KII))
    mixed = in_blocks(normed(hidden, w.gain_D), len(old))
    gates = torch.baddbmm(w.gru_bias_K1J, mixed, w.gru_KIJ).to(deter)
    reset, candidate, update = gates.chunk(3, -1)
    return joined(torch.lerp(old, torch.tanh(reset.sigmoid() * candidate), update.sigmoid()))


def recognise(w: Weights, deter: Tensor, embed: Tensor) -> Tensor:
    """The posterior's logits (B, S·C)."""
    layer = torch.addmm(embed, deter, w.posterior_HD.t())
    return torch.addmm(w.logits_bias_S, normed(layer, w.gain_H), w.logits_SH.t())


# --- all of them ----------------------------------------------------------------------------------------------------


class _Norm:
    """The RMS norm, gain and SiLU of one place in the step, at all steps; `out` (T, B, …) is what it gave."""

    def __init__(self, pieces: Pieces, gain: Tensor, steps: int, batch: int) -> None:
        self._forward, self._backward = pieces.norm, pieces.norm_backward
        self._root = gain.shape[-1] ** 0.5
        self._gain, self._least = gain * self._root, gain.shape[-1] * EPS
        self.out = gain.new_empty(steps, batch, *gain.shape)
        self._outs, self._units = self.out.unbind(0), torch.empty_like(self.out).unbind(0)
        self._lengths = gain.new_empty(*self.out.shape[:-1], 1).unbind(0)

    def forward(self, step: int, x: Tensor) -> Tensor:
        """What it gives."""
        self._forward(x, self._gain, self._least, self._lengths[step], self._units[step], self._outs[step])
        return self._outs[step]

    def turn(self) -> None:
        """Make room for the backward pass: the gradients of what it was given, (T, B, …), and of the gain."""
        self.grad = torch.empty_like(self.out)
        self._grads = self.grad.unbind(0)
        self._to_gain = torch.zeros_like(self._grads[0])

    def backward(self, step: int, grad: Tensor) -> Tensor:
        """The same backwards."""
        self._backward(grad, self._units[step], self._lengths[step], self._gain, self._to_gain, self._grads[step])
        return self._grads[step]

    @property
    def to_gain(self) -> Tensor:
        """The gain's gradient, after the last step."""
        return self._to_gain.sum(0) * self._root


def _blockwise(x_TBD: Tensor, blocks: int) -> tuple[Tensor, ...]:
    """Views (K, B, I) of every step."""
    return x_TBD.view(*x_TBD.shape[:-1], blocks, -1).transpose(1, 2).unbind(0)


class _Tape:
    """B sequences of T steps: what the backward pass needs of them. Latents are (B, C, S) here, see `shares`."""

    def __init__(self, pieces: Pieces, w: Weights, steps: int, deter: Tensor, stoch: Tensor) -> None:
        self.pieces, batch, new, self.classes = pieces, len(deter), deter.new_empty, stoch.shape[1]
        blocks, size, _ = w.block_KII.shape
        self.w = _turned(w, self.classes)
        norms = (_Norm(pieces, gain, steps, batch) for gain in (w.gain_2H, w.gain_D, w.gain_H))
        self.inputs, self.hidden, self.layer = norms
        self.old, self.deter = new(steps, *deter.shape), new(steps, *deter.shape)
        self.old_stoch, self.stoch, self.logits, self.probs = (new(steps, *stoch.shape) for _ in range(4))
        self.gates, self.candidate = new(steps, blocks, batch, 3 * size), new(steps, blocks, batch, size)

    def forward(self, given: tuple[Tensor, ...], deter: Tensor, stoch: Tensor) -> None:
        """The loop, over actions, observations, what is kept of the state before, and uniform numbers."""
        w, blocks = self.w, len(self.w.block_KII)
        seen, hidden = torch.empty_like(self.inputs.out[0]), torch.empty_like(deter)
        from_deter, from_stoch, bias = seen[:, 0], seen[:, 1], w.bias_2H.unbind(0)
        hidden_KBI, mixed_KBI = in_blocks(hidden, blocks), torch.empty_like(self.candidate[0])
        inputs, recalled = self.inputs.out.flatten(2).unbind(0), _blockwise(self.hidden.out, blocks)
        olds, old_stochs = self.old.unbind(0), self.old_stoch.flatten(2).unbind(0)
        deters, stochs, logits = (x.unbind(0) for x in (self.deter, self.stoch, self.logits.flatten(2)))
        old_blocks, new_blocks = _blockwise(self.old, blocks), _blockwise(self.deter, blocks)
        gates, candidates, every_logits, probs = (
            x.unbind(0) for x in (self.gates, self.candidate, self.logits, self.probs)
        )
        action, embed, keep, points = (x.unbind(0) for x in (*given[:-1], _points(given[-1], self.classes)))
        below = torch.ones_like(stoch[:, :1]).repeat(1, self.classes + 1, 1)
        below[:, -1] = 0
        stoch = stoch.flatten(1)
        for t in range(len(keep)):
            old = torch.mul(deter, keep[t], out=olds[t])
            old_stoch = torch.mul(stoch, keep[t], out=old_stochs[t])
            torch.addmm(bias[0], old, w.deter_HD.t(), out=from_deter)
            torch.addmm(bias[1], old_stoch, w.stoch_HS.t(), out=from_stoch)
            self.inputs.forward(t, seen)
            torch.addmm(action[t], inputs[t], w.mix_DX.t(), out=hidden)
            hidden_KBI += torch.bmm(old_blocks[t], w.block_KII, out=mixed_KBI)
            self.hidden.forward(t, hidden)
            torch.baddbmm(w.gru_bias_K1J, recalled[t], w.gru_KIJ, out=gates[t])
            self.pieces.gate(old_blocks[t], gates[t], candidates[t], new_blocks[t])
            deter = deters[t]
            layer = self.layer.forward(t, torch.addmm(embed[t], deter, w.posterior_HD.t()))
            torch.addmm(w.logits_bias_S, layer, w.logits_SH.t(), out=logits[t])
            self.pieces.draw(every_logits[t], points[t], below, probs[t], stochs[t])
            stoch = stochs[t].flatten(1)

    def backward(self, keep_TB1: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The loop backwards, from the gradients of memories, latents and logits.

        To those of actions, observations, the first memory, the first latents, and the weights.
        """
        w, blocks = self.w, len(self.w.block_KII)
        for norm in (self.inputs, self.hidden, self.layer):
            norm.turn()
        more_deter, more_stoch, more_logits, keep = (x.contiguous().unbind(0) for x in (*given, keep_TB1))
        to_deter, to_stoch = torch.zeros_like(more_deter[0]), torch.zeros_like(more_stoch[0])
        to_logits_TBCS, to_gates_KTBJ = torch.empty_like(self.logits), torch.empty_like(self.gates.transpose(0, 1))
        to_gates, gates, olds = to_gates_KTBJ.unbind(1), self.gates.unbind(0), _blockwise(self.old, blocks)
        probs, candidates, all_logits = self.probs.unbind(0), self.candidate.unbind(0), to_logits_TBCS.unbind(0)
        to_kept = torch.empty_like(candidates[0])
        gru_KJI, block_KII = w.gru_KIJ.transpose(1, 2), w.block_KII.transpose(1, 2)
        for t in reversed(range(len(keep))):
            self.pieces.draw_backward(to_stoch, more_stoch[t], more_logits[t], probs[t], all_logits[t])
            to_layer = self.layer.backward(t, all_logits[t].flatten(1) @ w.logits_SH)
            to_new = in_blocks((to_deter + more_deter[t]).addmm_(to_layer, w.posterior_HD), blocks)
            self.pieces.gate_backward(to_new, gates[t], candidates[t], olds[t], to_gates[t], to_kept)
            to_hidden = self.hidden.backward(t, joined(torch.bmm(to_gates[t], gru_KJI)))
            to_seen = self.inputs.backward(t, (to_hidden @ w.mix_DX).view_as(self.inputs.out[t]))
            to_old = torch.baddbmm(to_kept, in_blocks(to_hidden, blocks), block_KII)
            to_deter = joined(to_old).addmm_(to_seen[:, 0], w.deter_HD).mul_(keep[t])
            to_stoch = (to_seen[:, 1] @ w.stoch_HS).mul_(keep[t]).view_as(to_stoch)
        to_seen, to_hidden, to_layer = (norm.grad for norm in (self.inputs, self.hidden, self.layer))
        to_gate, to_logits, old = to_gates_KTBJ.flatten(1, 2), to_logits_TBCS.flatten(2), self.old.flatten(0, 1)
        weights = Weights(
            deter_HD=_product(to_seen[:, :, 0], self.old),
            stoch_HS=_product(to_seen[:, :, 1], self.old_stoch.flatten(2)),
            bias_2H=to_seen.sum((0, 1)),
            gain_2H=self.inputs.to_gain,
            mix_DX=_product(to_hidden, self.inputs.out.flatten(2)),
            block_KII=torch.bmm(in_blocks(old, blocks).transpose(1, 2), in_blocks(to_hidden.flatten(0, 1), blocks)),
            gain_D=self.hidden.to_gain,
            gru_KIJ=torch.bmm(in_blocks(self.hidden.out.flatten(0, 1), blocks).transpose(1, 2), to_gate),
            gru_bias_K1J=to_gate.sum(1, keepdim=True),
            posterior_HD=_product(to_layer, self.deter),
            gain_H=self.layer.to_gain,
            logits_SH=_product(to_logits, self.layer.out),
            logits_bias_S=to_logits.sum((0, 1)),
        )
        return to_hidden, to_layer, to_deter, to_stoch, *_turned(weights, to_stoch.shape[2])


def _turned(w: Weights, inner: int) -> Weights:
    """Weights for latents in the other order: (S, C) becomes (C, S) where `inner` is C, and the other way round."""

    def turned(x: Tensor, dim: int) -> Tensor:
        shape = (*x.shape[:dim], -1, inner, *x.shape[dim + 1 :])
        return x.reshape(shape).transpose(dim, dim + 1).flatten(dim, dim + 1)

    return w._replace(
        stoch_HS=turned(w.stoch_HS, 1), logits_SH=turned(w.logits_SH, 0), logits_bias_S=turned(w.logits_bias_S, 0)
    )


def _points(uniform_TBS: Tensor, classes: int) -> Tensor:
    """What the sums of probabilities up to a class have to exceed, before they are mixed: (T, B, C − 1, S)."""
    even_C1 = torch.arange(1, classes, device=uniform_TBS.device)[:, None] * (UNIMIX / classes)
    return (uniform_TBS[:, :, None] - even_C1.to(uniform_TBS)) / (1 - UNIMIX)


class Scan(torch.autograd.Function):
    """`remember` and `recognise` over T steps."""

    @staticmethod
    def forward(
        ctx: Any,
        pieces: Pieces,
        action_TBD: Tensor,
        embed_TBH: Tensor,
        keep_TB1: Tensor,
        uniform_TBS: Tensor,
        deter: Tensor,
        stoch: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Memories, latents and the posterior's logits, (T, B, …)."""
        ctx.save_for_backward(keep_TB1, *weights)  # torch then sees to it that nobody has changed them
        stoch = stoch.transpose(1, 2)
        ctx.tape = tape = _Tape(pieces, Weights(*weights), len(action_TBD), deter, stoch)
        with few_threads(tape.w.gru_KIJ.numel() * len(deter), deter.device):
            tape.forward((action_TBD, embed_TBH, keep_TB1, uniform_TBS), deter, stoch)
        return tape.deter.detach(), tape.stoch.transpose(2, 3), tape.logits.transpose(2, 3)  # never the tape's own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Through all of it."""
        keep_TB1, *_ = ctx.saved_tensors
        to_deter, to_stoch, to_logits = grads
        with few_threads(ctx.tape.w.gru_KIJ.numel() * keep_TB1.shape[1], keep_TB1.device):
            found = ctx.tape.backward(keep_TB1, to_deter, to_stoch.transpose(2, 3), to_logits.transpose(2, 3))
        action, embed, deter, stoch, *weights = found
        return None, action, embed, None, None, deter, stoch.transpose(1, 2), *weights


def _product(grad_TBO: Tensor, x_TBI: Tensor) -> Tensor:
    """The gradient of a dense layer's weight, (O, I)."""
    return grad_TBO.flatten(0, 1).t() @ x_TBI.flatten(0, 1)
