"""A step of imagination as formulas, of which torch.compile makes few kernels: what `RSSM.imagine_step` computes.

What depends on the weights alone is made once for all steps of a dream: casts, biases that belong together, and
matrices that read the same. The memory is multiplied once for the prior after it and for the step that follows; the
second part waits as `seen_NH`. There are no gradients.

Letters: N futures, D memory in K blocks of I, H hidden layer, S × C discrete latents, A an action's code; J = 3·I.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grpo.worldmodel.model.distributions import unimix
from grpo.worldmodel.model.networks import Dense, Norm, in_blocks, joined
from grpo.worldmodel.model.recurrence import normed
from grpo.worldmodel.model.rssm import RSSM, Latent

NARROW = 7
"""Numbers of an action's code for which a sum is less than starting a product: torch.compile writes out as many."""


class DreamWeights(NamedTuple):
    """Matrices in the precision of the products, the rest as it is."""

    memory_XD: Tensor
    """X = 2·H: the prior's first layer, then what the next step sees of the memory."""
    memory_bias_H: Tensor
    memory_gain_H: Tensor
    prior_HH: Tensor
    prior_bias_H: Tensor
    prior_gain_H: Tensor
    logits_SH: Tensor
    logits_bias_S: Tensor
    stoch_HS: Tensor
    action_HA: Tensor
    bias_3H: Tensor
    """Of what a step sees: memory, latents, action."""
    gain_3H: Tensor
    mix_DX: Tensor
    """X = 3·H."""
    mix_bias_D: Tensor
    block_KII: Tensor
    gain_D: Tensor
    gru_KIJ: Tensor
    gru_bias_K1J: Tensor

    @classmethod
    def of(cls, rssm: RSSM, kind: torch.dtype) -> DreamWeights:
        """A model's, for products in `kind`."""
        first, first_norm, _, second, second_norm, _, last = rssm.prior_layers
        action, action_norm, _ = rssm.from_action
        return cls(
            memory_XD=torch.cat([_weight(first), rssm.from_deter.weight]).to(kind),
            memory_bias_H=_bias(first),
            memory_gain_H=_weight(first_norm),
            prior_HH=_weight(second).to(kind),
            prior_bias_H=_bias(second),
            prior_gain_H=_weight(second_norm),
            logits_SH=_weight(last).to(kind),
            logits_bias_S=_bias(last),
            stoch_HS=rssm.from_stoch.weight.to(kind),
            action_HA=_weight(action),
            bias_3H=torch.cat([rssm.input_bias, _bias(action)[None]]),
            gain_3H=torch.cat([rssm.input_gain, _weight(action_norm)[None]]),
            mix_DX=rssm.mix.weight.to(kind),
            mix_bias_D=_bias(rssm.mix),
            block_KII=rssm.block.weight.to(kind),
            gain_D=rssm.hidden_gain,
            gru_KIJ=rssm.gru.weight.to(kind),
            gru_bias_K1J=_bias(rssm.gru) + rssm.shift_1J,
        )


def _weight(layer: nn.Module) -> Tensor:
    """Of a product or a norm."""
    return cast("Dense | Norm", layer).weight


def _bias(layer: nn.Module) -> Tensor:
    bias = cast("Dense", layer).bias
    assert bias is not None
    return bias


class Dreamt(NamedTuple):
    """Where N futures are."""

    flat_NF: Tensor
    deter_ND: Tensor
    stoch_NS: Tensor
    """Its parts in the precision of the products."""
    seen_NH: Tensor
    """What the next step sees of the memory."""


def dream_start(w: DreamWeights, latent: Latent) -> Dreamt:
    """Where N dreams begin."""
    near_ND = latent.deter.to(w.memory_XD)
    return _standing(w, latent.deter, near_ND, latent.stoch.flatten(1), F.linear(near_ND, w.memory_XD))


def dream_step(w: DreamWeights, here: Dreamt, code_NA: Tensor, uniform_NS: Tensor) -> Dreamt:
    """Where an action leads."""
    return _arrived(w, _remembered(w, here, code_NA), uniform_NS)


def _remembered(w: DreamWeights, here: Dreamt, code_NA: Tensor) -> Tensor:
    """The next memory (N, D)."""
    fine, coarse, blocks = here.flat_NF, here.deter_ND, len(w.block_KII)
    latents_NH = F.linear(here.stoch_NS, w.stoch_HS).to(fine)
    seen_N3H = torch.stack([here.seen_NH.to(fine), latents_NH, _from_action(w, code_NA)], 1) + w.bias_3H
    mixed_ND = F.linear(normed(seen_N3H, w.gain_3H).to(coarse).flatten(1), w.mix_DX).to(fine) + w.mix_bias_D
    recalled_ND = joined(torch.bmm(in_blocks(coarse, blocks), w.block_KII)).to(fine)
    hidden_KNI = in_blocks(normed(mixed_ND + recalled_ND, w.gain_D).to(coarse), blocks)
    gates_KNJ = torch.bmm(hidden_KNI, w.gru_KIJ).to(fine) + w.gru_bias_K1J
    reset, candidate, update = (joined(x) for x in gates_KNJ.chunk(3, -1))
    old_ND = fine[:, : coarse.shape[1]]
    return old_ND + update.sigmoid() * ((reset.sigmoid() * candidate).tanh() - old_ND)


def _from_action(w: DreamWeights, code_NA: Tensor) -> Tensor:
    """Less its bias. Numbers beyond ±1 are cut, so that none drowns the others."""
    code_NA = code_NA.clamp(-1.0, 1.0)
    if code_NA.shape[1] > NARROW:
        return F.linear(code_NA, w.action_HA)
    return (code_NA[:, None] * w.action_HA).sum(-1)


def _arrived(w: DreamWeights, deter_ND: Tensor, uniform_NS: Tensor) -> Dreamt:
    """The state with this memory; its latents are drawn at uniform numbers."""
    near_ND, hidden = deter_ND.to(w.memory_XD), len(w.memory_bias_H)
    both_NX = F.linear(near_ND, w.memory_XD)
    first_NH = normed(both_NX[:, :hidden].to(deter_ND) + w.memory_bias_H, w.memory_gain_H).to(near_ND)
    second_NH = normed(F.linear(first_NH, w.prior_HH).to(deter_ND) + w.prior_bias_H, w.prior_gain_H).to(near_ND)
    logits = F.linear(second_NH, w.logits_SH).to(deter_ND) + w.logits_bias_S
    stoch_NS = drawn(logits.view(*uniform_NS.shape, -1), uniform_NS).flatten(1)
    return _standing(w, deter_ND, near_ND, stoch_NS, both_NX)


def _standing(w: DreamWeights, deter_ND: Tensor, near_ND: Tensor, stoch_NS: Tensor, both_NX: Tensor) -> Dreamt:
    flat_NF, width = torch.cat([deter_ND, stoch_NS], 1), near_ND.shape[1]
    same = near_ND.dtype == flat_NF.dtype  # then they are there already
    near_NS = flat_NF[:, width:] if same else stoch_NS.to(near_ND)
    return Dreamt(flat_NF, near_ND, near_NS, both_NX[:, len(w.memory_bias_H) :])


def drawn(logits_NSC: Tensor, uniform_NS: Tensor) -> Tensor:
    """One-hot samples: `one_hot` of `mixed`, without parts of rows, at which a compiler would begin another kernel."""
    probs_NSC, last = unimix(logits_NSC.softmax(-1)), logits_NSC.shape[-1] - 1
    point_NS1 = uniform_NS[..., None] * probs_NSC.sum(-1, keepdim=True)
    classes = torch.arange(last + 1, device=logits_NSC.device)
    chosen_NS1 = ((probs_NSC.cumsum(-1) <= point_NS1) & (classes < last)).sum(-1, keepdim=True)
    return (classes == chosen_NS1).to(logits_NSC)
