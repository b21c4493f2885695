"""How much more likely is each decision now than when it was sampled.

Everything starts from a log-ratio that is exactly 0 where the mask is unset; ratios come back per decision.
"""

from __future__ import annotations

from grpo.core.arrays import (
    EXP_LIMIT,
    Array,
    clip,
    expect_ndim,
    expect_shape,
    masked,
    namespace,
    row_mean,
    stop_gradient,
    wide,
    with_gradient_of,
    zeros,
)


def log_ratio(
    logp_NT: Array,
    old_logp_NT: Array | None,
    mask_NT: Array,
    low: float | None = -EXP_LIMIT,
    high: float | None = EXP_LIMIT,
) -> Array:
    """d = log π − log π_old, limited so that its exponential is finite; `old_logp_NT=None`: π_old = π, detached."""
    expect_ndim(2, logp=logp_NT)
    expect_shape(tuple(logp_NT.shape), old_logp=old_logp_NT, mask=mask_NT)
    logp_NT = masked(wide(logp_NT), mask_NT)
    old_NT = stop_gradient(logp_NT if old_logp_NT is None else masked(wide(old_logp_NT), mask_NT))
    return clip(logp_NT - old_NT, low, high)


def token_ratio(log_ratio_NT: Array) -> Array:
    """r_t = exp(d_t), one ratio a decision. PPO, arXiv:1707.06347."""
    return namespace(log_ratio_NT).exp(log_ratio_NT)


def sequence_ratio(log_ratio_NT: Array, mask_NT: Array) -> Array:
    """s = exp(mean_t d_t), the same for every decision of the row; the gradient goes through the mean.

    Each decision gets 1/length of the row's gradient. GSPO, arXiv:2507.18071 (eq. 7).
    """
    expect_shape(tuple(log_ratio_NT.shape), mask=mask_NT)
    mean_N1 = row_mean(log_ratio_NT, mask_NT)
    return namespace(mean_N1).exp(mean_N1) * zeros(log_ratio_NT.shape, log_ratio_NT, 1.0)


def sequence_token_ratio(log_ratio_NT: Array, mask_NT: Array, high: float | None = 10.0) -> Array:
    """The value of `sequence_ratio`, but each decision keeps its own full gradient (straight-through).

    GSPO-token, arXiv:2507.18071 (eq. 14).
    """
    expect_shape(tuple(log_ratio_NT.shape), mask=mask_NT)
    mean_NT = row_mean(log_ratio_NT, mask_NT) * zeros(log_ratio_NT.shape, log_ratio_NT, 1.0)
    return namespace(mean_NT).exp(clip(with_gradient_of(mean_NT, log_ratio_NT), None, high))


def fold(x_NT: Array, mask_NT: Array, size: int) -> Array:
    """Sum over chunks of `size` consecutive decisions, (N, ⌈T/size⌉): the log-probability of a chunk is such a sum.

    `size = T` makes the whole trajectory one decision (RLOO's product of ratios, arXiv:2402.14740).
    """
    expect_shape(tuple(x_NT.shape), mask=mask_NT)
    xp = namespace(x_NT)
    rows, steps = x_NT.shape
    chunks = -(-steps // size)
    filled = xp.concatenate([masked(x_NT, mask_NT), zeros((rows, chunks * size - steps), x_NT)], axis=1)
    return xp.sum(filled.reshape(rows, chunks, size), axis=2)


def fold_mask(mask_NT: Array, size: int) -> Array:
    """A chunk counts if any of its decisions counts."""
    one_NT = wide(mask_NT) * 0 + 1
    return fold(one_NT, mask_NT, size) > 0


def fold_mean(x_NT: Array, mask_NT: Array, size: int) -> Array:
    """Mean over the decisions that count in each chunk; 0 for a chunk without any."""
    count = fold(zeros(x_NT.shape, x_NT, 1.0), mask_NT, size)
    return fold(x_NT, mask_NT, size) / clip(count, 1.0, None)


def log_weight(weight_NT: Array) -> Array:
    """The logarithm of a weight ≥ 0; of 0 that of 1e-10."""
    return namespace(weight_NT).log(clip(weight_NT, 1e-10, None))
