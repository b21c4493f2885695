"""The recurrent state-space model: a deterministic memory in blocks, and discrete latents beside it.

    a step         (deter, stoch), action → deter
    the prior      deter → what the latents may be; what imagination goes on with
    the posterior  deter, observation → what they are

What does not depend on the recurrence is computed for all steps at once: the action's and the observation's products
before the loop, every weight's gradient after it. Inside, a step is a handful of products, so `observe` has a backward
pass of its own; `observe_step`, which torch differentiates by itself, is the same mathematics one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grpo.config import ConfigError
from grpo.worldmodel.distributions import UNIMIX, mixed, one_hot, straight_through, uniform
from grpo.worldmodel.networks import EPS, BlockLinear, Dense, blocks_of, head, in_blocks, joined, mlp

UPDATE_BIAS = -1.0
"""Of the update gate: an untrained memory rather keeps what it has."""


@dataclass(frozen=True)
class Size:
    """Widths of a world model."""

    deter: int
    hidden: int
    classes: int
    depth: int
    """Channels of the first convolution, halved."""
    units: int
    """Of dense layers outside the recurrence."""
    stoch: int = 32


SIZES = {
    "0.5m": Size(deter=256, hidden=64, classes=4, depth=4, units=64),
    "1m": Size(deter=512, hidden=64, classes=4, depth=4, units=64),
    "4m": Size(deter=1280, hidden=160, classes=10, depth=10, units=160),
    "12m": Size(deter=2048, hidden=256, classes=16, depth=16, units=256),
    "25m": Size(deter=3072, hidden=384, classes=24, depth=24, units=384),
    "50m": Size(deter=4096, hidden=512, classes=32, depth=32, units=512),
}
"""By how many millions of weights an agent has that sees 64×64 colour pictures."""


def size_of(size: str | Size) -> Size:
    """The widths that a name stands for."""
    if isinstance(size, Size):
        return size
    if size not in SIZES:
        raise ConfigError(f"size={size!r} is not one of {', '.join(SIZES)}")
    return SIZES[size]


@dataclass(frozen=True)
class Latent:
    """A state of the model, with any leading dimensions."""

    deter: Tensor
    """(…, D)."""
    stoch: Tensor
    """(…, S, C), one-hot."""

    @property
    def flat(self) -> Tensor:
        """(…, D + S·C): what heads read."""
        return torch.cat([self.deter, self.stoch.flatten(-2)], -1)

    def each(self, change: Callable[[Tensor], Tensor]) -> Latent:
        """`change` on both parts."""
        return Latent(change(self.deter), change(self.stoch))

    def __getitem__(self, index: Any) -> Latent:
        """These of the leading dimensions."""
        return self.each(lambda x: x[index])

    def detach(self) -> Latent:
        """The same without gradients."""
        return self.each(Tensor.detach)


@dataclass(frozen=True)
class Observed:
    """What `observe` makes of B sequences of T steps."""

    latent: Latent
    """The posterior's samples, (B, T)."""
    posterior_BTSC: Tensor
    """Logits."""
    prior_BTSC: Tensor
    """Logits, before each observation was seen."""


class _Weights(NamedTuple):
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


def _normed(x: Tensor, gain: Tensor) -> Tensor:
    return F.silu(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * gain)


def _remember(w: _Weights, deter: Tensor, stoch: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next memory, and on the way there the inputs (B, 2, H), the hidden layer (B, D) and the gates (K, B, J)."""
    blocks = len(w.block_KII)
    seen = torch.stack([F.linear(deter, w.deter_HD), F.linear(stoch, w.stoch_HS)], 1) + w.bias_2H
    hidden = torch.addmm(action, _normed(seen, w.gain_2H).flatten(1), w.mix_DX.t())
    old = in_blocks(deter, blocks)
    hidden = hidden + joined(torch.bmm(old, w.block_KII))
    gates = torch.baddbmm(w.gru_bias_K1J, in_blocks(_normed(hidden, w.gain_D), blocks), w.gru_KIJ)
    reset, candidate, update = gates.chunk(3, -1)
    candidate = torch.tanh(reset.sigmoid() * candidate)
    new = torch.lerp(old, candidate, (update + UPDATE_BIAS).sigmoid())
    return joined(new), seen, hidden, gates


def _recognise(w: _Weights, deter: Tensor, embed: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior's logits (B, S·C), and the layer before them (B, H)."""
    layer = torch.addmm(embed, deter, w.posterior_HD.t())
    return torch.addmm(w.logits_bias_S, _normed(layer, w.gain_H), w.logits_SH.t()), layer


def _ahead(w: _Weights, deter: Tensor, stoch: Tensor, step: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A step of the loop: the new state, and what the way back needs."""
    action, embed, keep, point = step
    deter, seen, hidden, gates = _remember(w, deter * keep, stoch * keep, action)
    logits, layer = _recognise(w, deter, embed)
    stoch = one_hot(mixed(logits.view(*point.shape, -1)), point).flatten(1)
    return deter, stoch, logits, seen, hidden, gates, layer


def _back(w: _Weights, to_deter: Tensor, to_stoch: Tensor, step: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same step backwards: gradients of the state before it, then of everything that a weight multiplied."""
    more_deter, more_stoch, more_logits, keep, probs, stays, *bends, slope = step
    into_slope, into_unit, recall_slope, recall_unit, recognise_slope, recognise_unit = bends
    blocks = len(w.block_KII)
    along = probs * (to_stoch.view_as(probs) + more_stoch)
    to_logits = (more_logits + (1 - UNIMIX) * (along - probs * along.sum(-1, keepdim=True))).flatten(1)
    to_recognised = to_logits @ w.logits_SH
    to_layer = _through(to_recognised, recognise_slope, recognise_unit)
    to_deter = torch.addmm(to_deter + more_deter, to_layer, w.posterior_HD)
    to_gates = (in_blocks(to_deter, blocks).unsqueeze(-2) * slope).flatten(2)
    to_recalled = joined(torch.bmm(to_gates, w.gru_KIJ.transpose(1, 2)))
    to_hidden = _through(to_recalled, recall_slope, recall_unit)
    to_inputs = (to_hidden @ w.mix_DX).view_as(into_unit)
    to_seen = _through(to_inputs, into_slope, into_unit)
    to_old = joined(torch.bmm(in_blocks(to_hidden, blocks), w.block_KII.transpose(1, 2)))
    to_old = torch.addmm(torch.addcmul(to_old, to_deter, stays), to_seen[:, 0], w.deter_HD) * keep
    to_stoch = (to_seen[:, 1] @ w.stoch_HS) * keep
    return to_old, to_stoch, to_logits, to_recognised, to_layer, to_recalled, to_hidden, to_inputs, to_seen, to_gates


class _Scan(torch.autograd.Function):
    """`_remember` and `_recognise` over T steps; backwards, a loop for the states and one product for each weight."""

    @staticmethod
    def forward(
        ctx: Any,
        action_BTD: Tensor,
        embed_BTH: Tensor,
        keep_BT1: Tensor,
        uniform_BTS: Tensor,
        deter: Tensor,
        stoch: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        w, first, kept = _Weights(*weights), (deter, stoch), []
        stoch = stoch.flatten(1)
        for step in zip(*(x.unbind(1) for x in (action_BTD, embed_BTH, keep_BT1, uniform_BTS)), strict=True):
            kept.append(_ahead(w, deter, stoch, step))
            deter, stoch, *_ = kept[-1]
        deters, stochs, all_logits, seens, hiddens, all_gates, layers = zip(*kept, strict=True)
        deter_BTD, stoch_BTS = torch.stack(deters, 1), torch.stack(stochs, 1)
        logits_BTS = torch.stack(all_logits, 1)
        ctx.save_for_backward(
            *weights,
            *first,
            keep_BT1,
            deter_BTD,
            stoch_BTS,
            logits_BTS,
            torch.stack(seens, 1),
            torch.stack(hiddens, 1),
            torch.stack(all_gates, 2),
            torch.stack(layers, 1),
        )
        ctx.classes = first[1].shape[-1]
        latents = (*stoch_BTS.shape[:-1], -1, ctx.classes)
        return deter_BTD, stoch_BTS.view(latents), logits_BTS.view(latents)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_deter: Tensor, grad_stoch: Tensor, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        count = len(_Weights._fields)
        w, saved = _Weights(*ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        deter_0, stoch_0, keep_BT1, deter_BTD, stoch_BTS, logits_BTS, seen, hidden, gates, layer = saved
        blocks = len(w.block_KII)
        old_BTD = torch.cat([deter_0[:, None], deter_BTD[:, :-1]], 1) * keep_BT1
        old_stoch_BTS = torch.cat([stoch_0.flatten(1)[:, None], stoch_BTS[:, :-1]], 1) * keep_BT1

        # Slopes of everything that is not a product, for all steps at once.
        into, recall, recognise = _Norm(seen, w.gain_2H), _Norm(hidden, w.gain_D), _Norm(layer, w.gain_H)
        reset, candidate, update = gates.chunk(3, -1)
        reset, update = reset.sigmoid(), (update + UPDATE_BIAS).sigmoid()
        tanh = torch.tanh(reset * candidate)
        old_KBTI = old_BTD.unflatten(-1, (blocks, -1)).permute(2, 0, 1, 3)
        by_tanh = update * (1 - tanh.square())
        slopes = (by_tanh * candidate * reset * (1 - reset), by_tanh * reset, (tanh - old_KBTI) * update * (1 - update))
        gates_slope = torch.stack(slopes, -2)
        stays = (1 - update).permute(1, 2, 0, 3).flatten(2)
        softmax = logits_BTS.unflatten(-1, (-1, ctx.classes)).softmax(-1)

        norms = [x for norm in (into, recall, recognise) for x in (norm.slope, norm.unit)]
        given = [grad_deter, grad_stoch, grad_logits, keep_BT1, softmax, stays, *norms]
        steps = [x.unbind(1) for x in given]
        to_deter, to_stoch = torch.zeros_like(deter_0), torch.zeros_like(stoch_0).flatten(1)
        found = []
        for step in reversed(list(zip(*steps, gates_slope.unbind(2), strict=True))):
            to_deter, to_stoch, *rest = _back(w, to_deter, to_stoch, step)
            found.append(rest)
        *others, all_gates = zip(*reversed(found), strict=True)
        to_logits, to_recognised, to_layer, to_recalled, to_hidden, to_inputs, to_seen = (
            torch.stack(x, 1) for x in others
        )
        to_gates = torch.stack(all_gates, 2)

        weights = _Weights(
            deter_HD=_product(to_seen[:, :, 0], old_BTD),
            stoch_HS=_product(to_seen[:, :, 1], old_stoch_BTS),
            bias_2H=to_seen.sum((0, 1)),
            gain_2H=into.to_gain(to_inputs),
            mix_DX=_product(to_hidden, into.out.flatten(2)),
            block_KII=torch.bmm(_rows(old_BTD, blocks).transpose(1, 2), _rows(to_hidden, blocks)),
            gain_D=recall.to_gain(to_recalled),
            gru_KIJ=torch.bmm(_rows(recall.out, blocks).transpose(1, 2), to_gates.flatten(1, 2)),
            gru_bias_K1J=to_gates.sum((1, 2))[:, None],
            posterior_HD=_product(to_layer, deter_BTD),
            gain_H=recognise.to_gain(to_recognised),
            logits_SH=_product(to_logits, recognise.out),
            logits_bias_S=to_logits.sum((0, 1)),
        )
        return to_hidden, to_layer, None, None, to_deter, to_stoch.view_as(stoch_0), *weights


class _Norm:
    """An RMS norm with a gain and SiLU, for all steps: what it gave and how it bends."""

    def __init__(self, x: Tensor, gain: Tensor) -> None:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        self.unit = x * inverse
        normed = self.unit * gain
        gate = normed.sigmoid()
        self.out = normed * gate
        self._bend = gate * (1 + normed * (1 - gate))
        self.slope = self._bend * (inverse * gain)

    def to_gain(self, grad: Tensor) -> Tensor:
        """The gain's gradient."""
        return (grad * self._bend * self.unit).sum((0, 1))


def _through(grad: Tensor, slope: Tensor, unit: Tensor) -> Tensor:
    """A gradient on its way back through such a norm."""
    grad = grad * slope
    return torch.addcmul(grad, unit, (grad * unit).mean(-1, keepdim=True), value=-1)


def _product(grad_BTO: Tensor, x_BTI: Tensor) -> Tensor:
    """The gradient of a dense layer's weight, (O, I)."""
    return grad_BTO.flatten(0, 1).t() @ x_BTI.flatten(0, 1)


def _rows(x_BTD: Tensor, blocks: int) -> Tensor:
    return in_blocks(x_BTD.flatten(0, 1), blocks)


class RSSM(nn.Module):
    """The recurrent model over embedded observations of `embed` numbers and actions of `action` numbers."""

    def __init__(self, embed: int, action: int, size: Size) -> None:
        super().__init__()
        self.size, deter, hidden = size, size.deter, size.hidden
        self.blocks = blocks_of(deter)
        latents = size.stoch * size.classes
        self.from_deter = Dense(deter, hidden, bias=False)
        self.from_stoch = Dense(latents, hidden, bias=False)
        self.input_bias = nn.Parameter(torch.zeros(2, hidden))
        self.input_gain = nn.Parameter(torch.ones(2, hidden))
        self.from_action = mlp(action, hidden, 1)
        fan_in = deter + 3 * hidden * self.blocks  # every block reads its own part of the memory and all three inputs
        self.mix = Dense(3 * hidden, deter, fan_in=fan_in)
        self.block = BlockLinear(deter, deter, self.blocks, fan_in=fan_in, bias=False)
        self.hidden_gain = nn.Parameter(torch.ones(deter))
        self.gru = BlockLinear(deter, 3 * deter, self.blocks)
        self.posterior_deter = Dense(deter, hidden, fan_in=deter + embed, bias=False)
        self.posterior_embed = Dense(embed, hidden, fan_in=deter + embed)
        self.posterior_gain = nn.Parameter(torch.ones(hidden))
        self.posterior_logits = Dense(hidden, latents)
        self.prior_layers = head(deter, hidden, latents, layers=2)

    def initial(self, *lead: int) -> Latent:
        """Before anything has happened: zeros."""
        size, like = self.size, self.hidden_gain
        return Latent(like.new_zeros(*lead, size.deter), like.new_zeros(*lead, size.stoch, size.classes))

    def observe(
        self,
        embed_BTE: Tensor,
        action_BTA: Tensor,
        is_first_BT: Tensor,
        latent: Latent | None = None,
        random: torch.Generator | Tensor | None = None,
    ) -> Observed:
        """Go through B sequences from `latent` (B), which is forgotten wherever an episode begins.

        `random` are uniform numbers (B, T, S), or what draws them.
        """
        latent = self.initial(len(embed_BTE)) if latent is None else latent
        keep_BT1, action_BTD, embed_BTH = self._hoisted(embed_BTE, action_BTA, is_first_BT)
        uniform_BTS = uniform((*is_first_BT.shape, self.size.stoch), random, action_BTD)
        start = latent.each(lambda x: x.to(action_BTD))
        with self._exactly():
            deter, stoch, logits = _Scan.apply(  # type: ignore[no-untyped-call]
                action_BTD, embed_BTH, keep_BT1, uniform_BTS, start.deter, start.stoch, *self._weights()
            )
        return Observed(Latent(deter, stoch), logits, self.prior(deter))

    def observe_step(
        self,
        embed_BE: Tensor,
        action_BA: Tensor,
        is_first_B: Tensor,
        latent: Latent,
        random: torch.Generator | Tensor | None = None,
    ) -> tuple[Latent, Tensor]:
        """One step of it, for acting: the posterior's sample and its logits. `random`: (B, S), or what draws it."""
        keep_B1, action_BD, embed_BH = self._hoisted(embed_BE, action_BA, is_first_B)
        with self._exactly():
            weights = self._weights()
            deter, *_ = _remember(weights, latent.deter * keep_B1, latent.stoch.flatten(1) * keep_B1, action_BD)
            logits = self._shaped(_recognise(weights, deter, embed_BH)[0])
        return Latent(deter, straight_through(logits, uniform(logits.shape[:-1], random, logits))), logits

    def imagine_step(self, latent: Latent, action_BA: Tensor, random: torch.Generator | Tensor | None = None) -> Latent:
        """The next state as the prior has it. `random`: uniform numbers (B, S), or what draws them."""
        action_BD = self._action(action_BA)
        with self._exactly():
            deter, *_ = _remember(self._weights(), latent.deter, latent.stoch.flatten(1), action_BD)
        logits = self.prior(deter)
        return Latent(deter, straight_through(logits, uniform(logits.shape[:-1], random, logits)))

    def prior(self, deter: Tensor) -> Tensor:
        """Logits (…, S, C) of the latents that go with a memory."""
        return self._shaped(self.prior_layers(deter)).to(self.hidden_gain)

    def _hoisted(self, embed: Tensor, action: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the steps need of resets, actions and observations, whatever the memory is."""
        keep = (~is_first)[..., None].to(self.hidden_gain)
        return keep, self._action(action * keep), self.posterior_embed(embed).to(keep)

    def _action(self, action: Tensor) -> Tensor:
        """The action's part of the hidden layer. Numbers beyond ±1 are cut, so that none drowns the others."""
        action = action.to(self.hidden_gain).clamp(-1.0, 1.0)
        part = self.from_action(action)
        return F.linear(part, self.mix.weight[:, 2 * self.size.hidden :], self.mix.bias).to(self.hidden_gain)

    def _exactly(self) -> torch.autocast:
        """The recurrence keeps its weights' precision under autocast: errors would add up from step to step."""
        return torch.autocast(self.hidden_gain.device.type, enabled=False)

    def _shaped(self, logits: Tensor) -> Tensor:
        return logits.view(*logits.shape[:-1], self.size.stoch, self.size.classes)

    def _weights(self) -> _Weights:
        assert self.gru.bias is not None and self.posterior_logits.bias is not None
        return _Weights(
            deter_HD=self.from_deter.weight,
            stoch_HS=self.from_stoch.weight,
            bias_2H=self.input_bias,
            gain_2H=self.input_gain,
            mix_DX=self.mix.weight[:, : 2 * self.size.hidden],
            block_KII=self.block.weight,
            gain_D=self.hidden_gain,
            gru_KIJ=self.gru.weight,
            gru_bias_K1J=self.gru.bias,
            posterior_HD=self.posterior_deter.weight,
            gain_H=self.posterior_gain,
            logits_SH=self.posterior_logits.weight,
            logits_bias_S=self.posterior_logits.bias,
        )
