"""google-tunix 0.1.7: advantages, grpo and gspo-token losses."""

from __future__ import annotations

from dataclasses import replace

from grpo.core import diagnostics, ratios
from grpo.credit import trajectory_advantages
from grpo.recipes import recipe
from grpo.rollouts import Rollouts
from tests.golden import beyond
from tests.golden.peers.case import Case, differentiate, inputs, record

ADVANTAGES = {
    "grpo": {"scale_eps": 1e-6},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "drgrpo": {"scale": "none"},
}
REDUCTION = {
    "token-mean": "token_mean",
    "sequence-mean-token-mean": "sequence_mean",
    "sequence-mean-token-scale": "fixed_length",
    "seq-mean-token-sum": "sequence_sum",
    "sequence-mean-token-sum-norm": "sequence_sum",
}
KL = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}


def run(vector, backend):
    o = vector.options
    if vector.what.startswith("advantages"):
        rewards = backend.array(vector.inputs["rewards"])
        rows, size = rewards.shape[0], o["num_generations"]
        rollouts = Rollouts(
            group_N=backend.ints([i // size for i in range(rows)]),
            mask_NT=backend.ints([[1]] * rows),
            old_logp_NT=rewards[:, None] * 0,
            reward_N=rewards,
        )
        r = recipe("grpo", **ADVANTAGES[vector.what.split()[1]])
        advantage = trajectory_advantages(rollouts, r)
        if size == 1 and r.scale == "group_std":
            advantage = advantage * float("nan")  # quirk: the standard deviation of one value
        return Case({"advantages": advantage})
    x = inputs(vector, backend)
    r = recipe(
        "grpo",
        ratio="sequence_token" if o["loss_algo"] == "gspo-token" else "token",
        epsilon=o["epsilon"],
        epsilon_high=o["epsilon_high"],
        dual_clip=o["epsilon_c"],
        beta=o["beta"],
        kl_estimator=KL[o["kl_loss_mode"]],
        kl_gradient="own",
        kl_cap=o["kl_clamp_value"],
        reduction=REDUCTION[o["loss_agg_mode"]],
        length=float(x["mask"].shape[1]) if o["loss_agg_mode"].endswith("scale") else None,
        count_empty_rows=False,
    )
    batch = replace(record(x, r), mismatch_NT=x.get("sampler_is_weights"))
    outputs, terms = differentiate(backend, batch, r, x["logp"])
    over = batch.denominators
    log_ratio = ratios.log_ratio(x["logp"], batch.old_logp_NT, batch.mask_NT)
    sequence = r.ratio == "sequence_token"
    ratio = ratios.sequence_ratio(log_ratio, batch.mask_NT) if sequence else ratios.token_ratio(log_ratio)
    metrics = {"ppo_kl": terms.metrics["approx_kl"], "pg_clipfrac": terms.metrics["clip_ratio/region_mean"]}
    if o["epsilon_c"] and o["loss_agg_mode"] == "token-mean":
        binds = beyond.dual_clip_binds(ratio, batch.advantage_NT, o["epsilon_c"])
        metrics["pg_clipfrac_lower"] = diagnostics.share(binds, batch.mask_NT, over)
    return Case(outputs | {"metrics": metrics})
