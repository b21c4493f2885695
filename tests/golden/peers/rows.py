"""Single variants of others: AReaL's M2PO, ROLL's TOPR, TTT-Discover's entropic advantages."""

from __future__ import annotations

from typing import Any

from grpo.core.advantages import entropic
from grpo.core.arrays import wide
from grpo.core.gates import second_moment
from grpo.core.ratios import log_ratio, token_ratio
from grpo.core.surrogates import topr
from tests.golden.peers.case import Case, inputs


def areal(vector, backend):
    x = inputs(vector, backend)
    mask_NT = x["mask"] != 0
    gap_NT = log_ratio(x["logp"], x["old_logp"], mask_NT)
    return Case({"kept": wide(second_moment(gap_NT, mask_NT, vector.options["m2_threshold"]))})


def roll(vector, backend):
    x = inputs(vector, backend)
    mask_NT, advantage_NT = x["logp"] == x["logp"], x["advantages"][:, None] * (x["logp"] * 0 + 1)

    def each(logp_NT: Any) -> Any:
        return topr(token_ratio(log_ratio(logp_NT, x["old_logp"], mask_NT)), advantage_NT, logp_NT)

    _, grads = backend.gradients(lambda logp_NT: each(logp_NT).sum(), [x["logp"]])
    return Case({"losses": each(x["logp"]), **({"grad_logp": grads[0]} if grads else {})})


def discover(vector, backend):
    return Case({"advantages": entropic(backend.array(vector.inputs["rewards"]), backend.ints(vector.inputs["group"]))})
