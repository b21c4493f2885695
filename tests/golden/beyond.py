"""Formulas that other systems have and no recipe of ours reaches: here to reproduce their numbers, on any framework."""

from __future__ import annotations

from grpo.core.arrays import (
    Array,
    astype,
    clip,
    expect_shape,
    group_index,
    masked,
    namespace,
    positions,
    row_count,
    row_mean,
    row_sum,
    segment_sum,
    stop_gradient,
    wide,
    zeros,
)


def optimal_token_baseline(
    return_NT: Array, mask_NT: Array, group_N: Array, energy_NT: Array, eps: float = 1e-8
) -> Array:
    """b_t = Σ_group G_t·W_t / Σ_group W_t with W_t the energy ‖∇ log π‖² spent so far: the variance-optimal baseline.

    A tail that only one trajectory of the group reaches has nothing to be compared with: its baseline is 0.
    """
    expect_shape(tuple(return_NT.shape), mask=mask_NT, energy=energy_NT)
    expect_shape((return_NT.shape[0],), group=group_N)
    xp = namespace(return_NT)
    return_NT = masked(wide(return_NT), mask_NT)
    steps = return_NT.shape[1]
    index_N = group_index(group_N)
    weight_NT = masked(xp.cumsum(masked(energy_NT, mask_NT), axis=1), mask_NT)
    above_NT = _by_step(return_NT * weight_NT, index_N)
    below_NT = _by_step(weight_NT, index_N)
    alive_NT = positions(steps, index_N)[None, :] < _length(mask_NT)
    company_NT = _by_step(astype(alive_NT, return_NT), index_N)
    return masked(above_NT / (below_NT + eps), mask_NT & (company_NT > 1.5))


def decision_energy(old_logp_NT: Array, sum_sq_NT: Array) -> Array:
    """‖∇_logits log π(a)‖² = 1 − 2π(a) + Σ_v π(v)²: how strongly one sampled decision pulls."""
    expect_shape(tuple(old_logp_NT.shape), sum_sq=sum_sq_NT)
    return 1.0 - 2.0 * namespace(old_logp_NT).exp(old_logp_NT) + sum_sq_NT


def dual_clip_binds(ratio_NT: Array, advantage_NT: Array, bound: float) -> Array:
    """Decisions held by the dual clip: A < 0 and a ratio above its bound."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    return (ratio_NT > bound) & (advantage_NT < 0)


def row_share(flag_NT: Array, mask_NT: Array) -> Array:
    """The same fraction row by row, as (N, 1)."""
    return row_mean(wide(flag_NT), mask_NT)


def ratio_too_large(ratio_NT: Array, mask_NT: Array, limit: float) -> Array:
    """Whether the minibatch's mean ratio is above the limit, or not a number: its update is to be skipped whole."""
    mean = _mean(stop_gradient(wide(ratio_NT)), mask_NT)
    return ~(mean <= limit)


def mean_one(weight_NT: Array, mask_NT: Array, level: str) -> Array:
    """Weights divided by their mean over decisions, or over the rows that have any (`level="sequence"`)."""
    xp = namespace(weight_NT)
    if level == "sequence":
        row_N1 = row_mean(weight_NT, mask_NT)
        any_N1 = row_count(mask_NT, weight_NT) > 0
        mean = xp.sum(row_N1) / clip(xp.sum(wide(any_N1)), 1.0, None)
    else:
        mean = _mean(weight_NT, mask_NT)
    return weight_NT / xp.where(mean > 0, mean, zeros((), weight_NT, 1.0))


def mismatch_keep(
    gap_NT: Array, mask_NT: Array, estimator: str, level: str, low: float | None, high: float | None
) -> Array:
    """Decisions (or whole rows) whose sampler mismatch is within bounds; the rest leaves the mask.

    Estimators of KL(μ‖π): k1 = −gap (bounds in log space), k2 = gap²/2, k3 = e^gap − 1 − gap. Levels: token,
    sequence_sum, sequence_mean, sequence_max.
    """
    expect_shape(tuple(gap_NT.shape), mask=mask_NT)
    xp = namespace(gap_NT)
    value_NT = {"k1": -gap_NT, "k2": 0.5 * gap_NT**2, "k3": xp.exp(gap_NT) - 1.0 - gap_NT}[estimator]
    if level == "token":
        return _within(value_NT, low, high)
    bottom = zeros((), value_NT, float("-inf"))
    value_N1 = {
        "sequence_sum": lambda: row_sum(value_NT, mask_NT),
        "sequence_mean": lambda: row_mean(value_NT, mask_NT),
        "sequence_max": lambda: xp.amax(xp.where(mask_NT, value_NT, bottom), axis=1, keepdims=True),
    }[level]()
    return _within(value_N1, low, high) & (mask_NT | ~mask_NT)


def squeeze_holes(x_NT: Array, mask_NT: Array) -> Array:
    """Decisions that count moved to the front of their row in order, the rest behind them (tool output, padding)."""
    return _take(x_NT, _front_first(mask_NT))


def spread_holes(x_NT: Array, mask_NT: Array) -> Array:
    """The inverse of `squeeze_holes` for the same mask."""
    xp = namespace(x_NT)
    return _take(x_NT, xp.argsort(_front_first(mask_NT), axis=1))


def _by_step(x_NT: Array, index_N: Array) -> Array:
    """Sum over the members of the group at each step, given back to every member."""
    steps = x_NT.shape[1]
    flat_M = index_N[:, None] * steps + positions(steps, index_N)[None, :]
    flat_M = flat_M.reshape(-1)
    return segment_sum(x_NT.reshape(-1), flat_M)[flat_M].reshape(x_NT.shape)


def _length(mask_NT: Array) -> Array:
    """Last decision that counts plus one, as (N, 1)."""
    xp = namespace(mask_NT)
    step_T = positions(mask_NT.shape[1], mask_NT) + 1
    ends_NT = xp.where(mask_NT, step_T[None, :], step_T[None, :] * 0)
    return xp.amax(ends_NT, axis=1, keepdims=True)


def _front_first(mask_NT: Array) -> Array:
    xp = namespace(mask_NT)
    steps = mask_NT.shape[1]
    order_NT = xp.cumsum(mask_NT * 0 + 1, axis=1)
    return xp.argsort(xp.where(mask_NT, order_NT, order_NT + steps), axis=1)


def _take(x_NT: Array, index_NT: Array) -> Array:
    xp = namespace(x_NT)
    return xp.take_along_dim(x_NT, index_NT, 1) if xp.__name__ == "torch" else xp.take_along_axis(x_NT, index_NT, 1)


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
