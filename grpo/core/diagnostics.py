"""What to watch while learning: fractions and distances, all additive over micro-batches (sums over global counts)."""

from __future__ import annotations

from grpo.core.arrays import Array, expect_shape, masked, namespace, row_mean, stop_gradient, wide
from grpo.core.reductions import Denominators, token_mean


def clipped_low(ratio_NT: Array, advantage_NT: Array, low: float) -> Array:
    """Decisions held from below: r < 1 − low with A < 0."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    return (ratio_NT < 1.0 - low) & (advantage_NT < 0)


def clipped_high(ratio_NT: Array, advantage_NT: Array, high: float) -> Array:
    """Decisions held from above: r > 1 + high with A > 0."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    return (ratio_NT > 1.0 + high) & (advantage_NT > 0)


def dual_clip_binds(ratio_NT: Array, advantage_NT: Array, bound: float) -> Array:
    """Decisions held by the dual clip: A < 0 and a ratio above its bound."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    return (ratio_NT > bound) & (advantage_NT < 0)


def share(flag_NT: Array, mask_NT: Array, over: Denominators) -> Array:
    """Fraction of the decisions that count for which the flag is set."""
    expect_shape(tuple(flag_NT.shape), mask=mask_NT)
    return namespace(flag_NT).sum(flag_NT & mask_NT) / over.tokens


def row_share(flag_NT: Array, mask_NT: Array) -> Array:
    """The same fraction row by row, as (N, 1)."""
    return row_mean(wide(flag_NT), mask_NT)


def approx_kl(log_ratio_NT: Array, mask_NT: Array, over: Denominators) -> Array:
    """mean(log π_old − log π): how far the policy went from the one that sampled (k1)."""
    return token_mean(-stop_gradient(log_ratio_NT), mask_NT, over)


def effective_share(weight_NT: Array, mask_NT: Array) -> Array:
    """(Σ w)² / (n Σ w²): effective sample size of the weights as a fraction of n; 1 when all are equal."""
    xp = namespace(weight_NT)
    weight_NT = masked(wide(weight_NT), mask_NT)
    spread = xp.sum(wide(mask_NT)) * xp.sum(weight_NT**2)
    return xp.sum(weight_NT) ** 2 / xp.where(spread > 0, spread, spread * 0 + 1)
