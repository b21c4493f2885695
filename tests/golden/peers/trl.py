"""TRL 1.16: GRPOTrainer losses and advantages, experimental GMPO, RLOOTrainer."""

from __future__ import annotations

from dataclasses import replace

from grpo.core import diagnostics, ratios
from grpo.core.advantages import batch_std, combine_rewards
from grpo.core.arrays import clip, row_sum, zeros
from grpo.core.reductions import Denominators, count
from grpo.core.surrogates import Cispo, Clip, Sapo, Vespo
from grpo.credit import trajectory_advantages
from grpo.objective import objective
from grpo.recipes import recipe
from grpo.rollouts import Rollouts
from tests.golden import beyond
from tests.golden.peers.case import Case, Scores, differentiate, inputs, record, with_gates

REDUCTION = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "fixed_length",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "luspo": "sequence_sum",
}


def _surrogate(o):
    if o["loss_type"] == "cispo":
        return Cispo(o["epsilon_low"], o["epsilon_high"], bounds="absolute")
    if o["loss_type"] == "sapo":
        return Sapo(o["sapo_temperature_pos"], o["sapo_temperature_neg"])
    if o["loss_type"] == "vespo":
        return Vespo(*(o[f"vespo_{name}"] for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")))
    return Clip(o["epsilon_low"], o["epsilon_high"], o["delta"])


def _recipe(o):
    kind = o["loss_type"]
    r = recipe(
        "grpo",
        surrogate=_surrogate(o),
        ratio=o["importance_sampling_level"],
        reduction=REDUCTION[kind],
        length=float(o["max_completion_length"]) if kind == "dr_grpo" else None,
        beta=o["beta"],
        kl_importance=o["use_bias_correction_kl"],
        entropy_coef=o["entropy_coef"],
        top_entropy=o["top_entropy_quantile"],
        off_policy_threshold=o["off_policy_mask_threshold"],
    )
    correction = o.get("vllm_importance_sampling")
    if correction:
        level, mode = correction["mode"].split("_")
        bounds = {"mismatch_low": correction["clip_min"], "mismatch_high": correction["clip_max"]}
        r = r.but(mismatch=mode, mismatch_level=level, **bounds)
    return r


def _denominators(o, own: Denominators) -> Denominators:
    """TRL divides a micro-batch by its accumulation steps; the token-mean family by the generation batch's tokens."""
    steps = o["gradient_accumulation_steps"]
    tokens = own.tokens * steps
    if o["loss_type"] in ("dapo", "cispo", "vespo") and "num_items_in_batch" in o:
        tokens = max(o["num_items_in_batch"], 1) * steps / o["steps_per_generation"] / o["num_processes"]
    return own._replace(tokens=tokens, rows=own.rows * steps, selected=own.selected * steps)


def losses(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    r = _recipe(o)
    batch = record(x, r, sampled=x.get("sampling_logp"))
    batch = with_gates(batch, Scores(x["logp"], x["entropies"]), r)
    own = batch.denominators
    batch = replace(batch, denominators=_denominators(o, own))
    outputs, _ = differentiate(backend, batch, r, x["logp"], x["entropies"], "grad_entropies" in vector.outputs)
    # Metrics are averages over this micro-batch alone.
    terms = objective(Scores(x["logp"], x["entropies"]), replace(batch, denominators=own), r)
    before_bonus = objective(Scores(x["logp"], x["entropies"]), batch, r.but(entropy_coef=0.0)).loss
    outputs["metrics"] = {"entropy": terms.entropy, "policy_loss": before_bonus}
    if terms.kl is not None:
        outputs["metrics"]["kl"] = terms.kl
    outputs["metrics"] |= _clip_metrics(o, x, batch, r, own)
    if batch.mismatch_NT is not None:
        sequence = r.mismatch_level == "sequence"
        outputs["importance_sampling_ratio"] = batch.mismatch_NT[:, :1] if sequence else batch.mismatch_NT
    return Case(outputs)


def _clip_metrics(o, x, batch, r, own):
    """A sequence-level ratio is one number a row in TRL, and every row counts, masked or not."""
    log_ratio = ratios.log_ratio(x["logp"], batch.old_logp_NT, batch.mask_NT)
    ratio, advantage, mask, over = ratios.token_ratio(log_ratio), batch.advantage_NT, batch.mask_NT, own
    if r.ratio == "sequence":
        ratio = ratios.sequence_ratio(log_ratio, mask)[:, :1]
        if x["advantages"].ndim == 2:
            return {}
        advantage, mask = advantage[:, :1], ratio == ratio
        over = count(mask, True)
    if o["loss_type"] == "cispo":
        return {"cispo_clip_ratio": diagnostics.share((ratio > o["epsilon_high"]) & (advantage > 0), mask, over)}
    ratio = clip(ratio, None, o["delta"] if isinstance(r.surrogate, Clip) else None)
    low = diagnostics.clipped_low(ratio, advantage, o["epsilon_low"])
    high = diagnostics.clipped_high(ratio, advantage, o["epsilon_high"])
    filled = row_sum(zeros(tuple(ratio.shape), ratio, 1.0), mask)[:, 0] > 0
    return {
        "clip_ratio/low_mean": diagnostics.share(low, mask, over),
        "clip_ratio/high_mean": diagnostics.share(high, mask, over),
        "clip_ratio/region_mean": diagnostics.share(low | high, mask, over),
        "clip_ratio/low_min": beyond.row_share(low, mask)[filled].min(),
        "clip_ratio/high_max": beyond.row_share(high, mask)[filled].max(),
    }


def gmpo(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    r = recipe(
        "gmpo",
        epsilon=o["epsilon_low"],
        epsilon_high=o["epsilon_high"],
        beta=o["beta"],
        top_entropy=o["top_entropy_quantile"],
    )
    batch = with_gates(record(x, r), Scores(x["logp"], x["entropies"]), r)
    outputs, terms = differentiate(backend, batch, r, x["logp"], x["entropies"])
    outputs["metrics"] = {"entropy": terms.entropy} | ({} if terms.kl is None else {"kl": terms.kl})
    return Case(outputs, {"loss": lambda loss: loss - _empty_rows(x)})


def _empty_rows(x):
    """Quirk: a row without any decision has ratio 1 in TRL and puts the constant −A/B into the loss (no gradient)."""
    empty = (x["mask"] != 0).sum(1) == 0
    return float((-x["advantages"] * empty).sum() / x["mask"].shape[0])


SCALE = {"group": "group_std", "batch": "batch_std", "none": "none"}


def group_advantages(vector, backend):
    o = vector.options
    if o["multi_objective_aggregation"] == "normalize_then_sum":
        r = recipe("gdpo")
    else:
        r = recipe("grpo", scale=SCALE[o["scale_rewards"]])
    r = r.but(reward_weights=tuple(o["reward_weights"]))
    parts = backend.array(vector.inputs["rewards"])
    rollouts = _bandit(backend, parts, o["num_generations"])
    total, opinion = combine_rewards(parts, backend.array(o["reward_weights"]))
    weight = opinion * 1.0
    metrics = {"reward": (total * weight).sum() / weight.sum()}
    if float(weight.sum()) > 1.5:  # quirk: NaN for a single value
        metrics["reward_std"] = batch_std(total, weight)[0]
    return Case({"advantages": trajectory_advantages(rollouts, r), "metrics": metrics})


def _bandit(backend, parts, group_size, **more):
    rows = parts.shape[0]
    fields = {"mask_NT": backend.ints([[1]] * rows), "old_logp_NT": backend.array([[0.0]] * rows)} | more
    return Rollouts(group_N=backend.ints([i // group_size for i in range(rows)]), reward_parts_NK=parts, **fields)


def rloo(vector, backend):
    o, x = vector.options, inputs(vector, backend)
    if vector.what == "rloo loss":
        r = recipe("rloo", epsilon=o["epsilon_low"], epsilon_high=o["epsilon_high"])
        batch = record(x, r)
        outputs, _ = differentiate(backend, batch, r, x["logp"])
        return Case(outputs, {"loss": lambda loss: loss - _empty_rows(x)})
    clip_range = o["reward_clip_range"]
    r = recipe(
        "rloo",
        beta=o["beta"],
        reward_clip=tuple(clip_range) if clip_range else None,
        reward_weights=tuple(o["reward_weights"]),
    )
    if o["normalize_advantages"]:
        r = r.but(whiten="rows", whiten_eps=1e-4, whiten_root=False)
        # Quirk: alone in its group, a row's advantage is 0/0 and leaves the normalisation; so does one without opinion.
        x["rewards"] = _without_loners(backend, x["rewards"], o["num_generations"])
    more = {"mask_NT": x["mask"], "old_logp_NT": x["old_logp"]}
    rollouts = _bandit(backend, x["rewards"], o["num_generations"], **more)
    advantage_N = trajectory_advantages(rollouts, r, x.get("ref_logp"))
    return Case({"advantages": advantage_N, "old_seq_logp": row_sum(x["old_logp"], rollouts.mask_NT)[:, 0]})


def _without_loners(backend, parts, group_size):
    rows = [[float(v) for v in row] for row in parts]
    for start in range(0, len(rows), group_size):
        scored = [i for i in range(start, start + group_size) if any(v == v for v in rows[i])]
        if len(scored) == 1:
            rows[scored[0]] = [None] * len(rows[scored[0]])
    return backend.array([[None if v != v else v for v in row] if None not in row else row for row in rows])
