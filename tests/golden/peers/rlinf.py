"""RLinf a3816b5: KL types, aggregation, advantages, actor loss and step, embodied GRPO."""

from __future__ import annotations

from dataclasses import replace

from grpo.core import advantages as adv
from grpo.core import gates, kl, ratios, reductions
from grpo.core.arrays import masked, namespace, row_sum, zeros
from grpo.core.reductions import count
from grpo.credit import advantages
from grpo.objective import objective
from grpo.recipes import recipe
from grpo.rollouts import Rollouts
from tests.golden import beyond
from tests.golden.peers.case import Case, Scores, inputs, record

KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
REDUCTION = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "masked_mean_ratio": "token_mean",
}


def run(vector, backend):
    kinds = {
        "kl_penalty": kl_penalty,
        "aggregation": aggregation,
        "masked_normalization": normalization,
        "embodied grpo advantages": embodied_advantages,
        "embodied actor loss": embodied_loss,
        "actor loss": actor,
        "megatron_actor_step": actor,
    }
    return kinds.get(vector.what, estimators)(vector, backend)


def kl_penalty(vector, backend):
    x, name = inputs(vector, backend), vector.options["kl_penalty"]
    value = KL.get(name, name)

    def estimate(logp):
        return kl.estimate(logp, x["ref_logp"], value, None, 10.0 if value == "k3" else None)

    _, grads = backend.gradients(lambda logp: estimate(logp).sum(), [x["logp"]])
    return Case({"kl": estimate(x["logp"]), **dict(zip(["grad_logp"], grads, strict=False))})


def aggregation(vector, backend):
    x, mode = inputs(vector, backend), vector.options["loss_agg"]
    mask = x["mask"] != 0
    over = count(mask, count_empty_rows=True)
    value, grads = backend.gradients(lambda a: getattr(reductions, REDUCTION[mode])(a, mask, over), [x["loss_mat"]])
    if mode == "seq-mean-token-mean" and bool((mask.sum(1) == 0).any()):
        value = value * float("nan")  # quirk: 0/0 for a row without decisions
    return Case({"loss": value, **dict(zip(["grad"], grads, strict=False))}, {"grad": _zero_for_nan})


def _zero_for_nan(values):
    """Quirk: an empty row's 0/0 reaches its gradient too."""
    return [[0.0 if v is None else v for v in row] for row in values]


def _where_counted(mask):
    """Quirk: positions that do not count hold −mean/std, 0 in ours."""
    return lambda values: [
        [v if m else 0.0 for v, m in zip(*pair, strict=True)] for pair in zip(values, mask, strict=True)
    ]


def normalization(vector, backend):
    x, o = inputs(vector, backend), vector.options
    ddof = 1.0 if o["unbiased"] else 0.0
    y = adv.whiten(x["x"], x["mask"] != 0, ddof=ddof, eps=o["eps"], root=False)
    return Case({"y": y}, {"y": _where_counted(vector.inputs["mask"])})


def estimators(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    mask, kind = x["mask"] != 0, o["adv_type"]
    rows, size = mask.shape[0], o.get("group_size", mask.shape[0])
    fields = {
        "mask_NT": mask,
        "old_logp_NT": x["logp"] if "logp" in x else zeros(tuple(mask.shape), x["mask"]),
        "group_N": backend.ints([i // size for i in range(rows)]),
        "reward_N": x["rewards"],
    }
    r = recipe("grpo", scale_eps=1e-6)
    if kind == "grpo_dynamic":
        trajectory = o["idx_to_traj"]
        fields["group_N"] = backend.ints([t // size for t in trajectory])
        if o["advantage_mode"] == "trajectory":
            fields["episode_N"] = backend.ints(trajectory)
    if kind == "raw":
        r = r.but(baseline="none", scale="none")
        if o.get("normalize_advantages"):
            r = r.but(whiten="decisions", whiten_eps=1e-5, whiten_root=False)
    if kind == "reinpp":
        return _reinforce_plus_plus(vector, o, x, fields)
    advantage = advantages(Rollouts(**fields), r)
    if size == 1:
        advantage = masked(advantage * float("nan"), mask)  # quirk: the standard deviation of one value
    return Case({"advantages": advantage}, {"advantages": _where_counted(vector.inputs["mask"])})


def _reinforce_plus_plus(vector, o, x, fields):
    """Quirk: the reward lands at the position the peer finds on the wrong axis, and masked positions carry KL too.

    Both are emulated by what goes in: dense rewards at that position, less the KL everywhere, over an all-true mask;
    then whitening over the real mask.
    """
    mask, everywhere = fields["mask_NT"], fields["mask_NT"] | ~fields["mask_NT"]
    rows, steps = mask.shape
    xp = namespace(x["rewards"])
    first = [row.index(1) if 1 in row else 0 for row in [[int(m) for m in r] for r in vector.inputs["mask"]]]
    spots = [[1.0 if t == steps - 1 - first[rows - 1 - i] else 0.0 for t in range(steps)] for i in range(rows)]
    reward = x["rewards"][:, None] * (xp.asarray(spots) + zeros((rows, steps), x["rewards"]))
    beta = o.get("kl_beta", 0.0)
    if beta and "ref_logp" in x:
        value = KL.get(o["kl_penalty_type"], o["kl_penalty_type"])
        reward = reward - beta * kl.estimate(x["logp"], x["ref_logp"], value, cap=10.0 if value == "k3" else None)
    returns = adv.reward_to_go(reward, everywhere)
    advantage = adv.whiten(returns, mask, ddof=0.0, eps=0.0)
    return Case({"advantages": advantage}, {"advantages": _where_counted(vector.inputs["mask"])})


def _actor_recipe(o, **more):
    beta = o.get("kl_beta") or 0.0
    value = KL.get(o.get("kl_penalty_type", "k3"), o.get("kl_penalty_type", "k3"))
    clip_is = o.get("importance_sampling_clip")
    return recipe(
        "grpo",
        epsilon=o["clip_ratio_low"],
        epsilon_high=o["clip_ratio_high"],
        dual_clip=o.get("clip_ratio_c"),
        log_ratio_low=o.get("clip_log_ratio_min") or -20.0,
        log_ratio_high=o.get("clip_log_ratio_max") or 20.0,
        beta=beta,
        kl_estimator=value,
        kl_gradient="own",
        kl_cap=10.0 if value == "k3" else None,
        entropy_coef=o.get("entropy_bonus") or 0.0,
        entropy_over="loss",
        reduction=REDUCTION[o["loss_agg"]],
        **({"mismatch": "truncate", "mismatch_high": clip_is} if clip_is else {}),
        **more,
    )


def actor(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    r = _actor_recipe(o)
    if vector.what == "megatron_actor_step" and not any(vector.inputs["mask"][0]):
        x["advantages"] = x["advantages"] * 0  # quirk: a fully masked first row drops the policy term of all rows
    batch = record(x, r, sampled=x.get("rollout_logp"))
    own = batch.denominators
    if o.get("use_valid_token_scale"):
        scale = own.tokens / o["global_valid_token"] * o["dp_world_size"] * o["num_microbatches"]
        batch = replace(batch, denominators=own._replace(tokens=own.tokens / scale, rows=own.rows / scale))
    entropy = x.get("entropies")

    def loss(logp, entropy=entropy):
        return objective(Scores(logp, entropy), batch, r).loss

    wants_entropy = "grad_entropies" in vector.outputs
    value, grads = backend.gradients(loss, [x["logp"], entropy] if wants_entropy else [x["logp"]])
    log_ratio = ratios.log_ratio(x["logp"], batch.old_logp_NT, batch.mask_NT, r.log_ratio_low, r.log_ratio_high)
    limit = o.get("early_stop_imp_ratio")
    if limit is not None and bool(beyond.ratio_too_large(ratios.token_ratio(log_ratio), batch.mask_NT, limit)):
        value, grads = value * 0, [g * 0 for g in grads]
    if o["loss_agg"] == "seq-mean-token-mean" and bool((batch.mask_NT.sum(1) == 0).any()):
        value = value * float("nan")  # quirk: 0/0 for a row without decisions
    terms = objective(Scores(x["logp"], entropy), replace(batch, denominators=own), r)
    outputs = {"loss": value, **dict(zip(("grad_logp", "grad_entropies"), grads, strict=False))}
    if any(vector.inputs["mask"][0]):
        outputs["metrics"] = {
            "actor/ratio": terms.metrics["ratio"],
            "actor/approx_kl": terms.metrics["approx_kl"] if "clip_log_ratio_min" not in o else None,
            "actor/clip_fraction": terms.metrics["clip_ratio/region_mean"],
            "actor/final_loss": value,
        }
        outputs["metrics"] = {key: value for key, value in outputs["metrics"].items() if value is not None}
    return Case(outputs, {"grad_logp": _zero_for_nan})


# --- embodied: (chunks, envs, steps a chunk) → rows of one env in time -----------------------------------------------


def _timeline(x):
    """(chunks, envs, steps) → (envs, chunks · steps)."""
    xp = namespace(x)
    swapped = xp.swapaxes(x, 0, 1)
    return swapped.reshape(swapped.shape[0], -1)


def _chunked(x, chunks):
    """The way back."""
    xp = namespace(x)
    return xp.swapaxes(x.reshape(x.shape[0], chunks, -1), 0, 1)


def embodied_advantages(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    chunks, envs, size = x["rewards"].shape
    reward, done = _timeline(x["rewards"]), _timeline(x["dones"][1:])
    steps_alive = gates.alive(done)
    length = row_sum(zeros(tuple(reward.shape), reward, 1.0), steps_alive) * zeros(tuple(reward.shape), reward, 1.0)
    outputs = {"loss_mask": _chunked(steps_alive * 1.0, chunks), "loss_mask_sum": _chunked(length, chunks)}
    mask = steps_alive
    if o["reward_type"] == "chunk_level":
        everywhere = mask | ~mask
        reward = ratios.fold(reward, everywhere, size)
        mask = gates.alive(ratios.fold(done, everywhere, size))
    rollouts = Rollouts(
        group_N=backend.ints([i // o["group_size"] for i in range(envs)]),
        mask_NT=mask,
        old_logp_NT=reward * 0,
        reward_NT=reward,
    )
    advantage = advantages(rollouts, recipe("grpo", scale_eps=1e-6))
    return Case(outputs | {"advantages": _chunked(advantage, chunks)})


def embodied_loss(vector, backend):
    """A row is a chunk step of one env, with `steps · dims` log-probs; the ratio folds dims, or the whole chunk."""
    o, x = vector.options, inputs(vector, backend)
    rows, steps, dims = x["logp"].shape
    width = steps * dims
    sizes = {"token_level": 1, "action_level": dims, "chunk_level": width}
    size = sizes[o["logprob_type"]]
    fold = {} if size == 1 else {"ratio": "chunk", "chunk_size": size}
    r = _actor_recipe(o, **fold)
    one = zeros((rows, steps, dims), x["logp"], 1.0)

    def spread(a):
        return (a.reshape(rows, -1, 1) * one).reshape(rows, width)

    flat = {
        "logp": x["logp"].reshape(rows, width),
        "old_logp": x["old_logp"].reshape(rows, width),
        "advantages": spread(x["advantages"]),
        "mask": spread(x["loss_mask"]),
    }
    batch = record(flat, r)
    # The peer divides by the mask before it is spread over action dims.
    batch = replace(batch, denominators=batch.denominators._replace(tokens=float(x["loss_mask"].sum())))
    if o["loss_agg"] == "masked_mean_ratio":  # mean over all elements, each row weighted by 1/its share of the horizon
        weight = spread(o["max_episode_steps"] / x["loss_mask_sum"])
        batch = replace(
            batch,
            rollouts=replace(batch.rollouts, weight_NT=weight),
            denominators=batch.denominators._replace(tokens=float(rows * width // size)),
        )

    def loss(logp):
        return objective(Scores(logp.reshape(rows, width)), batch, r).loss

    value, grads = backend.gradients(loss, [x["logp"]])
    return Case({"loss": value, **dict(zip(["grad_logp"], grads, strict=False))})
