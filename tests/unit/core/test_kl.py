"""KL and entropy estimators, by exact enumeration over the choices of a small softmax.

With p = softmax(θ) and q fixed, the expectation of an estimator is Σ_v p(v)·estimator(v), and its expected gradient
is Σ_v p(v)·∂estimator(v)/∂θ with the p(v) in front held constant, as sampling does.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.core import kl
from tests.unit.conftest import plain

NAN, INF = float("nan"), float("inf")

THETA = np.array([0.3, -1.1, 0.9, 2.0, -0.4])
P = np.exp(THETA) / np.exp(THETA).sum()
Q = np.array([0.1, 0.25, 0.3, 0.15, 0.2])
LOG_P, LOG_Q = np.log(P), np.log(Q)

KL_PQ, KL_QP = float((P * (LOG_P - LOG_Q)).sum()), float((Q * (LOG_Q - LOG_P)).sum())
ENTROPY = float(-(P * LOG_P).sum())
SIGN = np.sign(P - Q)

# Exact gradients with respect to θ, from ∂p_v/∂θ_j = p_v(δ_vj − p_j).
GRAD_KL_PQ = P * (LOG_P - LOG_Q - KL_PQ)
GRAD_KL_QP = P - Q
GRAD_ENTROPY = -P * (LOG_P + ENTROPY)
GRAD_L1 = P * (SIGN - (SIGN * P).sum())  # of Σ_v |p − q|, twice the total variation


def numerical_gradient(fn):
    steps = np.eye(len(THETA)) * 1e-6
    return np.array([(fn(THETA + h) - fn(THETA - h)) / 2e-6 for h in steps])


def softmax(theta):
    return np.exp(theta) / np.exp(theta).sum()


def test_the_exact_gradients_written_above_are_right():
    p_q = numerical_gradient(lambda t: (softmax(t) * np.log(softmax(t) / Q)).sum())
    q_p = numerical_gradient(lambda t: (Q * np.log(Q / softmax(t))).sum())
    entropy = numerical_gradient(lambda t: -(softmax(t) * np.log(softmax(t))).sum())
    l1 = numerical_gradient(lambda t: np.abs(softmax(t) - Q).sum())
    np.testing.assert_allclose(GRAD_KL_PQ, p_q, atol=1e-8)
    np.testing.assert_allclose(GRAD_KL_QP, q_p, atol=1e-8)
    np.testing.assert_allclose(GRAD_ENTROPY, entropy, atol=1e-8)
    np.testing.assert_allclose(GRAD_L1, l1, atol=1e-8)
    assert min(np.abs(g).max() for g in (GRAD_KL_PQ, GRAD_KL_QP, GRAD_ENTROPY, GRAD_L1)) > 0.05


def expectation(kind, estimator):
    """Σ_v p(v)·estimator(v)."""
    return float((P * plain(estimator(kind.floats([LOG_P]), kind.floats([LOG_Q])))[0]).sum())


def expected_gradient(autodiff, estimator):
    """Σ_v p(v)·∂estimator(v)/∂θ with p(v) held constant."""
    p, log_q = autodiff.floats([P]), autodiff.floats([LOG_Q])
    return autodiff.gradient(lambda theta: (p * estimator(autodiff.log_softmax(theta), log_q)).sum(), [THETA])[0]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_a_policy_is_at_no_distance_from_itself(kind, name):
    logp = kind.floats([[0.0, -0.1, -3.7, -50.0]])
    assert plain(kl.ESTIMATORS[name](logp, logp)).tolist() == [[0.0] * 4]


def test_values_by_hand(kind):
    logp, ref = kind.floats([[math.log(0.5), math.log(0.2)]]), kind.floats([[math.log(0.25), math.log(0.6)]])
    two, three = math.log(2), math.log(3)
    kind.close(kl.k1(logp, ref), [[two, -three]])
    kind.close(kl.k2(logp, ref), [[two**2 / 2, three**2 / 2]])
    kind.close(kl.k3(logp, ref), [[0.5 + two - 1, 3 - three - 1]])
    kind.close(kl.absolute(logp, ref), [[two, three]])
    kind.close(kl.forward(logp, ref), [[-0.5 * two + 0.5, 3 * three - 2]])


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_for_kl_to_the_reference(kind, name):
    assert expectation(kind, kl.ESTIMATORS[name]) == pytest.approx(KL_PQ, abs=1e-12)


def test_forward_is_unbiased_for_kl_from_the_reference(kind):
    assert expectation(kind, kl.forward) == pytest.approx(KL_QP, abs=1e-12)
    assert abs(KL_QP - KL_PQ) > 0.01


def test_k2_and_abs_are_biased(kind):
    assert abs(expectation(kind, kl.k2) - KL_PQ) > 0.01
    assert abs(expectation(kind, kl.absolute) - KL_PQ) > 0.01


@pytest.mark.parametrize("name", ["k2", "k3", "forward", "abs"])
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(logp=st.floats(-60, 0), ref=st.floats(-60, 0))
def test_estimators_are_not_negative_but_for_rounding(name, logp, ref):
    value = float(kl.ESTIMATORS[name](np.array([[logp]]), np.array([[ref]]))[0, 0])
    u = math.exp(min(ref - logp, 20))
    assert value >= -4 * 2.0**-52 * max(1.0, u * (1 + abs(ref - logp)))
    assert math.isfinite(value)


@pytest.mark.parametrize("name", ["k2", "k3", "forward", "abs"])
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(gap=st.floats(0.01, 60), sign=st.sampled_from([-1, 1]))
def test_estimators_are_positive_away_from_zero(name, gap, sign):
    for dtype in (np.float32, np.float64):
        assert kl.ESTIMATORS[name](np.array([[gap * sign]], dtype), np.zeros((1, 1), dtype))[0, 0] > 0


@pytest.mark.parametrize("name", ["k3", "forward"])
def test_estimators_are_never_negative_in_float32(name):
    gap = np.linspace(-1e-3, 1e-3, 2001, dtype=np.float32)[None]
    assert kl.ESTIMATORS[name](gap, np.zeros_like(gap)).min() >= 0


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_estimators_widen_half_precision_before_subtracting(kind, name):
    logp, ref = kind.floats([[-1.0]], "float16"), kind.floats([[-1.0 - 2**-10]], "float16")
    actual = kl.ESTIMATORS[name](logp, ref)
    assert "float32" in str(actual.dtype)
    kind.close(actual, plain(kl.ESTIMATORS[name](kind.floats([[-1.0]]), kind.floats([[-1.0 - 2**-10]]))), 2e-7)


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_estimators_name_a_reference_of_wrong_shape(kind, name):
    with pytest.raises(ValueError, match=r"^ref_logp has shape \(2, 1\), expected \(2, 2\)"):
        kl.ESTIMATORS[name](kind.floats([[-1.0, -2.0]] * 2), kind.floats([[-1.0]] * 2))


# --- expected gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("k1", np.zeros(5)),
        ("k2", GRAD_KL_PQ),
        ("k3", GRAD_KL_QP),
        ("abs", GRAD_L1),  # twice the gradient of the total variation ½ Σ|p − q|
    ],
)
def test_what_the_gradient_of_an_estimator_optimises(autodiff, name, exact):
    np.testing.assert_allclose(expected_gradient(autodiff, kl.ESTIMATORS[name]), exact, rtol=0, atol=1e-12)


def test_the_own_gradient_of_forward_is_not_that_of_its_value(autodiff):
    # −u·log u·∇log p: why recipes pair its value with the gradient of k3.
    actual = expected_gradient(autodiff, kl.forward)
    scores = np.eye(5) - P
    np.testing.assert_allclose(actual, -(Q * (LOG_Q - LOG_P)) @ scores, rtol=0, atol=1e-12)
    assert np.abs(actual - GRAD_KL_QP).max() > 0.01


@pytest.mark.parametrize(
    ("value", "gradient", "number", "exact"),
    [
        ("k1", "k2", KL_PQ, GRAD_KL_PQ),
        ("k3", "k2", KL_PQ, GRAD_KL_PQ),
        ("forward", "k3", KL_QP, GRAD_KL_QP),
        ("k3", None, KL_PQ, GRAD_KL_QP),
        ("k1", "k1", KL_PQ, np.zeros(5)),
    ],
)
def test_estimate_reports_one_and_follows_the_other(autodiff, value, gradient, number, exact):
    def estimator(logp, ref):
        return kl.estimate(logp, ref, value, gradient)

    single = plain(estimator(autodiff.floats([LOG_P]), autodiff.floats([LOG_Q])))
    autodiff.close(kl.ESTIMATORS[value](autodiff.floats([LOG_P]), autodiff.floats([LOG_Q])), single)
    assert expectation(autodiff, estimator) == pytest.approx(number, abs=1e-12)
    np.testing.assert_allclose(expected_gradient(autodiff, estimator), exact, rtol=0, atol=1e-12)


def test_estimate_reports_the_exact_value_in_float32(kind):
    logp, ref = kind.floats([[-15.3]], "float32"), kind.floats([[0.0]], "float32")
    assert plain(kl.estimate(logp, ref, "k1", "k3")).tolist() == plain(kl.k1(logp, ref)).tolist()


# --- far from the reference ------------------------------------------------------------------------------------------


TANGENT = 10.0
"""log u from which k3 goes on as a straight line."""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("gap", [-21.0, -60.0, -1000.0])
def test_k3_far_below_the_reference_is_finite_and_pulls_back(autodiff, gap, dtype):
    ref = autodiff.floats([[0.0]], dtype)
    value = plain(kl.k3(autodiff.floats([[gap]], dtype), ref))
    expected = math.exp(TANGENT) * (1 + (-gap - TANGENT)) + gap - 1
    np.testing.assert_allclose(value, [[expected]], rtol=1e-6)
    gradient = autodiff.gradient(lambda x: kl.k3(x, ref).sum(), [[gap]], dtype)
    np.testing.assert_allclose(gradient, [[1 - math.exp(TANGENT)]], rtol=1e-6)


def test_k3_far_below_the_reference_pulls_back_in_half_precision():
    for dtype in (torch.float16, torch.bfloat16):
        logp = torch.tensor([[-60.0]], dtype=dtype, requires_grad=True)
        kl.k3(logp, torch.zeros_like(logp)).sum().backward()
        assert logp.grad.item() == pytest.approx(1 - math.exp(TANGENT), rel=1e-2)


def test_k3_goes_on_as_its_tangent_without_a_step(kind):
    left, right = (plain(kl.k3(kind.floats([[-TANGENT + h]]), kind.floats([[0.0]])))[0, 0] for h in (1e-6, -1e-6))
    assert right - left == pytest.approx(2e-6 * (math.exp(TANGENT) - 1), rel=1e-5)


def test_far_above_the_reference_all_estimators_stay_finite(kind):
    for estimator in kl.ESTIMATORS.values():
        for gap in (1000.0, -1000.0):
            value = plain(estimator(kind.floats([[gap]], "float32"), kind.floats([[0.0]], "float32")))
            assert np.isfinite(value).all()


@pytest.mark.parametrize("gap", [15.0, 19.0, 21.0, 25.0, 60.0, 1000.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_forward_far_above_the_reference_tends_to_one(kind, gap, dtype):
    # u = e^−gap is almost 0, and u·log u − (u − 1) almost 1.
    actual = kl.forward(kind.floats([[gap]], dtype), kind.floats([[0.0]], dtype))
    kind.close(actual, [[1 - (1 + gap) * math.exp(-gap)]], 1e-6)


def test_k3_cap_limits_value_and_gradient(autodiff):
    logp, ref = [[-6.0, -1.0, 6.0]], autodiff.floats([[0.0, 0.0, 0.0]])
    value = plain(kl.k3(autodiff.floats(logp), ref, cap=10.0))
    np.testing.assert_allclose(value, [[10.0, math.e - 2, math.exp(-6) + 5]], rtol=1e-12)
    gradient = autodiff.gradient(lambda x: kl.k3(x, ref, cap=10.0).sum(), logp)
    np.testing.assert_allclose(gradient, [[0.0, 1 - math.e, 1 - math.exp(-6)]], rtol=1e-12)


def test_estimate_cap_limits_both_signs_of_the_value(kind):
    logp, ref = kind.floats([[-7.0, 0.5, 7.0]]), kind.floats([[0.0] * 3])
    kind.close(kl.estimate(logp, ref, "k1", cap=5.0), [[-5.0, 0.5, 5.0]])
    kind.close(kl.estimate(logp, ref, "k1", "k2", cap=5.0), [[-5.0, 0.5, 5.0]])
    kind.close(kl.estimate(logp, ref, "k1"), [[-7.0, 0.5, 7.0]])


def test_estimate_cap_cuts_the_own_gradient_and_not_the_other(autodiff):
    logp, ref = [[-7.0, 0.5, 7.0]], autodiff.floats([[0.0] * 3])
    own = autodiff.gradient(lambda x: kl.estimate(x, ref, "k2", cap=5.0).sum(), logp)
    other = autodiff.gradient(lambda x: kl.estimate(x, ref, "k1", "k2", cap=5.0).sum(), logp)
    assert own.tolist() == [[0.0, 0.5, 0.0]]
    assert other.tolist() == [[-7.0, 0.5, 7.0]]


# --- exact KL and entropy --------------------------------------------------------------------------------------------


def test_exact_in_both_directions(kind):
    p, q = kind.floats([[LOG_P, LOG_Q]]), kind.floats([[LOG_Q, LOG_Q]])
    kind.close(kl.exact(p, q), [[KL_PQ, 0.0]])
    kind.close(kl.exact(q, p), [[KL_QP, 0.0]])


def test_exact_gradients(autodiff):
    q = autodiff.floats([[LOG_Q]])
    to_q = autodiff.gradient(lambda t: kl.exact(autodiff.log_softmax(t), q).sum(), [[THETA]])
    from_q = autodiff.gradient(lambda t: kl.exact(q, autodiff.log_softmax(t)).sum(), [[THETA]])
    np.testing.assert_allclose(to_q[0, 0], GRAD_KL_PQ, rtol=0, atol=1e-12)
    np.testing.assert_allclose(from_q[0, 0], GRAD_KL_QP, rtol=0, atol=1e-12)


def test_exact_names_a_reference_of_wrong_shape(kind):
    with pytest.raises(ValueError, match=r"^ref_all_logp has shape \(1, 1, 5\), expected \(1, 2, 5\)"):
        kl.exact(kind.floats([[LOG_P, LOG_Q]]), kind.floats([[LOG_P]]))


def test_exact_entropy(kind):
    uniform = [math.log(0.2)] * 5
    kind.close(kl.exact_entropy(kind.floats([[LOG_P, uniform]])), [[ENTROPY, math.log(5)]])


def test_exact_entropy_gradient(autodiff):
    gradient = autodiff.gradient(lambda t: kl.exact_entropy(autodiff.log_softmax(t)).sum(), [[THETA]])
    np.testing.assert_allclose(gradient[0, 0], GRAD_ENTROPY, rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", [kl.exact_entropy, lambda p: kl.exact(p, p)])
def test_a_choice_of_probability_zero_adds_nothing(kind, function):
    half = math.log(0.5)
    with np.errstate(invalid="ignore"):
        value = plain(function(kind.floats([[[half, half, -INF]]])))
    assert np.isfinite(value).all()


def test_a_choice_of_probability_zero_has_no_gradient(autodiff):
    q = autodiff.floats([[[math.log(0.25), math.log(0.75), -INF]]])

    def distance(t):
        return kl.exact(autodiff.log_softmax(t), q).sum() - kl.exact_entropy(autodiff.log_softmax(t)).sum()

    gradient = autodiff.gradient(distance, [[[0.3, -0.7, -INF]]])
    assert np.isfinite(gradient).all()
    assert gradient[0, 0, 2] == 0
    assert gradient[0, 0, 0] != 0


def test_sampled_entropy_reports_minus_log_p_and_follows_the_entropy(autodiff):
    def bonus(logp, _):
        return kl.sampled_entropy(logp)

    autodiff.close(kl.sampled_entropy(autodiff.floats([LOG_P])), [-LOG_P])
    assert expectation(autodiff, bonus) == pytest.approx(ENTROPY, abs=1e-12)
    np.testing.assert_allclose(expected_gradient(autodiff, bonus), GRAD_ENTROPY, rtol=0, atol=1e-12)


def test_sampled_entropy_widens_half_precision(kind):
    actual = kl.sampled_entropy(kind.floats([[-1000.0, -0.5]], "float16"))
    assert "float32" in str(actual.dtype)
    kind.close(actual, [[1000.0, 0.5]])


def test_minus_log_p_alone_would_follow_nothing(autodiff):
    np.testing.assert_allclose(expected_gradient(autodiff, lambda logp, _: -logp), np.zeros(5), rtol=0, atol=1e-12)
