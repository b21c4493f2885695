"""What is minimised for one decision, given its ratio and its advantage. Per-decision losses, never reduced."""

from __future__ import annotations

from grpo.core.arrays import (
    EXP_LIMIT,
    Array,
    astype,
    clip,
    expect_shape,
    masked,
    namespace,
    row_mean,
    row_sum,
    stop_gradient,
    zeros,
)

_LOG_TINY = -18.420680743952367
"""ln 1e-8, the smallest trajectory log-weight VESPO distinguishes."""


def clipped(ratio_NT: Array, advantage_NT: Array, low: float, high: float, delta: float | None = None) -> Array:
    """−min(r·A, clip(r, 1−low, 1+high)·A). PPO, arXiv:1707.06347; clip-higher, arXiv:2503.14476.

    `delta` also caps the unclipped ratio (two-sided clip, arXiv:2505.07291): it bounds the loss where A < 0.
    """
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    free_NT = clip(ratio_NT, None, delta) * advantage_NT
    return -namespace(ratio_NT).minimum(free_NT, clip(ratio_NT, 1.0 - low, 1.0 + high) * advantage_NT)


def dual_clipped(loss_NT: Array, advantage_NT: Array, bound: float) -> Array:
    """min(loss, c·|A|) where A < 0: a decision that became likely again cannot dominate. arXiv:1912.09729."""
    expect_shape(tuple(loss_NT.shape), advantage=advantage_NT)
    xp = namespace(loss_NT)
    return xp.where(advantage_NT < 0, xp.minimum(loss_NT, -advantage_NT * bound), loss_NT)


def unclipped(ratio_NT: Array, advantage_NT: Array) -> Array:
    """−r·A: the importance-weighted policy gradient without a trust region."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    return -ratio_NT * advantage_NT


def policy_gradient(logp_NT: Array, advantage_NT: Array) -> Array:
    """−A·log π. REINFORCE (Williams 1992); GPG, arXiv:2504.02546."""
    expect_shape(tuple(logp_NT.shape), advantage=advantage_NT)
    return -advantage_NT * logp_NT


def cispo(ratio_NT: Array, advantage_NT: Array, logp_NT: Array, floor: float | None, cap: float | None) -> Array:
    """−sg(clip(r, floor, cap))·A·log π: the weight is clipped, never the gradient. CISPO, arXiv:2506.13585 (eq. 4)."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT, logp=logp_NT)
    return -stop_gradient(clip(ratio_NT, floor, cap)) * advantage_NT * logp_NT


def sapo(ratio_NT: Array, advantage_NT: Array, tau_pos: float, tau_neg: float) -> Array:
    """−A·σ(τ(r−1))·4/τ with τ by the sign of A: a soft gate instead of a clip. SAPO, arXiv:2511.20347."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    xp = namespace(ratio_NT)
    tau_NT = xp.where(advantage_NT > 0, zeros((), ratio_NT, tau_pos), zeros((), ratio_NT, tau_neg))
    gate_NT = 1.0 / (1.0 + xp.exp(-clip(tau_NT * (ratio_NT - 1.0), -EXP_LIMIT, EXP_LIMIT * 4)))
    return -advantage_NT * gate_NT * 4.0 / tau_NT


def vespo(
    log_ratio_NT: Array,
    advantage_NT: Array,
    logp_NT: Array,
    mask_NT: Array,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
    log_weight_NT: Array | None = None,
) -> Array:
    """−sg(W^k·exp(λ(1−W)))·A·log π, W the product of a row's ratios; k, λ by the sign of A. VESPO, arXiv:2602.10693.

    `log_weight_NT`: log of the sampler-mismatch weight of each decision; VESPO takes it into W.
    """
    expect_shape(
        tuple(log_ratio_NT.shape), advantage=advantage_NT, logp=logp_NT, mask=mask_NT, log_weight=log_weight_NT
    )
    xp = namespace(log_ratio_NT)
    log_w_N1 = row_sum(clip(log_ratio_NT, -EXP_LIMIT, EXP_LIMIT), mask_NT)
    if log_weight_NT is not None:
        log_w_N1 = log_w_N1 + row_sum(clip(log_weight_NT, _LOG_TINY, EXP_LIMIT), mask_NT)
    log_w_N1 = clip(stop_gradient(log_w_N1), _LOG_TINY, EXP_LIMIT)
    positive_NT = advantage_NT >= 0
    k_NT = xp.where(positive_NT, zeros((), log_w_N1, k_pos), zeros((), log_w_N1, k_neg))
    lam_NT = xp.where(positive_NT, zeros((), log_w_N1, lambda_pos), zeros((), log_w_N1, lambda_neg))
    return -xp.exp(lam_NT + k_NT * log_w_N1 - lam_NT * xp.exp(log_w_N1)) * advantage_NT * logp_NT


def dppo(ratio_NT: Array, advantage_NT: Array, logp_NT: Array, inside_NT: Array, cap: float | None) -> Array:
    """−sg(min(r, cap))·A·log π inside the trust region, 0 outside. DPPO, arXiv:2602.04879.

    `inside_NT` comes from `gates.inside_total_variation` or `gates.inside_binary_kl`.
    """
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT, logp=logp_NT, inside=inside_NT)
    return masked(cispo(ratio_NT, advantage_NT, logp_NT, None, cap), inside_NT)


def dro(log_ratio_NT: Array, advantage_NT: Array, logp_NT: Array, beta: float) -> Array:
    """−(A·log π − β/2·(log π − log π_old)²): policy gradient with a quadratic leash. DRO, arXiv:2405.19107."""
    expect_shape(tuple(log_ratio_NT.shape), advantage=advantage_NT, logp=logp_NT)
    return -(logp_NT * advantage_NT - 0.5 * beta * log_ratio_NT**2)


def geometric(
    log_ratio_NT: Array, advantage_NT: Array, mask_NT: Array, low: float, high: float, chosen_NT: Array | None = None
) -> Array:
    """−A·exp(mean_t of the clipped d_t), the same for every decision of the row. GMPO, arXiv:2507.20673 (eq. 4).

    d is clipped to [−low, high] in log space, on the side the advantage pushes to. `chosen_NT`: only these decisions
    enter the mean (entropy gate). A is the row's mean advantage.
    """
    expect_shape(tuple(log_ratio_NT.shape), advantage=advantage_NT, mask=mask_NT, chosen=chosen_NT)
    xp = namespace(log_ratio_NT)
    inside_NT = clip(log_ratio_NT, -low, high)
    held_NT = xp.where(advantage_NT > 0, xp.minimum(log_ratio_NT, inside_NT), xp.maximum(log_ratio_NT, inside_NT))
    mean_N1 = row_mean(held_NT, mask_NT if chosen_NT is None else mask_NT & chosen_NT)
    loss_N1 = -row_mean(advantage_NT, mask_NT) * xp.exp(mean_N1)
    return loss_N1 * astype(mask_NT, loss_N1)
