"""Distance to another policy, and entropy: values, gradients, and estimators that do not confuse the two.

`logp` belongs to the policy that sampled, `ref_logp` to the other one. With x ~ π, k1 and k3 are unbiased for
KL(π‖ref); what an estimator's *gradient* optimises is another matter (docs/kl.md): on-policy k1's expected gradient is
zero, k2's is that of KL(π‖ref), k3's is that of KL(ref‖π).
"""

from __future__ import annotations

from grpo.core import arrays
from grpo.core.arrays import EXP_LIMIT, Array, clip, expect_shape, masked, namespace, wide, with_gradient_of

_TANGENT = 10.0
"""log u from which k3 is continued as its tangent: a ref/π of e^10 = 22,026."""


def _gap(logp_NT: Array, ref_logp_NT: Array) -> Array:
    """log π − log ref, at least float32."""
    expect_shape(tuple(logp_NT.shape), ref_logp=ref_logp_NT)
    return wide(logp_NT) - wide(ref_logp_NT)


def k1(logp_NT: Array, ref_logp_NT: Array) -> Array:
    """log π − log ref: unbiased, can be negative. Schulman 2020, "Approximating KL divergence"."""
    return _gap(logp_NT, ref_logp_NT)


def k2(logp_NT: Array, ref_logp_NT: Array) -> Array:
    """½(log π − log ref)²: biased value, right gradient. Schulman 2020."""
    return 0.5 * _gap(logp_NT, ref_logp_NT) ** 2


def k3(logp_NT: Array, ref_logp_NT: Array, cap: float | None = None) -> Array:
    """u − log u − 1 with u = ref/π: unbiased and never negative. Schulman 2020; GRPO, arXiv:2402.03300 (eq. 4).

    Beyond log u = 10 the exponential goes on as its tangent: value and gradient stay finite, also in half precision,
    and it still pulls back.
    `cap` cuts the value there with zero gradient, as verl and RLinf do at 10.
    """
    log_u_NT = -_gap(logp_NT, ref_logp_NT)
    xp = namespace(log_u_NT)
    inside_NT = clip(log_u_NT, None, _TANGENT)
    beyond_NT = xp.exp(inside_NT) * (log_u_NT - inside_NT)
    return clip(xp.expm1(inside_NT) - log_u_NT + beyond_NT, None, cap)  # expm1 keeps the digits near 0


def absolute(logp_NT: Array, ref_logp_NT: Array) -> Array:
    """|log π − log ref|: not a KL; its expected on-policy gradient is that of the total variation (times two)."""
    return arrays.absolute(_gap(logp_NT, ref_logp_NT))


def forward(logp_NT: Array, ref_logp_NT: Array) -> Array:
    """u·log u − (u − 1) with u = ref/π: KL(ref‖π) from samples of π, unbiased and never negative."""
    log_u_NT = clip(-_gap(logp_NT, ref_logp_NT), None, EXP_LIMIT)
    xp = namespace(log_u_NT)
    u_NT, near_NT = xp.exp(log_u_NT), clip(log_u_NT, -1.0, 1.0)
    exact_near_NT = u_NT * (xp.expm1(-near_NT) + near_NT)  # the same without cancellation
    return xp.where(xp.abs(log_u_NT) < 1.0, exact_near_NT, u_NT * log_u_NT - (u_NT - 1.0))


def exact(all_logp_NTV: Array, ref_all_logp_NTV: Array) -> Array:
    """KL(p‖q) = Σ_v p·(log p − log q) over all choices of each decision; swap the arguments for the other direction."""
    expect_shape(tuple(all_logp_NTV.shape), ref_all_logp=ref_all_logp_NTV)
    xp = namespace(all_logp_NTV)
    possible_NTV = all_logp_NTV > float("-inf")  # 0·log 0 = 0
    gap_NTV = masked(all_logp_NTV, possible_NTV) - masked(ref_all_logp_NTV, possible_NTV)
    return xp.sum(xp.exp(all_logp_NTV) * gap_NTV, axis=-1)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "forward": forward}


def estimate(
    logp_NT: Array, ref_logp_NT: Array, value: str = "k3", gradient: str | None = None, cap: float | None = None
) -> Array:
    """The value of one estimator with the gradient of another (None: its own); `cap` limits the value.

    Beyond the cap the estimator's own gradient is zero; another's is not touched.

    E.g. value k1 or k3 with gradient k2 reports an unbiased KL and follows the gradient of KL(π‖ref).
    """
    kl_NT = clip(ESTIMATORS[value](logp_NT, ref_logp_NT), None if cap is None else -cap, cap)
    if gradient is None or gradient == value:
        return kl_NT
    return with_gradient_of(kl_NT, ESTIMATORS[gradient](logp_NT, ref_logp_NT))


def exact_entropy(all_logp_NTV: Array) -> Array:
    """H = −Σ_v p·log p of each decision."""
    xp = namespace(all_logp_NTV)
    return -xp.sum(xp.exp(all_logp_NTV) * masked(all_logp_NTV, all_logp_NTV > float("-inf")), axis=-1)


def sampled_entropy(logp_NT: Array) -> Array:
    """−log π as value, −½(log π)² as gradient: unbiased for H and for ∇H from the sampled decision alone.

    The plain −log π has the right value but an expected gradient of zero: E[∇ log π] = 0.
    """
    logp_NT = wide(logp_NT)
    return with_gradient_of(-logp_NT, -0.5 * logp_NT**2)
