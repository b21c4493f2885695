"""CarlosArguilar/GRPO: one scalar log-prob a (state, action), so T = 1."""

from __future__ import annotations

from grpo.core.arrays import zeros
from grpo.credit import trajectory_advantages
from grpo.objective import objective
from grpo.recipes import recipe
from grpo.rollouts import Rollouts
from tests.golden.peers.case import Case, Scores, inputs, record


def run(vector, backend):
    return _advantages(vector, backend) if "reward_groups" in vector.inputs else _objective(vector, backend)


def _advantages(vector, backend):
    """A = r − group mean; normalised: whitened over the batch with ddof 0. No group std."""
    groups = vector.inputs["reward_groups"]
    rewards = [reward for group in groups for reward in group]
    ids = [i for i, group in enumerate(groups) for _ in group]
    r = recipe("grpo", scale="none")
    if vector.options["normalize_advantages"]:
        eps = vector.options.get("advantage_epsilon", 1e-8)
        r = r.but(whiten="rows", whiten_ddof=0.0, whiten_eps=eps, whiten_root=False)
    rollouts = Rollouts(
        group_N=backend.ints(ids),
        mask_NT=backend.ints([[1]] * len(ids)),
        old_logp_NT=backend.array([[0.0]] * len(ids)),
        reward_N=backend.array(rewards),
    )
    advantage = trajectory_advantages(rollouts, r)
    flatten = {"advantages": lambda a: [v for g in a for v in g] if isinstance(a[0], list) else a}
    return Case({"advantages": advantage}, flatten)


def _objective(vector, backend):
    """k1 in the loss, taken literally, and −log p as entropy with its own (zero-mean) gradient."""
    o = vector.options
    x = {name: None if value is None else value[:, None] for name, value in inputs(vector, backend).items()}
    x["mask"] = zeros(tuple(x["logp"].shape), x["logp"], 1.0)
    r = recipe(
        "grpo",
        epsilon=o["clip_epsilon"],
        beta=o["kl_coeff"] if x.get("ref_logp") is not None else 0.0,
        kl_estimator="k1",
        kl_gradient="own",
        entropy_coef=o["entropy_coeff"],
    )
    batch = record(x, r)

    def loss(logp):
        return objective(Scores(logp, -logp), batch, r).loss

    value, grads = backend.gradients(loss, [x["logp"]])
    terms = objective(Scores(x["logp"], -x["logp"]), batch, r)
    outputs = {
        "total_loss": value,
        "policy_loss": terms.policy_loss,
        "kl_penalty": 0.0 if terms.kl is None else r.beta * terms.kl,
        "entropy_bonus": r.entropy_coef * terms.entropy,
    }
    return Case(outputs | ({"grad_logp": grads[0][:, 0]} if grads else {}))
