"""Rollouts + reference log-probs → advantages and gates: everything that spans rows, computed once, without gradient.

`advantages` compares the tries of each group; `Experience.build` adds masks and weights that never change;
`with_gates` adds those that depend on the current policy, on a whole minibatch, before it is split into micro-batches
by `select`. A micro-batch keeps the minibatch's `Denominators`, so its gradient does not know how it was split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpo.core import advantages as adv
from grpo.core import gates, kl, ratios, reductions, teachers
from grpo.core.arrays import (
    Array,
    astype,
    clip,
    expect_finite,
    expect_shape,
    masked,
    namespace,
    row_count,
    row_sum,
    wide,
    zeros,
)
from grpo.core.reductions import Denominators
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


# --- advantages -----------------------------------------------------------------------------------------------------


def advantages(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None = None) -> Array:
    """advantage_NT: each try against its group, 0 where nothing was decided. Rewards are not changed, only read."""
    _expect_meaning(rollouts, recipe)
    if recipe.credit == "reward_to_go":
        advantage_NT = _per_step(rollouts, recipe, ref_logp_NT)
    elif rollouts.group_NT is not None or recipe.baseline == "given":
        reward_N, weight_N = trajectory_reward(rollouts, recipe, ref_logp_NT)
        value_NT = masked(reward_N[:, None] * _ones(rollouts), rollouts.mask_NT)
        advantage_NT = _compare_decisions(value_NT, rollouts, recipe, weight_N)
    else:
        advantage_NT = trajectory_advantages(rollouts, recipe, ref_logp_NT)[:, None] * _ones(rollouts)
    counted_NT = rollouts.mask_NT & rollouts.scored_N[:, None]
    if recipe.whiten == "decisions":
        return adv.whiten(advantage_NT, counted_NT, None, recipe.whiten_ddof, recipe.whiten_eps, recipe.whiten_root)
    return masked(advantage_NT, counted_NT)


def _expect_meaning(rollouts: Rollouts, recipe: Recipe) -> None:
    """Raise where the recipe asks for something that this record cannot mean: nothing is silently left out."""
    inside = rollouts.group_NT is not None
    given = recipe.baseline == "given"
    parts, plain = rollouts.reward_parts_NK is not None, rollouts.reward_N is not None
    dense = rollouts.reward_NT is not None
    for wrong, remedy in (
        (given and rollouts.baseline_NT is None, "baseline=given needs baseline_NT from the room"),
        (
            inside and recipe.baseline == "length_weighted",
            "baseline=length_weighted cannot compare inside trajectories",
        ),
        (inside and recipe.credit == "per_reward", "credit=per_reward cannot compare inside trajectories (group_NT)"),
        ((inside or given) and recipe.whiten == "rows", "whiten=rows needs one advantage a row; use whiten=decisions"),
        (
            recipe.credit == "per_reward" and parts and (plain or dense),
            "credit=per_reward: give every reward as a part",
        ),
        (recipe.credit == "reward_to_go" and rollouts.episode_N is not None, "episode_N needs credit=trajectory"),
        (recipe.reward_weights is not None and not parts, "reward_weights needs reward_parts_NK, one column a reward"),
        (
            recipe.reward_clip is not None and recipe.credit == "reward_to_go" and not (parts or plain),
            "reward_clip limits a trajectory's reward; with dense rewards alone use credit=trajectory",
        ),
    ):
        if wrong:
            raise ValueError(remedy)


def compare(
    value_M: Array,
    group_M: Array,
    weight_M: Array,
    recipe: Recipe,
    length_M: Array | None = None,
    size_M: Array | None = None,
) -> Array:
    """(value − baseline) / scale within each group; 0 where the weight is 0 or the group has a single member."""
    value_M = adv.settle_ties(value_M, group_M, weight_M, size_M)
    if recipe.baseline == "entropic":
        return adv.entropic(value_M, group_M, weight_M)
    if recipe.baseline == "length_weighted":
        baseline_M = adv.length_weighted_mean(value_M, group_M, length_M, weight_M)
    elif recipe.baseline in ("none", "given"):
        baseline_M = value_M * 0
    else:
        baseline_M = {
            "group_mean": adv.group_mean,
            "leave_one_out": adv.leave_one_out,
            "best_of_group": adv.runner_up,
        }[recipe.baseline](value_M, group_M, weight_M)
    centred_M = value_M - baseline_M
    if recipe.scale == "group_std":
        centred_M = adv.divide(
            centred_M, adv.group_std(value_M, group_M, weight_M, recipe.scale_ddof), recipe.scale_eps
        )
    elif recipe.scale == "batch_std":
        centred_M = adv.divide(centred_M, adv.batch_std(value_M, weight_M, recipe.scale_ddof), recipe.scale_eps)
    elif recipe.scale == "group_mean":
        adv.expect_not_negative(value_M, weight_M)
        centred_M = adv.divide(centred_M, adv.group_mean(value_M, group_M, weight_M), recipe.scale_eps)
    elif recipe.scale == "signal_share":
        centred_M = centred_M * adv.signal_share(gates.has_signal(value_M, group_M, weight_M), value_M)
    return masked(centred_M, weight_M > 0)


def _ones(rollouts: Rollouts) -> Array:
    like = wide(rollouts.old_logp_NT)
    return zeros(tuple(like.shape), like, 1.0)


def _kl_in_reward(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None) -> Array | None:
    """β·KL of each sampled decision, for taking off the reward."""
    if not recipe.beta or recipe.kl_in != "reward" or ref_logp_NT is None:
        return None
    estimate_NT = kl.estimate(rollouts.old_logp_NT, ref_logp_NT, recipe.kl_estimator, cap=recipe.kl_cap)
    return recipe.beta * masked(estimate_NT, rollouts.mask_NT)


def _combined(rollouts: Rollouts, recipe: Recipe) -> tuple[Array | None, Array]:
    """One reward a row from its parts and its plain reward, None where neither is given; and which rows have one."""
    reward_N, valid_N = rollouts.reward_N, rollouts.scored_N
    if rollouts.reward_parts_NK is not None:
        total_N, opinion_N = adv.combine_rewards(rollouts.reward_parts_NK, _part_weights(rollouts, recipe))
        reward_N = total_N if reward_N is None else masked(wide(reward_N), valid_N) + total_N
        valid_N = valid_N & opinion_N
    return None if reward_N is None else masked(wide(reward_N), valid_N), valid_N


def reward_size(rollouts: Rollouts, recipe: Recipe) -> Array | None:
    """How large the numbers are that each row's reward is summed from: rounding is relative to these.

    None: it is not summed from anything.
    """
    if rollouts.reward_parts_NK is None and rollouts.reward_NT is None:
        return None
    valid_N = rollouts.scored_N
    size_N = _ones(rollouts)[:, 0] * 0
    xp = namespace(size_N)
    if rollouts.reward_N is not None:
        size_N = size_N + xp.abs(masked(wide(rollouts.reward_N), valid_N))
    if rollouts.reward_parts_NK is not None:
        parts_NK = wide(rollouts.reward_parts_NK) * _part_weights(rollouts, recipe)
        size_N = size_N + xp.sum(xp.abs(masked(parts_NK, ~xp.isnan(parts_NK))), axis=1)
    if rollouts.reward_NT is not None:
        size_N = size_N + row_sum(xp.abs(wide(rollouts.reward_NT)), rollouts.mask_NT)[:, 0]
    return masked(size_N, valid_N)


def left_alone(rollouts: Rollouts, recipe: Recipe, weight_N: Array) -> Array:
    """Rows that are dropped with their group: tries failed, and fewer than two are left to be compared."""
    if recipe.baseline in ("given", "none") or not recipe.outcome_coef:
        return weight_N != weight_N
    return gates.left_alone(weight_N, rollouts.group_N)


def _part_weights(rollouts: Rollouts, recipe: Recipe) -> Array:
    parts_NK = wide(rollouts.reward_parts_NK)
    weights = recipe.reward_weights or (1.0,) * parts_NK.shape[1]
    if len(weights) != parts_NK.shape[1]:
        raise ValueError(f"reward_weights has {len(weights)} entries for {parts_NK.shape[1]} reward parts")
    xp = namespace(parts_NK)
    return astype(xp.asarray(weights), parts_NK)


def trajectory_reward(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None = None) -> tuple[Array, Array]:
    """Total reward of each row, limited, less its KL; and its weight in statistics (rows of one episode count once)."""
    reward_N, valid_N = _combined(rollouts, recipe)
    if rollouts.reward_NT is not None:
        counted_NT = rollouts.mask_NT & valid_N[:, None]
        dense_N = row_sum(wide(rollouts.reward_NT), counted_NT)[:, 0]
        reward_N = dense_N if reward_N is None else reward_N + dense_N
    reward_N = clip(reward_N, *recipe.reward_clip) if recipe.reward_clip else reward_N
    penalty_NT = _kl_in_reward(rollouts, recipe, ref_logp_NT)
    if penalty_NT is not None:
        reward_N = reward_N - row_sum(penalty_NT, rollouts.mask_NT)[:, 0]
    weight_N = astype(valid_N, reward_N)
    if rollouts.episode_N is not None:
        return adv.episode_mean(reward_N, rollouts.episode_N, weight_N)
    return reward_N, weight_N


def trajectory_advantages(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None = None) -> Array:
    """One advantage a row."""
    reward_N, weight_N = trajectory_reward(rollouts, recipe, ref_logp_NT)
    length_N = row_count(rollouts.mask_NT, reward_N)[:, 0]
    if recipe.credit == "per_reward" and rollouts.reward_parts_NK is not None:
        advantage_N = _per_reward(rollouts, recipe, length_N)
    else:  # a single reward is its own only part
        size_N = reward_size(rollouts, recipe)
        advantage_N = compare(reward_N, rollouts.group_N, weight_N, recipe, length_N, size_N)
    if recipe.whiten != "rows":
        return advantage_N
    return adv.whiten(
        advantage_N[:, None],
        weight_N[:, None] > 0,
        weight_N[:, None],
        recipe.whiten_ddof,
        recipe.whiten_eps,
        recipe.whiten_root,
    )[:, 0]


def _per_reward(rollouts: Rollouts, recipe: Recipe, length_N: Array) -> Array:
    """Σ_k w_k · (reward k compared by itself)."""
    parts_NK, weight_K = wide(rollouts.reward_parts_NK), _part_weights(rollouts, recipe)
    advantage_N = zeros((len(rollouts),), parts_NK)
    for k in range(parts_NK.shape[1]):
        part_N = parts_NK[:, k]
        opinion_N = astype(rollouts.scored_N & ~namespace(part_N).isnan(part_N), part_N)
        if rollouts.episode_N is not None:
            part_N, opinion_N = adv.episode_mean(part_N, rollouts.episode_N, opinion_N)
        advantage_N = advantage_N + weight_K[k] * compare(part_N, rollouts.group_N, opinion_N, recipe, length_N)
    return advantage_N


def _per_step(rollouts: Rollouts, recipe: Recipe, ref_logp_NT: Array | None) -> Array:
    """Reward-to-go of each decision against the group at the same step (or `group_NT`)."""
    reward_N, valid_N = _combined(rollouts, recipe)
    if reward_N is not None and recipe.reward_clip:
        reward_N = clip(reward_N, *recipe.reward_clip)
    reward_NT = _ones(rollouts) * 0 if rollouts.reward_NT is None else wide(rollouts.reward_NT)
    reward_NT = masked(reward_NT, rollouts.mask_NT & valid_N[:, None])
    if reward_N is not None:
        reward_NT = reward_NT + reward_N[:, None] * astype(_last_decision(rollouts.mask_NT), reward_NT)
    penalty_NT = _kl_in_reward(rollouts, recipe, ref_logp_NT)
    reward_NT = reward_NT if penalty_NT is None else reward_NT - penalty_NT
    return_NT = adv.reward_to_go(reward_NT, rollouts.mask_NT, recipe.gamma)
    return _compare_decisions(return_NT, rollouts, recipe, astype(valid_N, return_NT))


def _compare_decisions(value_NT: Array, rollouts: Rollouts, recipe: Recipe, weight_N: Array) -> Array:
    """`compare`, decision by decision."""
    if recipe.baseline == "given":
        value_NT = value_NT - wide(rollouts.baseline_NT)
    group_NT = adv.step_groups(rollouts.group_N, value_NT.shape[1]) if rollouts.group_NT is None else rollouts.group_NT
    weight_NT = masked(weight_N[:, None] * _ones(rollouts), rollouts.mask_NT)
    flat_M = compare(value_NT.reshape(-1), group_NT.reshape(-1), weight_NT.reshape(-1), recipe)
    return flat_M.reshape(value_NT.shape)


def _last_decision(mask_NT: Array) -> Array:
    xp = namespace(mask_NT)
    done_NT = xp.cumsum(mask_NT * 1, axis=1)
    return mask_NT & (done_NT == done_NT[:, -1:])


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
