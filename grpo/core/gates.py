"""Which decisions may teach, and how much: masks and weights, computed without gradient before a minibatch is split."""

from __future__ import annotations

from grpo.core.advantages import entries, tied_with_best
from grpo.core.arrays import (
    EXP_LIMIT,
    Array,
    astype,
    clip,
    expect_shape,
    group_index,
    machine_epsilon,
    masked,
    namespace,
    row_mean,
    row_sum,
    segment_sum,
    stable_order,
    stop_gradient,
    wide,
    zeros,
)
from grpo.core.surrogates import clipped, unclipped


def alive(done_NT: Array) -> Array:
    """Decisions up to and including the first that ended the episode: no `done` before them."""
    xp = namespace(done_NT)
    ended_NT = xp.cumsum(done_NT * 1, axis=1) - done_NT * 1
    return ended_NT == 0


def has_signal(reward_N: Array, group_N: Array, weight_N: Array | None = None, size_N: Array | None = None) -> Array:
    """Rows whose group has two different rewards; the others have advantage 0. DAPO, arXiv:2503.14476 (eq. 11)."""
    value_N, index_N, weight_N = entries(reward_N, group_N, weight_N)
    tied_N, _ = tied_with_best(value_N, index_N, weight_N, size_N)
    return (segment_sum(masked(weight_N, ~tied_N), index_N)[index_N] > 0) & (weight_N > 0)


def left_alone(weight_N: Array, group_N: Array) -> Array:
    """Rows of groups that lost members (weight 0) and have fewer than two left: there is nothing to compare with."""
    index_N = group_index(group_N)
    lost_N = segment_sum(astype(weight_N <= 0, weight_N), index_N)[index_N] > 0
    return lost_N & (segment_sum(weight_N, index_N)[index_N] < 1.5)  # weights of an episode's rows add up to 1


def top_entropy(entropy_NT: Array, mask_NT: Array, share: float) -> Array:
    """The `share` of decisions with the highest entropy, over the whole minibatch. "80/20", arXiv:2506.01939.

    Keeps H ≥ the linearly interpolated (1 − share) quantile of the decisions that count.
    """
    expect_shape(tuple(entropy_NT.shape), mask=mask_NT)
    xp = namespace(entropy_NT)
    entropy_NT = stop_gradient(wide(entropy_NT))
    high = zeros((), entropy_NT, float("inf"))
    flat_M = xp.where(mask_NT, entropy_NT, high).reshape(-1)
    order_M = xp.sort(flat_M)[0] if xp.__name__ == "torch" else xp.sort(flat_M)
    order_M = masked(order_M, order_M < high)
    place = clip(xp.sum(astype(mask_NT, entropy_NT)) - 1.0, 0.0, None) * (1.0 - share)
    whole = xp.round(place)  # 25 · 0.6 is 15, also where rounding makes it 15.000001
    place = xp.where(xp.abs(place - whole) <= 4.0 * machine_epsilon(place) * (1.0 + whole), whole, place)
    below = xp.floor(place)
    last = flat_M.shape[0] - 1
    low_value = order_M[clip(_integer(below), 0, last)]
    high_value = order_M[clip(_integer(xp.ceil(place)), 0, last)]
    part = place - below
    threshold = xp.where(part > 0, low_value + (high_value - low_value) * part, low_value)
    return mask_NT & (entropy_NT >= threshold)


def on_policy_enough(
    logp_NT: Array, sampled_logp_NT: Array, advantage_NT: Array, mask_NT: Array, threshold: float
) -> Array:
    """Drops a row's negative advantages once mean(log μ − log π) passes it. DeepSeek-V3.2, arXiv:2512.02556."""
    expect_shape(tuple(logp_NT.shape), sampled_logp=sampled_logp_NT, advantage=advantage_NT, mask=mask_NT)
    gap_NT = _known(wide(sampled_logp_NT) - stop_gradient(wide(logp_NT)), mask_NT)
    drift_N1 = row_mean(gap_NT, mask_NT)
    return (advantage_NT >= 0) | (drift_N1 <= threshold)


def second_moment(log_ratio_NT: Array, mask_NT: Array, limit: float) -> Array:
    """The most decisions whose mean of (log π/π_old)² is below `limit`: the farthest ones go. M2PO, arXiv:2510.01161.

    At least one stays.
    """
    expect_shape(tuple(log_ratio_NT.shape), mask=mask_NT)
    xp = namespace(log_ratio_NT)
    size_NT = stop_gradient(wide(log_ratio_NT)) ** 2
    flat_M = xp.where(mask_NT, size_NT, zeros((), size_NT, float("inf"))).reshape(-1)
    order_M = stable_order(flat_M)
    sorted_M = flat_M[order_M]
    known_M = sorted_M < float("inf")
    count_M = xp.cumsum(astype(known_M, sorted_M), axis=0)
    mean_M = xp.cumsum(masked(sorted_M, known_M), axis=0) / clip(count_M, 1.0, None)
    kept = clip(xp.sum(astype(known_M & (mean_M < limit), sorted_M)), 1.0, None)
    return mask_NT & (stable_order(order_M) < kept).reshape(mask_NT.shape)


# --- covariance: decisions that alone drive the entropy down. arXiv:2505.22617 -------------------------------------


def covariance(logp_NT: Array, advantage_NT: Array, mask_NT: Array) -> Array:
    """(A − mean A)·(log π − mean log π), means over the minibatch's decisions. arXiv:2505.22617 (eq. 9)."""
    expect_shape(tuple(logp_NT.shape), advantage=advantage_NT, mask=mask_NT)
    logp_NT = masked(stop_gradient(wide(logp_NT)), mask_NT)
    advantage_NT = masked(wide(advantage_NT), mask_NT)
    return (advantage_NT - _mean(advantage_NT, mask_NT)) * (logp_NT - _mean(logp_NT, mask_NT))


def clip_cov(
    ratio_NT: Array,
    advantage_NT: Array,
    covariance_NT: Array,
    mask_NT: Array,
    clip_low: float,
    clip_high: float,
    share: float,
    low: float,
    high: float,
    priority_NT: Array,
) -> Array:
    """False for up to `share` of the decisions, drawn among unclipped ones with low < covariance < high.

    `priority_NT` is a random number a decision (smallest are taken): randomness stays with the caller.
    Clip-Cov, arXiv:2505.22617.
    """
    expect_shape(
        tuple(ratio_NT.shape), advantage=advantage_NT, covariance=covariance_NT, mask=mask_NT, priority=priority_NT
    )
    xp = namespace(ratio_NT)
    ratio_NT = stop_gradient(ratio_NT)
    active_NT = clipped(ratio_NT, advantage_NT, clip_low, clip_high) > unclipped(ratio_NT, advantage_NT)
    candidate_NT = mask_NT & ~active_NT & (covariance_NT > low) & (covariance_NT < high)
    budget = clip(xp.floor(share * xp.sum(wide(mask_NT))), 1.0, None)
    return ~(candidate_NT & (_place(-priority_NT, candidate_NT) <= budget))


def kl_cov(covariance_NT: Array, mask_NT: Array, share: float) -> Array:
    """True for the `share` of decisions with the largest covariance, at least one; ties that do not fit are left out.

    KL-Cov, arXiv:2505.22617.
    """
    expect_shape(tuple(covariance_NT.shape), mask=mask_NT)
    xp = namespace(covariance_NT)
    budget = clip(xp.floor(share * xp.sum(wide(mask_NT))), 1.0, None)
    return mask_NT & (_place(covariance_NT, mask_NT) <= budget)


# --- sampler mismatch: the engine that sampled is not the model that learns -----------------------------------------


def mismatch_log_ratio(old_logp_NT: Array, sampled_logp_NT: Array, mask_NT: Array) -> Array:
    """log π_old − log μ, 0 where it does not count or the engine gave no number (NaN); limited."""
    expect_shape(tuple(old_logp_NT.shape), sampled_logp=sampled_logp_NT, mask=mask_NT)
    gap_NT = _known(stop_gradient(wide(old_logp_NT)) - wide(sampled_logp_NT), mask_NT)
    return clip(gap_NT, -EXP_LIMIT, EXP_LIMIT)


def mismatch_weight(
    gap_NT: Array, mask_NT: Array, level: str, mode: str, low: float | None, high: float | None
) -> Array:
    """exp(gap) per decision (`level="token"`) or of the row's sum ("sequence"), limited to [low, high].

    `mode="truncate"` cuts the weight (TIS, arXiv:1606.02647), "mask" sets it to 0 outside (IcePop, arXiv:2510.18855).
    """
    expect_shape(tuple(gap_NT.shape), mask=mask_NT)
    xp = namespace(gap_NT)
    if level == "sequence":
        gap_NT = clip(row_sum(gap_NT, mask_NT), -EXP_LIMIT, EXP_LIMIT) * zeros(gap_NT.shape, gap_NT, 1.0)
    weight_NT = xp.exp(gap_NT)
    if mode == "truncate":
        return clip(weight_NT, low, high)
    return masked(weight_NT, _within(weight_NT, low, high))


# --- pieces ---------------------------------------------------------------------------------------------------------


def _known(gap_NT: Array, mask_NT: Array) -> Array:
    return masked(gap_NT, mask_NT & ~namespace(gap_NT).isnan(gap_NT))


def _within(x: Array, low: float | None, high: float | None) -> Array:
    inside = x == x
    if low is not None:
        inside = inside & (x >= low)
    if high is not None:
        inside = inside & (x <= high)
    return inside


def _mean(x_NT: Array, mask_NT: Array) -> Array:
    xp = namespace(x_NT)
    return xp.sum(masked(x_NT, mask_NT)) / clip(xp.sum(wide(mask_NT)), 1.0, None)


def _place(x_NT: Array, mask_NT: Array) -> Array:
    """How many of the decisions that count are at least as large: 1 for the largest; ties share the worst place.

    So a choice of the k largest does not depend on the order of rows: ties that do not all fit are all left out.
    """
    xp = namespace(x_NT)
    flat_M = xp.where(mask_NT, x_NT, zeros((), x_NT, float("-inf"))).reshape(-1)
    order_M = xp.sort(flat_M)[0] if xp.__name__ == "torch" else xp.sort(flat_M)
    return (flat_M.shape[0] - xp.searchsorted(order_M, flat_M, side="left")).reshape(x_NT.shape)


def _integer(x: Array) -> Array:
    return x.long() if namespace(x).__name__ == "torch" else x.astype(int)
