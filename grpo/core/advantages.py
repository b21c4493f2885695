"""How good was each try, compared with its group: baselines, scales, credit, whitening.

Functions over M values take a group id and a weight for each. M is N for whole trajectories, or N·T flattened when
groups live inside trajectories (`step_groups`). A weight is 1 for a value that counts, 0 for one that does not (a
failed reward: its value is never read), and 1/k for each of the k rows of one episode, so that it counts once.

A group of equal values gives exactly zero. 7 × 0.1 has a rounded mean that is not 0.1, so means are taken in two
passes, the second on the differences from the first; and 0.1 + 0.2 is not 0.3, so values that close are made equal
first (`settle_ties`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo.core.arrays import (
    Array,
    astype,
    clip,
    expect_finite,
    expect_ndim,
    expect_shape,
    group_index,
    is_traced,
    machine_epsilon,
    masked,
    namespace,
    one_group,
    positions,
    segment_max,
    segment_sum,
    wide,
    zeros,
)

_TIE_ULPS = 4.0
"""Values this many units in the last place apart are equal: a sum of a few rewards is not more exact than that."""


# --- the group: what its members are compared with ------------------------------------------------------------------


def entries(value_M: Array, group_M: Array, weight_M: Array | None) -> tuple[Array, Array, Array]:
    """Check shapes and numbers once; give widened values, dense group index, float weights."""
    expect_ndim(1, value=value_M)
    expect_shape(tuple(value_M.shape), group=group_M, weight=weight_M)
    value_M = wide(value_M)
    weight_M = zeros(value_M.shape, value_M, 1.0) if weight_M is None else astype(weight_M, value_M)
    expect_finite(where=weight_M > 0, value=value_M)
    return masked(value_M, weight_M > 0), group_index(group_M), weight_M


def _rough_mean(value_M: Array, index_M: Array, weight_M: Array) -> tuple[Array, Array]:
    """The group's mean up to rounding, to take differences from; and the number of its members (1 if none)."""
    count_M = _at_least_one(segment_sum(weight_M, index_M)[index_M])
    return segment_sum(value_M * weight_M, index_M)[index_M] / count_M, count_M


def _largest(value_M: Array, index_M: Array, weight_M: Array) -> Array:
    """Largest valid value of each entry's group; 0 for a group without one."""
    xp = namespace(value_M)
    low = zeros((), value_M, float("-inf"))
    top_M = segment_max(xp.where(weight_M > 0, value_M, low), index_M)[index_M]
    return masked(top_M, top_M > low)


def tied_with_best(value_M: Array, index_M: Array, weight_M: Array, size_M: Array | None = None) -> tuple[Array, Array]:
    """Entries within rounding of their group's largest value, itself included; and that value.

    `size_M`: how large the numbers were that each value was summed from; the sum cannot be more exact than they are.
    """
    xp = namespace(value_M)
    top_M = _largest(value_M, index_M, weight_M)
    own_M = xp.maximum(xp.abs(value_M), xp.abs(top_M))
    size_M = own_M if size_M is None else xp.maximum(own_M, _largest(astype(size_M, value_M), index_M, weight_M))
    return xp.abs(value_M - top_M) <= _TIE_ULPS * machine_epsilon(value_M) * size_M, top_M


def settle_ties(value_M: Array, group_M: Array, weight_M: Array | None = None, size_M: Array | None = None) -> Array:
    """Values within rounding of their group's largest become equal to it, so 0.1 + 0.2 ties with 0.3."""
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    tied_M, top_M = tied_with_best(value_M, index_M, weight_M, size_M)
    return namespace(value_M).where(tied_M & (weight_M > 0), top_M, value_M)


def group_count(group_M: Array, weight_M: Array) -> Array:
    """Number of members that count in each entry's group: Σ w (an episode of several rows counts once)."""
    expect_shape(tuple(weight_M.shape), group=group_M)
    index_M = group_index(group_M)
    return segment_sum(weight_M, index_M)[index_M]


def group_mean(value_M: Array, group_M: Array, weight_M: Array | None = None) -> Array:
    """b_i = mean of the group of i. GRPO, arXiv:2402.03300 (eq. 3)."""
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    rough_M, count_M = _rough_mean(value_M, index_M, weight_M)
    gap_M = segment_sum((value_M - rough_M) * weight_M, index_M)[index_M]
    return rough_M + gap_M / count_M


def leave_one_out(value_M: Array, group_M: Array, weight_M: Array | None = None) -> Array:
    """b_i = mean of the *other* members; the own value where there is no other. RLOO, arXiv:2402.14740."""
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    xp = namespace(value_M)
    rough_M, count_M = _rough_mean(value_M, index_M, weight_M)
    gap_M = value_M - rough_M
    rest_M = segment_sum(gap_M * weight_M, index_M)[index_M] - gap_M
    alone_M = count_M < 1.5
    others_M = xp.where(alone_M, zeros((), value_M, 1.0), count_M - 1.0)
    return xp.where(alone_M, value_M, rough_M + rest_M / others_M)


def length_weighted_mean(value_M: Array, group_M: Array, length_M: Array, weight_M: Array | None = None) -> Array:
    """b_i = Σ len·r / Σ len over the group: the variance-optimal constant baseline. OPO, arXiv:2505.23585."""
    expect_shape(tuple(value_M.shape), length=length_M)
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    share_M = astype(length_M, value_M) * weight_M
    rough_M, _ = _rough_mean(value_M, index_M, weight_M)
    gap_M = segment_sum((value_M - rough_M) * share_M, index_M)[index_M]
    return rough_M + gap_M / _at_least_one(segment_sum(share_M, index_M)[index_M])


def runner_up(value_M: Array, group_M: Array, weight_M: Array | None = None) -> Array:
    """b_i = second best of the group for its single best member, the own value for everybody else.

    Only a unique best try is reinforced, by its lead: max − second max. Pass@k training, arXiv:2503.19595.
    """
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    xp = namespace(value_M)
    low = zeros((), value_M, float("-inf"))
    top_M = _largest(value_M, index_M, weight_M)
    best_M = (value_M == top_M) & (weight_M > 0)
    ties_M = segment_sum(masked(weight_M, best_M), index_M)[index_M]
    rest_M = xp.where(best_M | (weight_M <= 0), low, value_M)
    second_M = segment_max(rest_M, index_M)[index_M]
    return xp.where(best_M & (ties_M < 1.5) & (second_M > low), second_M, value_M)


def entropic(value_M: Array, group_M: Array, weight_M: Array | None = None) -> Array:
    """A_i = e_i / mean of the others' e − 1, e = exp(βr): towards the best of the group.

    TTT-Discover, arXiv:2601.16175. The gradient of log E[exp(βr)], which grows from the mean to the maximum with β. It
    is each group's own: where the tries, weighted by e, are ln 2 away (KL) from all alike. A pair, which is never
    further away, stops half way.
    """
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    xp = namespace(value_M)
    one = zeros((), value_M, 1.0)
    below_M = masked(value_M - _largest(value_M, index_M, weight_M), weight_M > 0)
    count_M = _at_least_one(segment_sum(weight_M, index_M)[index_M])
    wanted_M = xp.where(count_M > 2.5, one * math.log(2.0), one * math.log(2.0) / 2)

    def share(beta_M: Array) -> tuple[Array, Array]:
        e_M = weight_M * xp.exp(clip(beta_M * below_M, -700.0, None))
        return e_M, segment_sum(e_M, index_M)[index_M]

    def too_little(beta_M: Array) -> Array:
        e_M, sum_M = share(beta_M)
        q_M = e_M / _at_least_one(sum_M)
        log_q_M = xp.log(xp.where(q_M > 0, q_M, one))
        return segment_sum(q_M * (log_q_M + xp.log(count_M)), index_M)[index_M] < wanted_M

    low_M, high_M = zeros(tuple(value_M.shape), value_M), zeros(tuple(value_M.shape), value_M, 1.0)
    for _ in range(20):
        high_M = xp.where(too_little(high_M), 2.0 * high_M, high_M)
    for _ in range(60):
        middle_M = 0.5 * (low_M + high_M)
        more_M = too_little(middle_M)
        low_M, high_M = xp.where(more_M, middle_M, low_M), xp.where(more_M, high_M, middle_M)
    e_M, sum_M = share(high_M)
    others_M = (sum_M - e_M) / xp.where(count_M > 1.5, count_M - 1.0, one)
    alone_M = (count_M < 1.5) | (others_M <= 0)
    return masked(masked(e_M / xp.where(alone_M, one, others_M) - 1.0, ~alone_M), weight_M > 0)


def optimal_token_baseline(return_NT: Array, energy_NT: Array, mask_NT: Array, group_N: Array) -> Array:
    """b_t = Σ G·W / Σ W over the group's decisions number t, W the energy spent up to there: the least variance.

    Optimal token baseline, arXiv:2602.07078. A tail that one trajectory alone reaches has nothing to be compared with:
    its baseline is 0.
    """
    expect_ndim(2, returns=return_NT)
    expect_shape(tuple(return_NT.shape), energy=energy_NT, mask=mask_NT)
    expect_shape((return_NT.shape[0],), group=group_N)
    xp, shape = namespace(return_NT), tuple(return_NT.shape)
    return_NT, index_N = masked(wide(return_NT), mask_NT), group_index(group_N)
    number_NT = clip(xp.cumsum(mask_NT * 1, axis=1) - 1, 0, None)  # holes (tool output) are no decisions
    place_M = (index_N[:, None] * shape[1] + number_NT).reshape(-1)

    def over(x_NT: Array) -> Array:
        return segment_sum(masked(x_NT, mask_NT).reshape(-1), place_M)[place_M].reshape(shape)

    spent_NT = masked(xp.cumsum(masked(astype(energy_NT, return_NT), mask_NT), axis=1), mask_NT)
    count_NT = over(zeros(shape, return_NT, 1.0))
    rough_NT = over(return_NT) / _at_least_one(count_NT)
    baseline_NT = rough_NT + over((return_NT - rough_NT) * spent_NT) / _at_least_one(over(spent_NT))
    return masked(baseline_NT, mask_NT & (count_NT > 1.5))


def role_means(
    rewards: Sequence[float], roles: Sequence[int], counted: Sequence[bool], begin: Mapping[int, float], decay: float
) -> tuple[list[float], dict[int, float]]:
    """b_i = running mean of what the role of i was given before i: b ← decay·b + (1 − decay)·r after each, 0 at first.

    Role-conditioned advantage estimation: SPIRAL, arXiv:2506.24119, in the order of its code: a try is compared before
    its own reward moves the mean. Gives each try's mean, and the means behind the last one.
    """
    mean_by_role = dict(begin)
    found = []
    for reward, role, counts in zip(rewards, roles, counted, strict=True):
        mean = mean_by_role.get(role, 0.0)
        found.append(mean)
        if counts:
            mean_by_role[role] = decay * mean + (1.0 - decay) * reward
    return found, mean_by_role


def soft_maximum(value_M: Array, group_M: Array, temperature: float, weight_M: Array | None = None) -> Array:
    """b_i = β·log mean exp(r/β) over the group of i: from its mean (large β) to its maximum (small β).

    Of tries of the reference this is the value of the best policy that pays β a nat to leave it: A*-PO,
    arXiv:2505.20686 (eq. 3).
    """
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    xp = namespace(value_M)
    top_M = _largest(value_M, index_M, weight_M)
    e_M = weight_M * xp.exp((value_M - top_M) / temperature * astype(weight_M > 0, value_M))
    count_M = _at_least_one(segment_sum(weight_M, index_M)[index_M])
    sum_M = segment_sum(e_M, index_M)[index_M]
    return top_M + temperature * xp.log(_at_least_one(sum_M) / count_M)


def decision_energy(logp_NT: Array, sum_sq_NT: Array) -> Array:
    """‖∇ log π(a)‖² on the logits = 1 − 2π(a) + Σ π²: how strongly one sampled decision pulls."""
    expect_shape(tuple(logp_NT.shape), sum_sq=sum_sq_NT)
    return 1.0 - 2.0 * namespace(logp_NT).exp(logp_NT) + sum_sq_NT


# --- the scale: what a difference is measured in --------------------------------------------------------------------


def group_std(value_M: Array, group_M: Array, weight_M: Array | None = None, ddof: float = 1.0) -> Array:
    """s_i = √(Σ (r − mean)² / (n − ddof)) over the group; 0 where n ≤ ddof. GRPO, arXiv:2402.03300."""
    mean_M = group_mean(value_M, group_M, weight_M)
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    square_M = segment_sum(weight_M * (value_M - mean_M) ** 2, index_M)[index_M]
    return _root_of_ratio(square_M, segment_sum(weight_M, index_M)[index_M] - ddof)


def batch_std(value_M: Array, weight_M: Array | None = None, ddof: float = 1.0) -> Array:
    """s = standard deviation over the whole batch, repeated M times. Lite PPO, arXiv:2508.08221."""
    return group_std(value_M, one_group(value_M), weight_M, ddof)


def divide(value: Array, scale: Array, eps: float) -> Array:
    """value / (scale + eps); 0 where both are 0 (a group without spread has no signal, not an infinite one)."""
    expect_shape(tuple(value.shape), scale=scale)
    xp = namespace(value)
    divisor = scale + eps
    return masked(value, divisor != 0) / xp.where(divisor != 0, divisor, zeros((), value, 1.0))


def expect_not_negative(value_M: Array, weight_M: Array) -> None:
    """Raise on a negative value: dividing by a mean needs rewards that say how good, not how bad."""
    xp = namespace(value_M)
    if not is_traced(value_M) and bool(xp.any((value_M < 0) & (weight_M > 0))):
        worst = float(xp.amin(masked(value_M, weight_M > 0)))
        raise ValueError(f"scale=group_mean needs rewards ≥ 0, got {worst:g}; shift them, or use scale=group_std")


def signal_share(signal_M: Array, like: Array) -> Array:
    """M / (number of entries with signal), repeated, in the dtype of `like`: makes up for entries without gradient.

    GPG, arXiv:2504.02546.
    """
    one_M = zeros(tuple(signal_M.shape), wide(like), 1.0)
    return one_M * signal_M.shape[0] / clip(namespace(one_M).sum(masked(one_M, signal_M != 0)), 1.0, None)


# --- credit: which decisions a reward belongs to --------------------------------------------------------------------


def combine_rewards(reward_parts_NK: Array, weight_K: Array) -> tuple[Array, Array]:
    """Weighted sum of several rewards, NaN = this reward has no opinion on the row; and which rows have any opinion."""
    expect_ndim(2, reward_parts=reward_parts_NK)
    expect_shape((reward_parts_NK.shape[1],), weight=weight_K)
    xp = namespace(reward_parts_NK)
    parts_NK = wide(reward_parts_NK)
    opinion_NK = ~xp.isnan(parts_NK)
    expect_finite(where=opinion_NK, reward_parts=parts_NK)
    total_N = xp.sum(masked(parts_NK, opinion_NK) * astype(weight_K, parts_NK), axis=1)
    return total_N, xp.any(opinion_NK, axis=1)


def episode_mean(value_N: Array, episode_N: Array, weight_N: Array) -> tuple[Array, Array]:
    """Each row's value becomes the mean over its episode's rows; and its weight 1/k, so that an episode counts once."""
    mean_N = group_mean(value_N, episode_N, weight_N)
    rows_N = group_count(episode_N, astype(weight_N > 0, mean_N))
    return mean_N, masked(1.0 / _at_least_one(rows_N), weight_N > 0)


def step_groups(group_N: Array, steps: int) -> Array:
    """Group ids (N, T) that compare decisions only with the same step of the same group."""
    index_N = group_index(group_N)
    return index_N[:, None] * steps + positions(steps, index_N)[None, :]


def reward_to_go(reward_NT: Array, mask_NT: Array, gamma: float = 1.0) -> Array:
    """G_t = r_t + γ·G_{t+1} over the decisions that count; other positions carry the next return unchanged.

    log₂ T doubling steps instead of T sequential ones, so it is fast eagerly and compiles to a small graph.
    """
    expect_ndim(2, reward=reward_NT)
    expect_shape(tuple(reward_NT.shape), mask=mask_NT)
    xp = namespace(reward_NT)
    total = masked(wide(reward_NT), mask_NT)
    one = zeros(total.shape, total, 1.0)
    decay = xp.where(mask_NT, one * gamma, one)
    stride = 1
    while stride < total.shape[1]:
        pad = zeros((total.shape[0], stride), total)
        total = total + decay * _join(xp, total[:, stride:], pad)
        decay = decay * _join(xp, decay[:, stride:], pad)
        stride *= 2
    return total


def turns(mask_NT: Array) -> tuple[Array, Array]:
    """Which decisions begin a turn, a run of decisions that nobody else interrupts; and every one's turn, by number."""
    expect_ndim(2, mask=mask_NT)
    rows, steps = (int(n) for n in mask_NT.shape)
    before_NT = _join(namespace(mask_NT), mask_NT[:, :1] & ~mask_NT[:, :1], mask_NT[:, :-1])
    first_NT = mask_NT & ~before_NT
    row_N = positions(rows, mask_NT)[:, None] * (steps + 1)
    return first_NT, namespace(mask_NT).cumsum(first_NT * 1, axis=1) + row_N


def to_turns(value_NT: Array, number_NT: Array) -> Array:
    """Sum of each turn, given to all its decisions."""
    number_M = group_index(number_NT.reshape(-1))
    return segment_sum(value_NT.reshape(-1), number_M)[number_M].reshape(tuple(value_NT.shape))


# --- whitening ------------------------------------------------------------------------------------------------------


def ridge_baselines(
    feature_MD: Array, target_M: Array, half_M: Array, ridges: Sequence[float], weight_M: Array | None = None
) -> Array:
    """What linear models of the features expect of each target, fitted on the *other* half: they never saw its own.

    min over w, c of Σ (y − z·w − c)² + λ·m·|w|² for each λ of `ridges`, where z are the features in deviations from
    their mean and m the entries that are fitted. (K, M), a row each. `half_M` is 0 or 1; a half with nothing to fit on
    is expected to give 0.
    """
    xp = namespace(target_M)
    expect_ndim(2, feature=feature_MD)
    expect_shape(tuple(target_M.shape), half=half_M, weight=weight_M)
    feature_MD, target_M = wide(feature_MD), wide(target_M)
    weight_M = zeros(target_M.shape, target_M, 1.0) if weight_M is None else astype(weight_M, target_M)
    share_M = weight_M / _at_least_one(weight_M.sum())
    centred_MD = feature_MD - share_M @ feature_MD
    deviation_D = xp.sqrt(share_M @ centred_MD**2)
    still_D = deviation_D <= 1e-8  # a feature that never moves says nothing
    z_MD = masked(centred_MD / xp.where(still_D, deviation_D * 0 + 1, deviation_D), ~still_D)
    z_MD = xp.concatenate([z_MD, zeros((len(target_M), 1), z_MD, 1.0)], axis=1)
    index_D = positions(z_MD.shape[1], z_MD)
    diagonal_DD = index_D[:, None] == index_D[None, :]
    constant_DD = diagonal_DD & (index_D == len(index_D) - 1)[:, None]  # it pays no penalty, but may have no data
    expected_KM = zeros((len(ridges), len(target_M)), target_M)
    for half in (0, 1):
        fitted_M = weight_M * astype(half_M != half, weight_M)
        weighted_MD = fitted_M[:, None] * z_MD
        gram_DD, moment_D1 = weighted_MD.T @ z_MD, (weighted_MD.T @ target_M)[:, None]
        slope_DD = astype(diagonal_DD & ~constant_DD, gram_DD) * _at_least_one(fitted_M.sum())
        least_DD = astype(diagonal_DD, gram_DD) * 1e-12
        gram_KDD = xp.stack([gram_DD + ridge * slope_DD + least_DD for ridge in ridges])
        weight_KD = xp.linalg.solve(gram_KDD, moment_D1)[..., 0]
        expected_KM = xp.where(half_M[None] == half, weight_KD @ z_MD.T, expected_KM)
    return expected_KM


def whiten(
    x_NT: Array, mask_NT: Array, weight_NT: Array | None = None, ddof: float = 1.0, eps: float = 1e-8, root: bool = True
) -> Array:
    """(x − mean) / √(var + eps) over all that counts; `root=False`: / (std + eps). REINFORCE++, arXiv:2501.03262.

    It spans rows and shifts every value: a group without signal gets −mean/std, not 0.
    """
    expect_shape(tuple(x_NT.shape), mask=mask_NT, weight=weight_NT)
    xp = namespace(x_NT)
    x_NT = masked(wide(x_NT), mask_NT)
    weight_NT = zeros(x_NT.shape, x_NT, 1.0) if weight_NT is None else astype(weight_NT, x_NT)
    weight_NT = masked(weight_NT, mask_NT)
    count = xp.sum(weight_NT)
    centred_NT = masked(x_NT - xp.sum(x_NT * weight_NT) / _at_least_one(count), mask_NT)
    centred_NT = masked(centred_NT - xp.sum(centred_NT * weight_NT) / _at_least_one(count), mask_NT)
    variance = xp.sum(weight_NT * centred_NT**2) / clip(count - ddof, 1.0, None)
    spread = xp.sqrt(variance + eps) if root else xp.sqrt(variance) + eps
    return divide(centred_NT, zeros(x_NT.shape, x_NT, 1.0) * spread, 0.0)


# --- pieces ---------------------------------------------------------------------------------------------------------


def _at_least_one(count: Array) -> Array:
    return namespace(count).where(count > 0, count, zeros((), count, 1.0))


def _root_of_ratio(square: Array, degrees: Array) -> Array:
    xp = namespace(square)
    enough = degrees > 0
    return masked(xp.sqrt(square / xp.where(enough, degrees, zeros((), square, 1.0))), enough)


def _join(xp: object, left: Array, right: Array) -> Array:
    return xp.concatenate([left, right], axis=1)  # type: ignore[attr-defined]
