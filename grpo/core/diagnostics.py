"""What to watch while learning: fractions and distances, all additive over micro-batches (sums over global counts)."""

from __future__ import annotations

from grpo.core.arrays import Array, expect_shape, namespace, stop_gradient
from grpo.core.reductions import Denominators, token_mean


def clipped_low(ratio_NT: Array, advantage_NT: Array, low: float) -> Array:
    """Decisions held from below: r < 1 − low with A < 0."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    return (ratio_NT < 1.0 - low) & (advantage_NT < 0)


def clipped_high(ratio_NT: Array, advantage_NT: Array, high: float) -> Array:
    """Decisions held from above: r > 1 + high with A > 0."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    return (ratio_NT > 1.0 + high) & (advantage_NT > 0)


def share(flag_NT: Array, mask_NT: Array, over: Denominators) -> Array:
    """Fraction of the decisions that count for which the flag is set."""
    expect_shape(tuple(flag_NT.shape), mask=mask_NT)
    return namespace(flag_NT).sum(flag_NT & mask_NT) / over.tokens


def approx_kl(log_ratio_NT: Array, mask_NT: Array, over: Denominators) -> Array:
    """mean(log π_old − log π): how far the policy went from the one that sampled (k1)."""
    return token_mean(-stop_gradient(log_ratio_NT), mask_NT, over)
