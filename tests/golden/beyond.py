"""Formulas that other systems have and no recipe of ours reaches: here to reproduce their numbers, on any framework."""

from __future__ import annotations

from grpo.core.arrays import (
    Array,
    clip,
    expect_shape,
    masked,
    namespace,
    row_count,
    row_mean,
    row_sum,
    stop_gradient,
    wide,
    zeros,
)


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
