"""What is minimised for one decision, given its ratio and its advantage. Per-decision losses, never reduced.

A surrogate is a formula (one pure function) and a frozen record with the numbers that only this formula has, its limits
and its text. A class with a `kind` is known to recipes, settings and pages; nothing else has to be told of it.
"""

from grpo.core.surrogates.base import SURROGATES, Decisions, Surrogate, chosen, flattened, names, owners, types
from grpo.core.surrogates.clipping import (
    Cispo,
    Clip,
    Clipping,
    DppoBinaryKL,
    DppoTotalVariation,
    Geometric,
    cispo,
    clipped,
    dppo,
    dual_clipped,
    geometric,
    inside_binary_kl,
    inside_total_variation,
)
from grpo.core.surrogates.free import (
    Dro,
    PolicyGradient,
    Sapo,
    Topr,
    Unclipped,
    Vespo,
    dro,
    policy_gradient,
    sapo,
    topr,
    unclipped,
    vespo,
)

__all__ = [
    "SURROGATES", "Cispo", "Clip", "Clipping", "Decisions", "DppoBinaryKL", "DppoTotalVariation", "Dro", "Geometric",
    "PolicyGradient", "Sapo", "Surrogate", "Topr", "Unclipped", "Vespo", "chosen", "cispo", "clipped", "dppo", "dro",
    "dual_clipped", "flattened", "geometric", "inside_binary_kl", "inside_total_variation", "names", "owners",
    "policy_gradient", "sapo", "topr", "types", "unclipped", "vespo",
]  # fmt: skip
