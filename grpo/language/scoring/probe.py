"""Which way a model is scored: every way that might be faster is tried, and compared with the plain one.

    head(body(x)) = logits?   ─ no ─► the module's own logits, whole
    fused head                ─ tried forward and backward beside the plain one
    packing                   ─ shared prompts get the numbers that rows get alone?
    layers by hand            ─ for `segments`: the same, with a backward pass of their own

Letters: those of `scorer`.
"""

from __future__ import annotations

import importlib.util
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.config import ConfigError
from grpo.errors import line, warn
from grpo.language.samples import Prompt, Sample
from grpo.language.scoring import segments
from grpo.language.scoring.attention_switch import attention_switched, switch_attention
from grpo.language.scoring.decoder_layout import Unsupported
from grpo.language.scoring.head import fuses
from grpo.language.scoring.modes import mode_of
from grpo.language.scoring.scorer import Scorer, ScoringPlan

if TYPE_CHECKING:
    from grpo.language.scoring.layers import Layers

PROBES, PROBED = 12, 1 << 26
"""Weights whose gradients are compared when a way of packing is tried, and how large they may be."""
TRUSTED, COARSE = 1e-2, 5e-2
"""Relative difference of log-probs and gradients that nobody asks about when a way to compute them is tried; and where
the weights themselves are so coarse that nothing exact is at hand to compare with."""


def make_scorer(
    model: Any,
    temperature: float,
    packing: str = "auto",
    budget: int | None = None,
    pad: int = 0,
    autocast: torch.dtype | None = None,
) -> Scorer:
    """A scorer of this model, the fastest way that gives the plain one's numbers."""
    plain = Scorer(model, temperature, ScoringPlan(), budget, pad, autocast)
    return Scorer(model, temperature, plan_scoring(plain, packing), budget, pad, autocast)


def plan_scoring(plain: Scorer, packing: str = "auto") -> ScoringPlan:
    """What the model of a plain scorer allows; where it is `segments`, the model attends so from now on."""
    whole = not head_is_known(plain)
    plan = ScoringPlan(whole_logits=whole, fused_head=not whole and head_fuses(plain))
    plan = replace(plan, packing=_choose_packing(plain, plan) if packing == "auto" else packing)
    if plan.packing == "segments":
        if not can_score(plain, plan):
            raise ConfigError(
                "packing=segments needs a GPU, bfloat16 or float16, and a model whose attention goes through "
                "transformers' attention interface, without a window; use packing=auto"
            )
        switch_attention(plain.causal, segments.INTERFACE)
        plan = replace(plan, layers=_layers_by_hand(plain, plan))
    if whole:
        warn(
            f"{type(plain.causal).__name__} does more with its head than this room knows: its logits are made whole, "
            "which takes more memory",
        )
    return plan


@torch.no_grad()
def head_is_known(plain: Scorer) -> bool:
    """Whether head(body(x)) are the module's own logits; a module that looks ahead is refused here."""
    causal = plain.causal
    ids = torch.arange(4, device=plain.device)[None] % causal.config.get_text_config().vocab_size
    with mode_of(plain.model, False):
        own = causal(input_ids=ids, use_cache=False).logits
        other = causal(input_ids=ids * torch.tensor([1, 1, 1, 0], device=ids.device), use_cache=False).logits
        gap = (own - other)[:, :3].abs().max() / own.float().std().clamp(min=1e-6)
        if gap > (1e-4 if own.dtype in (torch.float32, torch.float64) else 2e-2):
            raise ConfigError(
                f"{type(causal).__name__} is not a causal language model: what it predicts depends on later "
                "tokens; name one that is trained to continue text"
            )
        try:
            hidden = plain.body(input_ids=ids, use_cache=False).last_hidden_state
            mine = plain.after_head(plain.head(hidden))
        except (AttributeError, TypeError, RuntimeError):
            return False
    return mine.shape == own.shape and bool(torch.allclose(mine.float(), own.float(), rtol=1e-2, atol=1e-2))


@torch.enable_grad()
def head_fuses(plain: Scorer) -> bool:
    """Whether the fused head can be used: it is tried once, forward and backward, beside the plain one."""
    width = plain.head.weight.shape[1]
    random = torch.Generator().manual_seed(0)
    dtype = torch.float32 if plain.autocast is not None else plain.head.weight.dtype
    hidden = torch.randn(8, width, generator=random).to(plain.device, dtype).requires_grad_()
    nothing = hidden[:0]
    if not fuses(plain.head, hidden) or plain.after_head(nothing) is not nothing:  # logits are the head's, unchanged
        return False
    target, found = torch.arange(8, device=plain.device), []
    with plain.precision():
        for fused in (False, True):
            try:
                logp, entropy = _planned(plain, ScoringPlan(fused_head=fused)).of_hidden(hidden, target, True)
                grad = torch.autograd.grad((logp + entropy).sum(), hidden)[0]
            except Exception as error:  # a compiler may fail in any way
                warn(f"log-probs without the fused head, which is slower: {line(error)}")
                return False
            found.append((logp.detach(), entropy.detach(), grad.float()))
    same = all(bool((a - b).norm() <= 3e-2 * a.norm() + 1e-4) for a, b in zip(*found, strict=True))
    if not same:
        warn("log-probs without the fused head, which is slower: it gives other numbers")
    return same


def _choose_packing(plain: Scorer, plan: ScoringPlan) -> str:
    """Packed where the attention implementation knows it, shared prompts where the model can, else padded."""
    config = plain.causal.config
    if str(getattr(config, "_attn_implementation", "")).startswith("flash"):
        return "packed"
    text = config.get_text_config()
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        return "padded"
    if plain.device.type == "cuda" and can_score(plain, replace(plan, packing="segments")):
        return "segments"
    return "shared" if can_score(plain, replace(plan, packing="shared")) else "padded"


def can_score(plain: Scorer, plan: ScoringPlan) -> bool:
    """Whether completions that share a prompt get the numbers they get alone, on the way back, too.

    Not every architecture can, nor every build of torch.
    """
    try:
        return _off(plain, plan) <= 1.0
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return False


def _off(plain: Scorer, plan: ScoringPlan) -> float:
    """How far from these numbers they are, where 1 is as far as they may be."""
    learned = [p for p in plain.model.parameters() if p.requires_grad and p.numel() < PROBED][:PROBES]
    exact = nullcontext() if plain.autocast is None else torch.autocast(plain.device.type, enabled=False)
    padded = replace(plan, packing="padded")
    with mode_of(plain.model, False):
        found = [
            _tried(_planned(plain, way), learned, precision)
            for way, precision in ((padded, exact), (padded, plain.precision()), (plan, plain.precision()))
        ]
    # No further from float32 than a few times what rounding does to the module itself.
    gaps = [[float((a - b).norm() / (b.norm() + 1e-4)) for a, b in zip(way, found[0], strict=True)] for way in found]
    coarse = next(plain.body.parameters()).dtype.itemsize < 4
    off = [mine / ((COARSE if coarse else TRUSTED) + 3 * own) for own, mine in zip(*gaps[1:], strict=True)]
    return math.inf if any(map(math.isnan, off)) else max(off)


def _tried(scorer: Scorer, learned: list[Tensor], precision: AbstractContextManager[Any]) -> list[Tensor]:
    """Log-probs of a few rows, two of them of one prompt, and their gradients by some weights."""
    prompts = [Prompt(0, [3, 4, 5], "", None), Prompt(1, [5, 3], "", None)]
    rows = [
        Sample(prompt, torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), None, "eos", "")
        for prompt, ids in ((prompts[0], [4, 3]), (prompts[1], [3]), (prompts[0], [5, 4, 3]))
    ]
    in_segments = scorer.packing == "segments"
    attention = attention_switched(scorer.causal, segments.INTERFACE) if in_segments else nullcontext()
    with attention, torch.set_grad_enabled(bool(learned)), precision:
        logp_NT = scorer(rows, 3).logp_NT
        grads = torch.autograd.grad(logp_NT.sum(), learned, materialize_grads=True) if learned else ()
    return [logp_NT.detach(), *grads]


def _layers_by_hand(plain: Scorer, plan: ScoringPlan) -> Layers | None:
    """The body with a backward pass of its own, where the layout is the common one; tried before it is used."""
    if plain.device.type != "cuda" or plan.whole_logits or importlib.util.find_spec("triton") is None:
        return None
    from grpo.language.scoring.layers import Layers

    try:
        layers = Layers(plain.causal, plain.autocast or next(plain.body.parameters()).dtype)
        off = _off(plain, replace(plan, layers=layers))
        if off <= 1.0:
            return layers
        warn(f"the update goes through the module, which is slower: by hand it is {off:.3g} times as far off as may be")
    except Unsupported as reason:
        if plain.causal is not plain.model:  # an adapter would be expected to be fast
            warn(f"the update goes through the module, which is slower: {reason}")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may fail in any way
        warn(f"the update goes through the module, which is slower: {line(error)}")
    return None


def _planned(plain: Scorer, plan: ScoringPlan) -> Scorer:
    """The same with another plan."""
    return Scorer(plain.model, plain.temperature, plan, plain.set_budget, plain.pad, plain.autocast)
