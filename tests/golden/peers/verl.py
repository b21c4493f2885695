"""verl 0.9.1: policy losses, KL penalties, aggregation, critic-free advantages, rollout correction."""

from __future__ import annotations

import math
from dataclasses import replace

from grpo.core import advantages as adv
from grpo.core import diagnostics, gates, kl, ratios, reductions
from grpo.core.arrays import masked, namespace, zeros
from grpo.core.reductions import Denominators, count
from grpo.core.surrogates import owners
from grpo.credit import advantages
from grpo.recipes import recipe
from grpo.rollouts import Rollouts
from tests.golden import beyond
from tests.golden.peers.case import Case, Scores, differentiate, inputs, record, with_gates

REDUCTION = {
    "token-mean": "token_mean",
    "token-sum": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "fixed_length",
    "seq-mean-token-mean": "sequence_mean",
}


def _denominators(
    mode,
    own: Denominators,
    width,
    dp_size=1,
    batch_num_tokens=None,
    global_batch_size=None,
    loss_scale_factor=None,
    **_,
):
    tokens = 1.0 if mode == "token-sum" else float(batch_num_tokens or own.tokens)
    rows = float(global_batch_size or own.rows)
    length = float(loss_scale_factor or width)
    return own._replace(tokens=tokens / dp_size, rows=rows / dp_size, length=length)


SURROGATE = {
    "vanilla": {"surrogate": "clip"},
    "gspo": {"surrogate": "clip", "ratio": "sequence_token"},
    "geo_mean": {"surrogate": "geometric"},
    "cispo": {"surrogate": "cispo"},
    "sapo": {"surrogate": "sapo"},
    "gpg": {"surrogate": "policy_gradient"},
    "dro": {"surrogate": "dro"},
    "dppo_tv": {"surrogate": "dppo_tv"},
    "dppo_kl": {"surrogate": "dppo_kl"},
    "clip_cov": {"surrogate": "clip"},
    "kl_cov": {"surrogate": "unclipped"},
}


def losses(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    kind, extra = o["loss"], {}
    mode = o["loss_agg_mode"].replace(" (forced)", "")
    if kind == "bypass_mode":
        kind, extra = _bypass(o["rollout_correction"], x)
    choices = dict(SURROGATE[kind])
    if kind in ("vanilla", "dppo_tv", "dppo_kl"):
        choices["dual_clip"] = o["clip_ratio_c"]
    if kind == "sapo":
        choices |= {"tau_pos": o["tau_pos"], "tau_neg": o["tau_neg"]}
    if kind == "dro":
        choices["dro_beta"] = o["dro_beta"]
    if kind == "clip_cov":
        choices |= {
            "clip_cov": o["clip_cov_ratio"],
            "clip_cov_low": o["clip_cov_lb"],
            "clip_cov_high": o["clip_cov_ub"],
        }
    if kind == "kl_cov":
        choices |= {"kl_cov": o["kl_cov_ratio"], "kl_cov_coef": o["ppo_kl_coef"]}
    if choices["surrogate"] in owners()["epsilon"]:
        choices |= {"epsilon": o["clip_ratio_low"], "epsilon_high": o["clip_ratio_high"]}
    row_mean = mode == "row mean"
    r = recipe(
        "grpo",
        **choices,
        reduction="sequence_mean" if row_mean else REDUCTION[mode],
        length=1.0 if mode.endswith("norm") else None,
        count_empty_rows=row_mean,
    )
    batch = record(x, r)
    batch = with_gates(batch, Scores(x["logp"]), r, priority_NT=_any_order(batch))
    own = batch.denominators
    batch = replace(
        batch,
        mismatch_NT=extra.get("weight", x.get("rollout_is_weights")),
        denominators=_denominators(mode, own, batch.mask_NT.shape[1], **o["global_batch_info"]),
    )
    outputs, _ = differentiate(backend, batch, r, x["logp"])
    log_ratio = ratios.log_ratio(x["logp"], batch.old_logp_NT, batch.mask_NT)
    ratio = ratios.sequence_ratio(log_ratio, batch.mask_NT) if kind == "gspo" else ratios.token_ratio(log_ratio)
    below, above = r.surrogate.clip_range
    low = diagnostics.clipped_low(ratio, batch.advantage_NT, below)
    high = diagnostics.clipped_high(ratio, batch.advantage_NT, above)
    metrics = {}
    if kind != "kl_cov":
        metrics["actor/ppo_kl"] = diagnostics.approx_kl(log_ratio, batch.mask_NT, own)
    if kind in ("vanilla", "gspo"):
        metrics["actor/pg_clipfrac"] = diagnostics.share(low | high, batch.mask_NT, own)
    if kind == "vanilla":
        binds = beyond.dual_clip_binds(ratio, batch.advantage_NT, o["clip_ratio_c"])
        metrics["actor/pg_clipfrac_lower"] = diagnostics.share(binds, batch.mask_NT, own)
    if kind == "clip_cov":
        metrics["actor/pg_clipfrac"] = diagnostics.share(~batch.open_NT, batch.mask_NT, own)
    return Case(outputs | {"metrics": metrics})


def _any_order(batch):
    """The vectors' budget takes every candidate, so any order will do."""
    xp = namespace(batch.advantage_NT)
    return xp.cumsum(zeros(tuple(batch.mask_NT.shape), batch.advantage_NT, 1.0).reshape(-1), 0).reshape(
        batch.mask_NT.shape
    )


def _bypass(correction, x):
    """The sampler's numbers are the old ones: weights and rejections come from logp − old, without gradient."""
    mask = x["mask"] != 0
    weight, kept = _corrections(correction, x["logp"], x["old_logp"], mask)
    x["mask"] = kept * 1.0
    if correction["loss_type"] == "ppo_clip":
        return "vanilla", {}
    return "gpg", {"weight": weight}


def _bounds(threshold):
    """'l_u' or a single u."""
    parts = [float(part) for part in str(threshold).split("_")]
    return parts if len(parts) == 2 else (None, parts[0])


def _corrections(o, train_logp, rollout_logp, mask):
    gap = gates.mismatch_log_ratio(train_logp, rollout_logp, mask)
    weight, kept = None, mask
    if o.get("rollout_is"):
        low, high = _bounds(o["rollout_is_threshold"])
        mode = "truncate" if low is None else "mask"
        weight = gates.mismatch_weight(gap, mask, o["rollout_is"], mode, low, high)
        if o.get("rollout_is_batch_normalize"):
            weight = beyond.mean_one(weight, mask, o["rollout_is"])
        weight = masked(weight, mask)
    if o.get("rollout_rs"):
        thresholds = str(o["rollout_rs_threshold"]).split(",")
        names = o["rollout_rs"].split(",")
        thresholds = thresholds * len(names) if len(thresholds) == 1 else thresholds
        for name, threshold in zip(names, thresholds, strict=True):
            level, estimator = name.strip().rsplit("_", 1)
            low, high = _bounds(threshold.strip())
            if estimator == "k1":  # bounds on the ratio, compared as logarithms
                low, high = math.log(1 / high if low is None else low), math.log(high)
            kept = kept & beyond.mismatch_keep(gap, mask, estimator, level.replace("seq", "sequence"), low, high)
    return weight, kept


def rollout_correction(vector, backend):
    x = inputs(vector, backend)
    weight, kept = _corrections(vector.options, x["train_logp"], x["rollout_logp"], x["mask"] != 0)
    return Case({"modified_mask": kept * 1.0} | ({} if weight is None else {"weights": weight}))


def kl_penalty(vector, backend):
    x, name = inputs(vector, backend), vector.options["kl_penalty"]
    names = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    value = names.get(name.rstrip("+"), name.rstrip("+"))
    gradient, cap = "k2" if name.endswith("+") else None, 10.0 if value == "k3" else None

    def estimate(logp):
        return kl.estimate(logp, x["ref_logp"], value, gradient, cap)

    _, grads = backend.gradients(lambda logp: estimate(logp).sum(), [x["logp"]])
    return Case({"kl": estimate(x["logp"]), **dict(zip(["grad_logp"], grads, strict=False))})


def aggregation(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    mask, mode = x["mask"] != 0, o["loss_agg_mode"]
    over = _denominators(mode, count(mask, count_empty_rows=False), mask.shape[1], **o)

    def reduce(loss):
        return getattr(reductions, REDUCTION[mode])(loss, mask, over)

    value, grads = backend.gradients(reduce, [x["loss_mat"]])
    outputs = {"loss": value, **dict(zip(["grad"], grads, strict=False))}
    if mode.startswith("seq") and bool((x["loss_mat"] != x["loss_mat"]).any()):
        outputs["loss"] = value * float("nan")  # quirk: NaN where nothing counts spreads through the sequence modes
    return Case(outputs)


# --- advantages -----------------------------------------------------------------------------------------------------

ESTIMATORS = {
    "grpo": {"scale_eps": 1e-6},
    "grpo_vectorized": {"scale_eps": 1e-6},
    "grpo_passk": {"baseline": "best_of_group", "scale_eps": 1e-6},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "rloo_vectorized": {"baseline": "leave_one_out", "scale": "none"},
    "opo": {"baseline": "length_weighted", "scale": "none"},
    "reinforce_plus_plus_baseline": {"scale": "none", "whiten": "decisions"},
    "gpg": {"scale": "none"},
    "gdpo": {"credit": "per_reward", "scale_eps": 1e-6, "whiten": "decisions"},
    "reinforce_plus_plus": {"credit": "reward_to_go", "baseline": "none", "scale": "none", "whiten": "decisions"},
    "remax": {"credit": "reward_to_go", "baseline": "greedy", "scale": "none"},
}
RAW_SINGLETONS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg", "gdpo")


def estimators(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    kind = vector.what.split(" ")[0]
    mask = x["mask"] != 0
    if "optimal_token_baseline" in kind:
        return _optimal_token_baseline(kind, vector, backend, x, mask)
    choices = dict(ESTIMATORS[kind])
    if o.get("norm_adv_by_std_in_grpo") is False:
        choices["scale"] = "none"
    if "gdpo_reward_weights" in o:
        choices["reward_weights"] = tuple(o["gdpo_reward_weights"])
    r = recipe("grpo", **choices, gamma=o.get("gamma", 1.0))
    rows = mask.shape[0]
    fields = {"group_N": backend.ints(_numbered(vector.inputs.get("index") or [0] * rows)), "mask_NT": mask}
    fields["old_logp_NT"] = zeros(tuple(mask.shape), x["mask"])
    if kind == "gdpo":
        fields["reward_parts_NK"] = _scores(vector.inputs["rewards"], backend)
    elif r.credit == "reward_to_go":
        fields["reward_NT"] = x["token_level_rewards"]
        if kind == "remax":
            fields["baseline_NT"] = x["reward_baselines"][:, None] * zeros(tuple(mask.shape), x["mask"], 1.0)
    else:  # verl's score is the sum over all positions, masked or not
        fields["reward_N"] = x["token_level_rewards"].sum(1)
    rollouts = Rollouts(**fields)
    advantage = _raw_singletons(rollouts, r) if kind in RAW_SINGLETONS else advantages(rollouts, r)
    if kind == "gpg":  # verl's share counts non-zero rewards
        advantage = advantage * adv.signal_share(fields["reward_N"] != 0, advantage)[:, None]
    outputs = {"advantages": advantage}
    if "returns" in vector.outputs:
        outputs["returns"] = masked(adv.reward_to_go(fields["reward_NT"], mask, r.gamma), mask)
    return Case(outputs, dict.fromkeys(outputs, lambda v: _masked_lists(v, vector.inputs["mask"])))


def _masked_lists(values, mask):
    """Quirk: remax's holes (tool output) hold a carried return; an advantage of ours is 0 where nothing was decided."""
    return [[v if m else 0.0 for v, m in zip(*pair, strict=True)] for pair in zip(values, mask, strict=True)]


def _numbered(names):
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return [known[name] for name in names]


def _scores(rewards, backend):
    columns = list(rewards.values()) if isinstance(rewards, dict) else rewards
    parts = backend.array(columns)
    return parts.T if isinstance(rewards, dict) else parts


def _raw_singletons(rollouts, r):
    """Quirk: a group of one has baseline 0 and scale 1 in most of verl's estimators; in ours it has no signal."""
    plain = r.but(whiten="none")
    advantage = advantages(rollouts, plain)
    raw = advantages(rollouts, plain.but(baseline="none", scale="none"))
    raw = raw / (1.0 + r.scale_eps) if r.scale == "group_std" else raw
    single = adv.group_count(rollouts.group_N, zeros((len(rollouts),), raw, 1.0))[:, None] < 1.5
    advantage = masked(advantage, ~single) + masked(raw, single)
    return (
        advantage if r.whiten == "none" else adv.whiten(advantage, rollouts.mask_NT, None, r.whiten_ddof, r.whiten_eps)
    )


def _optimal_token_baseline(kind, vector, backend, x, mask):
    energy = adv.decision_energy(x["old_log_probs"], x["sum_pi_squared"])
    if x.get("rollout_is_weights") is not None:
        energy = energy * x["rollout_is_weights"] ** 2
    group = backend.ints(_numbered(vector.inputs["index"]))
    returns = adv.reward_to_go(x["token_level_rewards"], mask)
    baseline = adv.optimal_token_baseline(returns, energy, mask, group)
    return Case({"advantages": masked(returns - baseline, mask), "returns": returns})
