"""A teacher says how likely each decision would have been to it: divergences to it, and what a decision gains by it.

π is the policy that learns, and sampled; τ the teacher; u = τ/π; β the teacher's share in the mixture m = βτ + (1−β)π:

    reverse   KL(π‖τ)                      π leaves what the teacher would not do
    forward   KL(τ‖π)                      π takes up everything the teacher might do
    js        β·KL(τ‖m) + (1−β)·KL(π‖m)    in between: GKD, arXiv:2306.13649 (eq. 1)

`divergence` is exact, over all choices of a decision or over K of them and the rest as one more (`with_tail`). From the
decision that was sampled alone, each is E_π[f(u)] for an f with f(1) = 0, and its gradient E_π[(f − u·f′)·∇log π]:
that is what `sampled` has for value and for gradient. Where π = τ all are exactly 0, with no gradient.
"""

from __future__ import annotations

from grpo.core.advantages import reward_to_go
from grpo.core.arrays import (
    EXP_LIMIT,
    Array,
    clip,
    expect_shape,
    log_sum_exp,
    masked,
    namespace,
    row_sum,
    stop_gradient,
    wide,
    with_gradient_of,
    zeros,
)
from grpo.core.kl import exact

KINDS = ("reverse", "forward", "js")
_NO_TAIL = -1e-7
"""Largest log of the K choices' probability: beyond it there is no rest that float32 could tell from rounding."""


def divergence(logp_NTV: Array, teacher_logp_NTV: Array, kind: str, mix: float = 0.5) -> Array:
    """The divergence of each decision over its V choices; no gradient goes to the teacher."""
    expect_shape(tuple(logp_NTV.shape), teacher_logp=teacher_logp_NTV)
    logp_NTV, teacher_NTV = wide(logp_NTV), stop_gradient(wide(teacher_logp_NTV))
    if kind == "reverse":
        return exact(logp_NTV, teacher_NTV)
    if kind == "forward":
        return exact(teacher_NTV, logp_NTV)
    xp = namespace(logp_NTV)
    weights = [zeros((), logp_NTV, share) for share in (1.0 - mix, mix)]
    parts = [part + xp.log(share) for part, share in zip((logp_NTV, teacher_NTV), weights, strict=True)]
    mixed_NTV = log_sum_exp(xp.stack(parts, -1))[..., 0]
    return mix * exact(teacher_NTV, mixed_NTV) + (1.0 - mix) * exact(logp_NTV, mixed_NTV)


def with_tail(logp_NTK: Array) -> Array:
    """Log-probs of K choices and, behind them, of all others together: log(1 − Σ_k p_k)."""
    xp = namespace(logp_NTK)
    logp_NTK = wide(logp_NTK)
    tail_NT1 = xp.log(-xp.expm1(clip(log_sum_exp(logp_NTK), None, _NO_TAIL)))
    return xp.concatenate([logp_NTK, tail_NT1], axis=-1)


def sampled(logp_NT: Array, teacher_logp_NT: Array, kind: str, mix: float = 0.5) -> Array:
    """The same from the sampled decision alone: unbiased in value and, on-policy, in gradient."""
    gap_NT = _gap(logp_NT, teacher_logp_NT)
    xp = namespace(gap_NT)
    log_u_NT = clip(-stop_gradient(gap_NT), -EXP_LIMIT, EXP_LIMIT)
    u_NT = xp.exp(log_u_NT)
    if kind == "reverse":
        value_NT = pull_NT = stop_gradient(gap_NT)
    elif kind == "forward":
        value_NT, pull_NT = u_NT * log_u_NT - (u_NT - 1.0), 1.0 - u_NT
    else:
        log_w_NT = xp.log((1.0 - mix) + mix * u_NT)
        pull_NT = -(1.0 - mix) * log_w_NT
        value_NT = pull_NT + mix * u_NT * (log_u_NT - log_w_NT)
    return with_gradient_of(value_NT, pull_NT * wide(logp_NT))


def advantage(logp_NT: Array, teacher_logp_NT: Array, mask_NT: Array, gamma: float = 0.0, drift: float = 0.0) -> Array:
    """log τ − log π: what a decision gains by being the teacher's, for a policy gradient on KL(π‖τ).

    `gamma` adds the discounted gains of the decisions that follow. `drift`: decisions behind others that were the
    teacher's count more, each 1 + drift·(1 − Σ_before |gain| / Σ_all |gain|): IW-OPD, arXiv:2606.22600 (algorithm 1).
    """
    expect_shape(tuple(logp_NT.shape), mask=mask_NT)
    gain_NT = masked(-stop_gradient(_gap(logp_NT, teacher_logp_NT)), mask_NT)
    if drift:
        gain_NT = gain_NT * _trust(gain_NT, mask_NT, drift)
    return masked(reward_to_go(gain_NT, mask_NT, gamma), mask_NT) if gamma else gain_NT


def _trust(gain_NT: Array, mask_NT: Array, drift: float) -> Array:
    xp = namespace(gain_NT)
    size_NT = xp.abs(gain_NT)
    before_NT = xp.cumsum(size_NT, axis=1) - size_NT
    return 1.0 + drift * (1.0 - before_NT / clip(row_sum(size_NT, mask_NT), 1e-8, None))


def _gap(logp_NT: Array, teacher_logp_NT: Array) -> Array:
    """log π − log τ; no gradient goes to the teacher."""
    expect_shape(tuple(logp_NT.shape), teacher_logp=teacher_logp_NT)
    return wide(logp_NT) - stop_gradient(wide(teacher_logp_NT))
