"""Single variants of others: AReaL's M2PO, ROLL's TOPR and GiGPO, TTT-Discover's entropic advantages."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo.core.advantages import entropic
from grpo.core.arrays import wide
from grpo.core.gates import second_moment
from grpo.core.ratios import log_ratio, token_ratio
from grpo.core.surrogates import topr
from grpo.credit import advantages
from grpo.recipes import recipe
from grpo.rollouts import Rollouts
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


def gigpo(vector, backend):
    """Turns of one token with a token of somebody else's between them, a conversation a row."""
    o, x = vector.options, {name: np.asarray(value) for name, value in vector.inputs.items()}
    rows, turn_M = len(x["reward"]), np.array([list(x["episode"][:i]).count(e) for i, e in enumerate(x["episode"])])
    steps = 2 * int(turn_M.max()) + 1
    mask, state, group = np.zeros((rows, steps)), np.zeros((rows, steps), int), np.zeros(rows, int)
    at = (x["episode"], 2 * turn_M)
    mask[at], state[at], group[x["episode"]] = 1, x["state"], x["group"]
    scale = {"scale": "none"} if o["method"] == "mean" else {}
    both, whole = (
        advantages(
            Rollouts(
                group_N=backend.ints(group),
                mask_NT=backend.array(mask) != 0,
                old_logp_NT=backend.array(mask * 0),
                reward_N=backend.array(x["reward"]),
                group_NT=backend.ints(state) if weight else None,
            ),
            recipe("gigpo", gamma=o["gamma"], turn_coef=weight, **scale),
        )
        for weight in (o["step_reward_weight"], 0.0)
    )
    return Case({"episode_advantages": whole[:, 0], "turn_advantages": (both - whole)[at]})
