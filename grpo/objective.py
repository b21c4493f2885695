"""ratio → surrogate → gates → KL → entropy → reduction: the number that is minimised, and what to watch beside it.

Array-agnostic: differentiate it with torch autograd or `jax.grad`. Every term is a sum divided by the minibatch's
global denominators, so the losses, gradients and metrics of micro-batches add up to those of the whole.
"""

from __future__ import annotations

from typing import NamedTuple

from grpo.core import diagnostics, gates, kl, ratios, reductions, teachers
from grpo.core.arrays import (
    EXP_LIMIT,
    Array,
    absolute,
    astype,
    clip,
    expect_shape,
    masked,
    namespace,
    stop_gradient,
    wide,
)
from grpo.core.surrogates import Decisions
from grpo.experience import Experience
from grpo.recipes import Recipe
from grpo.rollouts import Scores


class Terms(NamedTuple):
    """The loss and its parts; all additive over micro-batches."""

    loss: Array
    policy_loss: Array
    """Without KL and entropy."""
    kl: Array | None
    """Mean over decisions of the KL in the loss; None when beta is 0."""
    entropy: Array | None
    """Mean over decisions, where the policy gives it or a bonus is asked for."""
    metrics: dict[str, Array]
    teacher_kl: Array | None = None
    """Mean over decisions of the divergence to the teacher; None where there is none."""


class Parts(NamedTuple):
    """What the policy loss of each decision is made of: gate · (term + penalty) · mismatch · weight."""

    gate: Array
    term: Array
    penalty: Array | None
    mismatch: Array | None
    weight: Array | None

    def product(self) -> Array:
        """The policy loss of each decision; KL and entropy pass no gate."""
        found_NT = masked(self.term if self.penalty is None else self.term + self.penalty, self.gate)
        for factor_NT in (self.mismatch, self.weight):
            found_NT = found_NT if factor_NT is None else found_NT * factor_NT
        return found_NT


def objective(scores: Scores, batch: Experience, recipe: Recipe) -> Terms:
    """The loss of a minibatch, or the share of it that a micro-batch contributes."""
    d = _folded(_decisions(scores, batch, recipe), recipe)
    over = batch.denominators
    ratio_NT = _ratio(d, recipe)
    loss = policy_loss = _reduced(_parts(ratio_NT, d, batch, recipe).product(), d, over, recipe)

    kl_mean = entropy_mean = None
    if d.kl is not None:
        kl_NT = d.kl * ratio_NT if recipe.kl_importance else d.kl
        loss = loss + recipe.beta * _reduced(_weighted(kl_NT, d), d, over, recipe)
        kl_mean = reductions.token_mean(stop_gradient(kl_NT), d.mask, over)
    if d.entropy is not None:
        entropy_mean = reductions.token_mean(stop_gradient(d.entropy), d.mask, over)
        loss = loss - recipe.entropy_coef * _entropy_bonus(d, over, recipe) if recipe.entropy_coef else loss
    if d.teacher is not None:
        loss = loss + recipe.teacher_coef * _reduced(_weighted(d.teacher, d), d, over, recipe)
    metrics = _metrics(stop_gradient(ratio_NT), d, over, recipe)
    return Terms(loss, policy_loss, kl_mean, entropy_mean, metrics, _teacher_kl(batch, d, over))


def per_decision(scores: Scores, batch: Experience, recipe: Recipe) -> dict[str, Array]:
    """What the objective made of every decision: its ratio, its KL and the `Parts` of what is reduced.

    Of chunks and trajectories that decide as one, each decision has the numbers of the whole; the KL is its own. Only
    what the recipe has is there.
    """
    unknown = recipe.kl_estimator == "exact" and scores.exact_kl_NT is None
    each = _decisions(scores, batch, recipe.but(beta=0.0) if unknown else recipe)
    d = _folded(each, recipe)
    ratio_NT = _ratio(d, recipe)
    parts = _parts(ratio_NT, d, batch, recipe)
    given = {"ratio": ratio_NT, **parts._asdict(), "term": masked(parts.term, d.mask)}
    steps = batch.mask_NT.shape[1]
    chunk_T = namespace(d.logp).arange(steps) // recipe.fold_size(steps)
    found = {name: array if d is each else array[:, chunk_T] for name, array in given.items() if array is not None}
    found["gate"] = found["gate"] & batch.mask_NT
    kl_NT = each.kl
    if recipe.beta and recipe.kl_in == "reward" and batch.ref_logp_NT is not None:
        sampled_NT = batch.rollouts.old_logp_NT
        kl_NT = kl.estimate(sampled_NT, batch.ref_logp_NT, recipe.kl_estimator, cap=recipe.kl_cap)
    return found if kl_NT is None else found | {"kl": masked(kl_NT, batch.mask_NT)}


def _decisions(scores: Scores, batch: Experience, recipe: Recipe) -> Decisions:
    """Everything the terms need, as recorded: exact zeros, in value and gradient, where nothing was decided."""
    mask_NT, rollouts = batch.mask_NT, batch.rollouts
    given = {"logp_NT": scores.logp_NT, "entropy_NT": scores.entropy_NT, "exact_kl_NT": scores.exact_kl_NT}
    expect_shape(tuple(mask_NT.shape), **given)
    logp_NT = masked(wide(scores.logp_NT), mask_NT)
    advantage_NT = masked(astype(batch.advantage_NT, logp_NT), mask_NT)
    entropy_NT = kept_NT = None
    if scores.entropy_NT is not None:
        entropy_NT = masked(wide(scores.entropy_NT), mask_NT)
    elif recipe.entropy_coef:
        entropy_NT = masked(kl.sampled_entropy(logp_NT), mask_NT)
    if recipe.off_policy_threshold is not None:
        sampled_NT = rollouts.old_logp_NT if rollouts.sampled_logp_NT is None else rollouts.sampled_logp_NT
        kept_NT = gates.on_policy_enough(logp_NT, sampled_NT, advantage_NT, mask_NT, recipe.off_policy_threshold)
    log_ratio_NT = ratios.log_ratio(logp_NT, batch.old_logp_NT, mask_NT, recipe.log_ratio_low, recipe.log_ratio_high)
    return Decisions(
        mask=mask_NT,
        logp=logp_NT,
        log_ratio=log_ratio_NT,
        advantage=advantage_NT,
        kl=_kl(logp_NT, scores, batch, recipe),
        entropy=entropy_NT,
        weight=None if rollouts.weight_NT is None else astype(rollouts.weight_NT, logp_NT),
        mismatch=batch.mismatch_NT,
        kept=kept_NT,
        selected=batch.selected_NT,
        teacher=_teacher(logp_NT, log_ratio_NT, scores, batch, recipe),
    )


def _teacher(logp_NT: Array, log_ratio_NT: Array, scores: Scores, batch: Experience, recipe: Recipe) -> Array | None:
    """Divergence of each decision to the teacher, where the loss has that term and the teacher an opinion."""
    if not recipe.teacher_coef or recipe.teacher_in != "loss" or batch.teacher_logp_NT is None:
        return None
    known_NT = _known(batch)
    if recipe.teacher_over == "sampled":
        teacher_NT = masked(batch.teacher_logp_NT, known_NT)
        found_NT = teachers.sampled(logp_NT, teacher_NT, recipe.teacher_kl, recipe.teacher_mix)
    elif scores.choice_logp_NTK is None or batch.teacher_choice_logp_NTK is None:
        raise ValueError("teacher_over=top_k needs choice_logp_NTK of policy and teacher; use teacher_over=sampled")
    else:
        given = (scores.choice_logp_NTK, astype(batch.teacher_choice_logp_NTK, scores.choice_logp_NTK))
        mine_NTK, theirs_NTK = (teachers.with_tail(masked(x, known_NT[:, :, None])) for x in given)
        found_NT = teachers.divergence(mine_NTK, theirs_NTK, recipe.teacher_kl, recipe.teacher_mix)
    if recipe.teacher_clip is not None:
        found_NT = found_NT * clip(ratios.token_ratio(stop_gradient(log_ratio_NT)), None, recipe.teacher_clip)
    return masked(found_NT, known_NT)


def _known(batch: Experience) -> Array:
    """Decisions that the teacher has an opinion on."""
    return batch.mask_NT & ~namespace(batch.teacher_logp_NT).isnan(batch.teacher_logp_NT)


def _teacher_kl(batch: Experience, d: Decisions, over: reductions.Denominators) -> Array | None:
    """As the term has it; where the teacher is a part of the advantages, mean(log π_old − log τ)."""
    if batch.teacher_logp_NT is None:
        return None
    if d.teacher is not None:
        return reductions.token_mean(stop_gradient(d.teacher), d.mask, over)
    gap_NT = wide(batch.rollouts.old_logp_NT) - astype(batch.teacher_logp_NT, wide(batch.rollouts.old_logp_NT))
    return reductions.token_mean(gap_NT, _known(batch), over)


def _kl(logp_NT: Array, scores: Scores, batch: Experience, recipe: Recipe) -> Array | None:
    """KL of each decision to the other policy, where the loss has that term."""
    if not recipe.beta or recipe.kl_in != "loss":
        return None
    if recipe.kl_estimator == "exact":
        if scores.exact_kl_NT is None:
            raise ValueError("kl_estimator=exact needs a policy that gives exact_kl_NT; use k1, k2 or k3 otherwise")
        return masked(wide(scores.exact_kl_NT), batch.mask_NT)
    other_NT = batch.ref_logp_NT if recipe.kl_to == "reference" else batch.old_logp_NT
    other_NT = stop_gradient(logp_NT if other_NT is None else masked(wide(other_NT), batch.mask_NT))
    if recipe.kl_direction == "current_other":
        return kl.estimate(logp_NT, other_NT, recipe.kl_estimator, recipe.kl_gradient_estimator, recipe.kl_cap)
    if recipe.kl_to == "old":  # the other policy is the one that sampled
        return kl.estimate(other_NT, logp_NT, recipe.kl_estimator, recipe.kl_gradient_estimator, recipe.kl_cap)
    return kl.estimate(logp_NT, other_NT, "forward", recipe.kl_gradient_estimator, recipe.kl_cap)


def _folded(d: Decisions, recipe: Recipe) -> Decisions:
    """Chunks or whole trajectories as single decisions: log-probs, KL and entropy add up, advantages average."""
    size = recipe.fold_size(d.mask.shape[1])
    if size == 1:
        return d

    def add(x: Array | None) -> Array | None:
        return None if x is None else ratios.fold(x, d.mask, size)

    def mean(x: Array | None) -> Array | None:
        return None if x is None else ratios.fold_mean(x, d.mask, size)

    mismatch = mean(d.mismatch)
    if d.mismatch is not None and recipe.mismatch_level == "token":
        mismatch = namespace(d.mismatch).exp(clip(add(ratios.log_weight(d.mismatch)), -EXP_LIMIT, EXP_LIMIT))
    return Decisions(
        mask=ratios.fold_mask(d.mask, size),
        logp=add(d.logp),
        log_ratio=clip(add(d.log_ratio), -EXP_LIMIT, EXP_LIMIT),
        advantage=mean(d.advantage),
        kl=add(d.kl),
        entropy=add(d.entropy),
        weight=mean(d.weight),
        mismatch=mismatch,
        kept=None if d.kept is None else ratios.fold_mask(d.kept & d.mask, size),
        selected=d.selected,
        teacher=add(d.teacher),
    )


def _ratio(d: Decisions, recipe: Recipe) -> Array:
    if recipe.ratio == "sequence":
        return ratios.sequence_ratio(d.log_ratio, d.mask)
    if recipe.ratio == "sequence_token":
        return ratios.sequence_token_ratio(d.log_ratio, d.mask)
    return ratios.token_ratio(d.log_ratio)


def _parts(ratio_NT: Array, d: Decisions, batch: Experience, recipe: Recipe) -> Parts:
    """The surrogate's term, and what the gates and weights make of it."""
    term_NT, gate_NT, penalty_NT = recipe.surrogate.loss(ratio_NT, d), d.mask, None
    if d.kept is not None:
        gate_NT = gate_NT & d.kept
    if d.selected is not None and not recipe.surrogate.selects:
        gate_NT = gate_NT & d.selected
    if batch.penalised_NT is not None:
        penalty_NT = masked(recipe.kl_cov_coef * absolute(d.log_ratio), batch.penalised_NT)
    if batch.open_NT is not None and batch.penalised_NT is not None:  # the penalty passes the gate of the term
        term_NT, gate_NT = masked(term_NT, batch.open_NT), gate_NT & (batch.open_NT | batch.penalised_NT)
    elif batch.open_NT is not None:
        gate_NT = gate_NT & batch.open_NT
    return Parts(gate_NT, term_NT, penalty_NT, recipe.surrogate.mismatch(d), d.weight)


def _weighted(x_NT: Array, d: Decisions) -> Array:
    return x_NT if d.weight is None else x_NT * d.weight


def _entropy_bonus(d: Decisions, over: reductions.Denominators, recipe: Recipe) -> Array:
    if recipe.entropy_over == "loss":
        return _reduced(_weighted(d.entropy, d), d, over, recipe)
    chosen_NT = d.mask if d.selected is None else d.mask & d.selected
    return reductions.token_mean(_weighted(d.entropy, d), chosen_NT, over._replace(tokens=over.selected))


def _reduced(x_NT: Array, d: Decisions, over: reductions.Denominators, recipe: Recipe) -> Array:
    if recipe.reduction == "token_mean":
        return reductions.token_mean(x_NT, d.mask, over)
    if recipe.reduction == "sequence_mean":
        return reductions.sequence_mean(x_NT, d.mask, over)
    if recipe.reduction == "sequence_sum":
        return reductions.sequence_sum(x_NT, d.mask, over)
    return reductions.fixed_length(x_NT, d.mask, over)


def _metrics(ratio_NT: Array, d: Decisions, over: reductions.Denominators, recipe: Recipe) -> dict[str, Array]:
    found = {
        "ratio": reductions.token_mean(ratio_NT, d.mask, over),
        "approx_kl": diagnostics.approx_kl(d.log_ratio, d.mask, over),
    }
    limits = recipe.surrogate.limits
    if limits is None:
        return found
    low = diagnostics.share(diagnostics.clipped_low(ratio_NT, d.advantage, 1.0 - limits[0]), d.mask, over)
    high = diagnostics.share(diagnostics.clipped_high(ratio_NT, d.advantage, limits[1] - 1.0), d.mask, over)
    both = low + high  # no decision is held on both sides
    return found | {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": both}
