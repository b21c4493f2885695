"""Single variants of others: AReaL's M2PO, ROLL's TOPR and GiGPO, TTT-Discover's entropic advantages, roles, A*-PO."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo.core.advantages import entropic, role_means, soft_maximum
from grpo.core.arrays import wide
from grpo.core.gates import second_moment
from grpo.core.ratios import log_ratio, token_ratio
from grpo.core.surrogates import topr
from grpo.credit import advantages
from grpo.experience import Experience
from grpo.recipes import recipe
from grpo.rollouts import Rollouts, Status
from tests.golden.peers.case import Case, differentiate, inputs


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


def rae(vector, backend):
    """In two steps: the means of the first go on in the second."""
    x = {name: np.asarray(value) for name, value in vector.inputs.items()}
    half, means, found = len(x["rewards"]) // 2, {}, []
    for part in (slice(half), slice(half, None)):
        reward, failed = x["rewards"][part], x["failed"][part]
        baseline, means = role_means(reward, x["roles"][part], failed == 0, means, vector.options["decay"])
        rollouts = Rollouts(
            group_N=backend.ints(failed * 0),
            mask_NT=backend.array(reward[:, None] * 0 + 1) != 0,
            old_logp_NT=backend.array(reward[:, None] * 0),
            reward_N=backend.array(reward),
            baseline_NT=backend.array(baseline)[:, None],
            status_N=backend.ints(np.where(failed, int(Status.FAILED), int(Status.TERMINATED))),
        )
        found.extend(advantages(rollouts, recipe("rae"))[:, 0].tolist())
    return Case({"advantages": np.asarray(found), "means": np.asarray([means[role] for role in sorted(means)])})


def a_star_po(vector, backend):
    """The peers' loss is a square; the row's gradient is theirs / 2β, wherever the sampler was."""
    o, x = vector.options, inputs(vector, backend)
    how = recipe("a_star_po", value_beta=o["beta1"], beta=o["beta2"], dro_beta=o["beta2"])
    prompts, tries = x["value_rewards"].shape
    tried_M = backend.ints(np.repeat(np.arange(prompts), tries))
    value_P = soft_maximum(x["value_rewards"].reshape(-1), tried_M, how.value_beta).reshape(prompts, tries)[:, 0]
    prompt_N = backend.ints(vector.inputs["prompt"])
    rollouts = Rollouts(
        group_N=prompt_N,
        mask_NT=x["mask"] != 0,
        old_logp_NT=x["old_logp"],
        reward_N=x["rewards"],
        baseline_NT=value_P[prompt_N][:, None] * (x["mask"] * 0 + 1),
    )
    outputs, _ = differentiate(backend, Experience.build(rollouts, how, x["ref_logp"]), how, x["logp"])
    twice = {"grad_logp": 2 * o["beta2"] * outputs["grad_logp"]} if "grad_logp" in outputs else {}
    return Case({"v_star": value_P, **twice})
