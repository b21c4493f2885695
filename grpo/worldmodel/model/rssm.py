"""The recurrent state-space model: a deterministic memory in blocks, and discrete latents beside it.

    a step         (deter, stoch), action → deter
    the prior      deter → what the latents may be; what imagination goes on with
    the posterior  deter, observation → what they are

What does not depend on the recurrence is computed for all steps at once: the action's and the observation's products
before the loop, every weight's gradient after it. `observe` has a backward pass of its own (`recurrence`);
`observe_step`, which torch differentiates by itself, is the same mathematics one step at a time.

Letters: B sequences, T steps, D deterministic latent, S × C discrete, E encoding, A action; weights: see `recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grpo.config import ConfigError
from grpo.worldmodel.model.distributions import straight_through, uniform
from grpo.worldmodel.model.networks import BlockLinear, Dense, blocks_of, head, mlp
from grpo.worldmodel.model.pieces import PLAIN
from grpo.worldmodel.model.recurrence import Scan, Weights, recognise, remember

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
    "100m": Size(deter=6144, hidden=768, classes=48, depth=48, units=768),
    "200m": Size(deter=8192, hidden=1024, classes=64, depth=64, units=1024),
    "400m": Size(deter=12288, hidden=1536, classes=96, depth=96, units=1536),
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


class RSSM(nn.Module):
    """The recurrent model over embedded observations of `embed` numbers and actions of `action` numbers."""

    shift_1J: Tensor

    def __init__(self, embed: int, action: int, size: Size) -> None:
        super().__init__()
        self.size, deter, hidden = size, size.deter, size.hidden
        self.pieces = PLAIN
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
        shift_3I = torch.tensor([0.0, 0.0, UPDATE_BIAS])[:, None].expand(-1, deter // self.blocks)
        self.register_buffer("shift_1J", shift_3I.reshape(1, -1), persistent=False)
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
        by_step = (x.transpose(0, 1) for x in (embed_BTE, action_BTA, is_first_BT))
        keep_TB1, action_TBD, embed_TBH = self._hoisted(*by_step)
        uniform_TBS = uniform((*is_first_BT.shape, self.size.stoch), random, action_TBD).transpose(0, 1)
        start = latent.each(lambda x: x.to(action_TBD))
        with self._exactly():
            found = Scan.apply(  # type: ignore[no-untyped-call]
                self.pieces, action_TBD, embed_TBH, keep_TB1, uniform_TBS, start.deter, start.stoch, *self._weights()
            )
        deter, stoch, logits = (x.transpose(0, 1) for x in found)
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
            deter = remember(weights, latent.deter * keep_B1, latent.stoch.flatten(1) * keep_B1, action_BD)
            logits = self._shaped(recognise(weights, deter, embed_BH))
        return Latent(deter, straight_through(logits, uniform(logits.shape[:-1], random, logits))), logits

    def imagine_step(
        self,
        latent: Latent,
        action_BA: Tensor,
        random: torch.Generator | Tensor | None = None,
        coarse: bool = False,
    ) -> Latent:
        """The next state as the prior has it. `random`: uniform numbers (B, S), or what draws them.

        coarse: under autocast the recurrence multiplies as that says, too; nothing is learned from its last digits.
        """
        action_BD = self._action(action_BA)
        with nullcontext() if coarse else self._exactly():
            deter = remember(self._weights(), latent.deter, latent.stoch.flatten(1), action_BD)
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

    def _weights(self) -> Weights:
        assert self.gru.bias is not None and self.posterior_logits.bias is not None
        return Weights(
            deter_HD=self.from_deter.weight,
            stoch_HS=self.from_stoch.weight,
            bias_2H=self.input_bias,
            gain_2H=self.input_gain,
            mix_DX=self.mix.weight[:, : 2 * self.size.hidden],
            block_KII=self.block.weight,
            gain_D=self.hidden_gain,
            gru_KIJ=self.gru.weight,
            gru_bias_K1J=self.gru.bias + self.shift_1J,
            posterior_HD=self.posterior_deter.weight,
            gain_H=self.posterior_gain,
            logits_SH=self.posterior_logits.weight,
            logits_bias_S=self.posterior_logits.bias,
        )
