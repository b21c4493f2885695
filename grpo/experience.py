"""Rollouts + reference log-probs → advantages and gates: everything that spans rows, computed once, without gradient.

`advantages` compares the tries of each group; `Experience.build` adds masks and weights that never change;
`with_gates` adds those that depend on the current policy, on a whole minibatch, before it is split into micro-batches
by `select`. A micro-batch keeps the minibatch's `Denominators`, so its gradient does not know how it was split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpo.core import gates, ratios, reductions, teachers
from grpo.core.arrays import (
    Array,
    astype,
    expect_finite,
    expect_shape,
    masked,
    namespace,
    wide,
)
from grpo.core.reductions import Denominators
from grpo.credit import advantages, left_alone, reward_size, trajectory_reward
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts, Scores, Status, Taught, alone, row_index

_ROWS = ("_N", "_NT", "_NTK")  # how names of arrays with an entry a row end


@dataclass(frozen=True)
class Experience:
    """Rollouts ready to learn from; a minibatch or a micro-batch of them is the same record with fewer rows."""

    rollouts: Rollouts
    mask_NT: Array
    """Decisions that may teach: the rollouts' mask less truncated, failed and dropped rows."""
    present_N: Array
    """Rows that are in the batch: not those of dropped groups."""
    advantage_NT: Array
    old_logp_NT: Array | None
    """None: the current policy, detached (one pass, one minibatch: the ratio is 1)."""
    ref_logp_NT: Array | None
    mismatch_NT: Array | None
    """Sampler-mismatch weight of each decision."""
    denominators: Denominators
    selected_NT: Array | None = None
    """Decisions that passed the entropy gate."""
    open_NT: Array | None = None
    """False where clip-cov cut the gradient."""
    penalised_NT: Array | None = None
    """True where kl-cov charges its penalty."""
    teacher_logp_NT: Array | None = None
    """The teacher's, NaN where it has no opinion."""
    teacher_choice_logp_NTK: Array | None = None
    """The teacher's of the choices that it named."""

    @staticmethod
    def build(
        rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None = None, detached: bool = False
    ) -> Experience:
        """Advantages, masks and fixed weights for a batch: all rows are compared, those that learn are kept."""
        if recipe.beta and recipe.kl_to == "reference" and recipe.kl_estimator != "exact" and ref_logp_NT is None:
            raise ValueError(f"beta={recipe.beta:g} needs reference log-probs: pass ref_logp_NT, or set beta=0")
        expect_shape(tuple(rollouts.mask_NT.shape), ref_logp_NT=ref_logp_NT)
        expect_finite(where=rollouts.mask_NT, ref_logp_NT=ref_logp_NT)
        reward_N, weight_N = trajectory_reward(rollouts, recipe, ref_logp_NT)
        present_N = ~left_alone(rollouts, recipe, weight_N)
        if recipe.drop_no_signal:
            present_N = gates.has_signal(reward_N, rollouts.group_N, weight_N, reward_size(rollouts, recipe))
        mask_NT = teaching_mask(rollouts, recipe) & present_N[:, None]
        mismatch_NT = None
        if recipe.mismatch != "none" and rollouts.sampled_logp_NT is not None:
            gap_NT = gates.mismatch_log_ratio(rollouts.old_logp_NT, rollouts.sampled_logp_NT, mask_NT)
            mismatch_NT = gates.mismatch_weight(
                gap_NT, mask_NT, recipe.mismatch_level, recipe.mismatch, recipe.mismatch_low, recipe.mismatch_high
            )
        everything = Experience(
            rollouts=rollouts,
            mask_NT=mask_NT,
            present_N=present_N,
            advantage_NT=advantages(rollouts, recipe, ref_logp_NT),
            old_logp_NT=None if detached else rollouts.old_logp_NT,
            ref_logp_NT=ref_logp_NT,
            mismatch_NT=mismatch_NT,
            denominators=count(mask_NT, recipe, present_N=present_N),
        )
        return everything if rollouts.learns_N is None else everything.minibatch(learners(rollouts), recipe)

    def __len__(self) -> int:
        return len(self.rollouts)

    def select(self, rows: Sequence[int] | Array) -> Experience:
        """A micro-batch: some rows, the denominators of the whole."""
        if isinstance(rows, range) and rows == range(len(self)):
            return self
        index = row_index(rows, self.mask_NT)
        own = {name: value for name, value in vars(self).items() if value is not None}
        arrays = {name: value for name, value in own.items() if name.endswith(_ROWS)}
        return replace(
            self, rollouts=self.rollouts.select(rows), **{name: value[index] for name, value in arrays.items()}
        )

    def each(self, change: Callable[[Array], Array]) -> Experience:
        """This record with something done to every array that changes no value: another device, say."""
        own = {name: value for name, value in vars(self).items() if value is not None and name.endswith(_ROWS)}
        changed = {name: change(array) for name, array in own.items()}
        return replace(self, rollouts=self.rollouts.each(change), **changed)

    def minibatch(self, rows: Sequence[int] | Array, recipe: Recipe) -> Experience:
        """What one optimizer step learns from: some rows, counted anew."""
        part = self.select(rows)
        if part is self:
            return self
        return replace(part, denominators=count(part.mask_NT, recipe, part.selected_NT, part.present_N))

    def taught(self, lesson: Taught, recipe: Recipe) -> Experience:
        """The same with what a teacher says, as a part of the advantages or as a term to come."""
        expect_shape(tuple(self.mask_NT.shape), teacher_logp_NT=lesson.logp_NT)
        logp_NT = astype(lesson.logp_NT, wide(self.rollouts.old_logp_NT))
        known_NT = self.mask_NT & ~namespace(logp_NT).isnan(logp_NT)
        expect_finite(where=known_NT, teacher_logp_NT=logp_NT)
        advantage_NT = recipe.outcome_coef * self.advantage_NT
        if recipe.teacher_in == "advantage":
            gain_NT = teachers.advantage(
                self.rollouts.old_logp_NT,
                masked(logp_NT, known_NT),
                known_NT,
                recipe.teacher_gamma,
                recipe.teacher_drift,
            )
            advantage_NT = advantage_NT + recipe.teacher_coef * astype(gain_NT, advantage_NT)
        return replace(
            self,
            rollouts=self.rollouts if lesson.choice_NTK is None else self.rollouts.but(choice_NTK=lesson.choice_NTK),
            advantage_NT=advantage_NT,
            teacher_logp_NT=logp_NT,
            teacher_choice_logp_NTK=lesson.choice_logp_NTK,
        )

    def decisions(self) -> Experience:
        """The same with each decision as a row of its own (T = 1), whichever trajectory made it."""
        own = {name: value for name, value in vars(self).items() if value is not None and name.endswith(_ROWS)}
        made_NT = self.rollouts.mask_NT
        return replace(
            self,
            rollouts=self.rollouts.decisions(),
            **{name: alone(array, made_NT, name.endswith("_N")) for name, array in own.items()},
        )


def learners(rollouts: Rollouts) -> Sequence[int]:
    """The rows that learn, where not all do."""
    assert rollouts.learns_N is not None
    return [row for row, learns in enumerate(rollouts.learns_N.tolist()) if learns]


def count(
    mask_NT: Array, recipe: Recipe, selected_NT: Array | None = None, present_N: Array | None = None
) -> Denominators:
    """Denominators of a minibatch, in decisions as the recipe's ratio sees them (tokens, chunks, trajectories)."""
    if recipe.reduction == "fixed_length" and recipe.length is None and mask_NT.shape[1] > 1:
        raise ValueError("reduction=fixed_length needs length, the longest a trajectory may be: padding is no constant")
    size = recipe.fold_size(mask_NT.shape[1])
    mask_NT = mask_NT if size == 1 else ratios.fold_mask(mask_NT, size)
    return reductions.count(mask_NT, recipe.count_empty_rows, selected_NT, present_N, recipe.length or 1.0)


def teaching_mask(rollouts: Rollouts, recipe: Recipe) -> Array:
    """The rollouts' mask without failed rows and, where the recipe says so, truncated ones."""
    keep_N = rollouts.scored_N
    if recipe.mask_truncated and rollouts.status_N is not None:
        keep_N = keep_N & (rollouts.status_N != int(Status.TRUNCATED))
    return rollouts.mask_NT & keep_N[:, None]


def with_gates(batch: Experience, scores: Scores, recipe: Recipe, priority_NT: Array | None = None) -> Experience:
    """The minibatch with its row-spanning gates, from scores of the *whole* minibatch (no gradient is taken).

    `priority_NT`: uniform random numbers for clip-cov's draw, from the caller's seeded generator.
    """
    selected_NT = open_NT = penalised_NT = None
    if recipe.top_entropy < 1.0:
        if scores.entropy_NT is None:
            raise ValueError(f"top_entropy={recipe.top_entropy:g} needs a policy that gives entropies")
        selected_NT = gates.top_entropy(scores.entropy_NT, batch.mask_NT, recipe.top_entropy)
    if recipe.m2_limit is not None:
        gap_NT = ratios.log_ratio(scores.logp_NT, batch.old_logp_NT, batch.mask_NT)
        open_NT = gates.second_moment(gap_NT, batch.mask_NT, recipe.m2_limit)
    if recipe.clip_cov or recipe.kl_cov:
        covariance_NT = gates.covariance(scores.logp_NT, batch.advantage_NT, batch.mask_NT)
        if recipe.clip_cov:
            if priority_NT is None:
                raise ValueError(
                    "clip_cov draws decisions at random: pass priority_NT, uniform numbers of shape (N, T)"
                )
            log_ratio_NT = ratios.log_ratio(scores.logp_NT, batch.old_logp_NT, batch.mask_NT)
            uncut_NT = gates.clip_cov(
                ratios.token_ratio(log_ratio_NT),
                batch.advantage_NT,
                covariance_NT,
                batch.mask_NT,
                *recipe.surrogate.clip_range,
                recipe.clip_cov,
                recipe.clip_cov_low,
                recipe.clip_cov_high,
                priority_NT,
            )
            open_NT = uncut_NT if open_NT is None else open_NT & uncut_NT
        if recipe.kl_cov:
            penalised_NT = gates.kl_cov(covariance_NT, batch.mask_NT, recipe.kl_cov)
    return replace(
        batch,
        selected_NT=selected_NT,
        open_NT=open_NT,
        penalised_NT=penalised_NT,
        denominators=count(batch.mask_NT, recipe, selected_NT, batch.present_N),
    )
