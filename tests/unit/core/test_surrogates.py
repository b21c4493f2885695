"""Per-decision losses: the value, and the gradient with respect to log π, on every side of every bound."""

import math

import numpy as np
import pytest

from grpo.core import surrogates
from tests.unit.conftest import plain

NAN = float("nan")


def slope(autodiff, loss, ratio, advantage):
    """∂loss/∂log π, decision by decision, of a loss(ratio, advantage), at given ratios."""
    a = autodiff.floats([advantage])
    return autodiff.gradient(lambda d: loss(autodiff.module.exp(d), a).sum(), [[math.log(r) for r in ratio]])[0]


# --- clip ------------------------------------------------------------------------------------------------------------

LOW, HIGH = 0.2, 0.3
RATIO = [0.5, 0.9, 1.0, 1.2, 1.5]


def clip_loss(ratio, advantage):
    return surrogates.clipped(ratio, advantage, LOW, HIGH)


@pytest.mark.parametrize(
    ("advantage", "factor"),
    [
        (2.0, [0.5, 0.9, 1.0, 1.2, 1.3]),  # A > 0: held from above only
        (-2.0, [0.8, 0.9, 1.0, 1.2, 1.5]),  # A < 0: held from below only
        (0.0, [0.0] * 5),
    ],
)
def test_clipped_value(kind, advantage, factor):
    loss = clip_loss(kind.floats([RATIO]), kind.floats([[advantage] * 5]))
    kind.close(loss, [[-advantage * f for f in factor]])


@pytest.mark.parametrize(("advantage", "open_"), [(2.0, [1, 1, 1, 1, 0]), (-2.0, [0, 1, 1, 1, 1]), (0.0, [0] * 5)])
def test_clipped_gradient_is_zero_exactly_where_it_is_clipped(autodiff, advantage, open_):
    actual = slope(autodiff, clip_loss, RATIO, [advantage] * 5)
    np.testing.assert_allclose(actual, [-advantage * r * o for r, o in zip(RATIO, open_, strict=True)], rtol=1e-12)
    assert [int(g != 0) for g in actual] == open_


def test_at_ratio_one_the_clipped_gradient_is_the_policy_gradient(autodiff):
    actual = slope(autodiff, clip_loss, [1.0, 1.0], [3.0, -5.0])
    np.testing.assert_allclose(actual, [-3.0, 5.0], rtol=1e-12)


def test_the_gradient_is_whole_on_a_bound_that_does_not_bind(autodiff):
    # A < 0, r = 1 + high and A > 0, r = 1 − low: the clip binds on neither side of the point, the loss is smooth there.
    ratio, advantage = autodiff.floats([[1.5, 0.5]]), autodiff.floats([[-2.0, 2.0]])
    gradient = autodiff.gradient(lambda r: surrogates.clipped(r, advantage, 0.5, 0.5).sum(), ratio)
    assert gradient.tolist() == [[2.0, -2.0]]


def test_delta_bounds_the_loss_of_a_negative_advantage(kind):
    ratio, advantage = kind.floats([[1.5, 6.0, 6.0, 0.1]]), kind.floats([[-2.0, -2.0, 2.0, -2.0]])
    loss = surrogates.clipped(ratio, advantage, LOW, HIGH, delta=4.0)
    kind.close(loss, [[3.0, 8.0, -2.6, 1.6]])
    kind.close(surrogates.clipped(ratio, advantage, LOW, HIGH), [[3.0, 12.0, -2.6, 1.6]])


def test_delta_cuts_the_gradient_beyond_it(autodiff):
    def loss(ratio, advantage):
        return surrogates.clipped(ratio, advantage, LOW, HIGH, delta=4.0)

    actual = slope(autodiff, loss, [3.9, 4.1, 1.0], [-2.0, -2.0, 2.0])
    np.testing.assert_allclose(actual, [7.8, 0.0, -2.0], rtol=1e-12)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_only(kind):
    ratio, advantage = kind.floats([[2.0, 5.0, 5.0, 0.5]]), kind.floats([[-2.0, -2.0, 0.5, 2.0]])
    loss = clip_loss(ratio, advantage)
    kind.close(loss, [[4.0, 10.0, -0.65, -1.0]])
    kind.close(surrogates.dual_clipped(loss, advantage, 3.0), [[4.0, 6.0, -0.65, -1.0]])


def test_dual_clip_cuts_the_gradient_beyond_its_bound(autodiff):
    def loss(ratio, advantage):
        return surrogates.dual_clipped(clip_loss(ratio, advantage), advantage, 3.0)

    actual = slope(autodiff, loss, [2.9, 3.1, 0.5, 1.2], [-2.0, -2.0, -2.0, 2.0])
    np.testing.assert_allclose(actual, [5.8, 0.0, 0.0, -2.4], rtol=1e-12)


def test_unclipped(kind):
    loss = surrogates.unclipped(kind.floats([[0.5, 3.0]]), kind.floats([[-2.0, 4.0]]))
    kind.close(loss, [[1.0, -12.0]])


def test_unclipped_gradient_is_never_cut(autodiff):
    actual = slope(autodiff, surrogates.unclipped, [0.01, 50.0], [2.0, -2.0])
    np.testing.assert_allclose(actual, [-0.02, 100.0], rtol=1e-12)


def test_policy_gradient(kind):
    loss = surrogates.policy_gradient(kind.floats([[-0.5, -3.0]]), kind.floats([[2.0, -1.0]]))
    kind.close(loss, [[1.0, -3.0]])


# --- weights that take no gradient -----------------------------------------------------------------------------------


def test_cispo_value_and_gradient(autodiff):
    ratio, advantage = autodiff.floats([[0.1, 1.0, 9.0, 9.0]]), autodiff.floats([[2.0, -1.0, 3.0, -3.0]])
    weight = [0.5, 1.0, 4.0, 4.0]
    logp = [[-0.5, -1.0, -2.0, -4.0]]

    def loss(x):
        return surrogates.cispo(ratio, advantage, x, 0.5, 4.0)

    autodiff.close(loss(autodiff.floats(logp)), [[0.5, -1.0, 24.0, -48.0]])
    expected = [[-w * a for w, a in zip(weight, [2.0, -1.0, 3.0, -3.0], strict=True)]]
    np.testing.assert_allclose(autodiff.gradient(lambda x: loss(x).sum(), logp), expected, rtol=1e-12)


def test_cispo_weight_takes_no_gradient(autodiff):
    old, advantage = autodiff.floats([[-1.0, -1.0]]), autodiff.floats([[2.0, -1.0]])

    def loss(x):
        return surrogates.cispo(autodiff.module.exp(x - old), advantage, x, None, 1.5).sum()

    actual = autodiff.gradient(loss, [[-1.5, -0.1]])
    np.testing.assert_allclose(actual, [[-2.0 * math.exp(-0.5), 1.5]], rtol=1e-12)


def test_cispo_without_bounds_is_the_importance_weighted_policy_gradient(kind):
    ratio, advantage, logp = kind.floats([[0.01, 70.0]]), kind.floats([[1.0, 2.0]]), kind.floats([[-1.0, -2.0]])
    kind.close(surrogates.cispo(ratio, advantage, logp, None, None), [[0.01, 280.0]])


def test_dppo_is_zero_outside_the_region(kind):
    ratio, advantage = kind.floats([[0.5, 3.0, 30.0, 30.0]]), kind.floats([[1.0, -2.0, 1.0, 1.0]])
    logp, inside = kind.floats([[-1.0, -2.0, -0.5, -0.5]]), kind.bools([[1, 1, 1, 0]])
    kind.close(surrogates.dppo(ratio, advantage, logp, inside, 20.0), [[0.5, -12.0, 10.0, 0.0]])
    kind.close(surrogates.dppo(ratio, advantage, logp, inside, None), [[0.5, -12.0, 15.0, 0.0]])


def test_dppo_gradient_is_zero_outside_the_region(autodiff):
    ratio, advantage, inside = autodiff.floats([[3.0, 3.0]]), autodiff.floats([[-2.0, -2.0]]), autodiff.bools([[1, 0]])
    gradient = autodiff.gradient(lambda x: surrogates.dppo(ratio, advantage, x, inside, 2.0).sum(), [[-1.0, -1.0]])
    assert gradient.tolist() == [[4.0, 0.0]]


# --- soft gates ------------------------------------------------------------------------------------------------------


def test_sapo_value(kind):
    loss = surrogates.sapo(kind.floats([[1.0, 1.5, 0.25, 11.0]]), kind.floats([[2.0, 0.5, -1.0, 1.0]]), 1.0, 2.0)
    expected = [-2 * 0.5 * 4, -0.5 * 4 / (1 + math.exp(-0.5)), 1 * 2 / (1 + math.exp(1.5)), -4 / (1 + math.exp(-10))]
    kind.close(loss, [expected])


@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(1.0, 1.05), (0.3, 7.0)])
def test_sapo_gradient_at_ratio_one_is_the_policy_gradient(autodiff, tau_pos, tau_neg):
    actual = slope(autodiff, lambda r, a: surrogates.sapo(r, a, tau_pos, tau_neg), [1.0, 1.0], [3.0, -5.0])
    np.testing.assert_allclose(actual, [-3.0, 5.0], rtol=1e-12)


def test_sapo_gradient_fades_away_from_one_faster_for_negative_advantages(autodiff):
    def weight(r, tau):
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        return 4 * s * (1 - s) * r

    ratio, advantage = [0.5, 2.0, 0.5, 2.0], [2.0, 2.0, -2.0, -2.0]
    expected = [-a * weight(r, 1.0 if a > 0 else 3.0) for r, a in zip(ratio, advantage, strict=True)]
    actual = slope(autodiff, lambda r, a: surrogates.sapo(r, a, 1.0, 3.0), ratio, advantage)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_sapo_is_finite_for_any_ratio(autodiff):
    ratio, advantage = [[1e-8, 4e8, 1e-8, 4e8]], autodiff.floats([[1.0, 1.0, -1.0, -1.0]], "float32")
    gradient = autodiff.gradient(lambda r: surrogates.sapo(r, advantage, 1.0, 200.0).sum(), ratio, "float32")
    assert np.isfinite(gradient).all()


VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


def plain_vespo_weight(w, advantage):
    k, lam = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    return w**k * math.exp(lam * (1 - w))


def test_vespo_weight_is_one_where_the_product_of_ratios_is_one(kind):
    log_ratio, mask = kind.floats([[0.5, -0.75, 0.25], [0.0] * 3]), kind.bools([[1] * 3] * 2)
    advantage, logp = kind.floats([[2.0] * 3, [-3.0] * 3]), kind.floats([[-1.0, -2.0, -3.0]] * 2)
    loss = surrogates.vespo(log_ratio, advantage, logp, mask, **VESPO)
    kind.close(loss, [[2.0, 4.0, 6.0], [-3.0, -6.0, -9.0]])


def test_vespo_value_by_the_sign_of_the_advantage(kind):
    log_ratio, mask = kind.floats([[0.4, -0.1, 9.0], [-0.5, 0.25, 9.0]]), kind.bools([[1, 1, 0]] * 2)
    advantage, logp = kind.floats([[2.0, -1.0, 0.0]] * 2), kind.floats([[-1.0, -0.5, 0.0]] * 2)
    expected = [
        [plain_vespo_weight(math.exp(s), 2.0) * 2.0, plain_vespo_weight(math.exp(s), -1.0) * -0.5, 0.0]
        for s in (0.3, -0.25)
    ]
    kind.close(surrogates.vespo(log_ratio, advantage, logp, mask, **VESPO), expected)


def test_vespo_takes_the_sampler_mismatch_into_the_product(kind):
    args = kind.floats([[0.1, 0.2]]), kind.floats([[0.5, -1.0]]), kind.floats([[-1.0, -1.0]]), kind.bools([[1, 1]])
    loss = surrogates.vespo(*args, **VESPO, log_weight_NT=kind.floats([[0.3, -0.2]]))
    kind.close(loss, [[0.5 * plain_vespo_weight(math.exp(0.4), 0.5), -plain_vespo_weight(math.exp(0.4), -1.0)]])


def test_vespo_limits_every_logarithm(kind):
    advantage, logp, mask = kind.floats([[1.0, -1.0]]), kind.floats([[-1.0, -1.0]]), kind.bools([[1, 1]])

    def weights(log_ratio, log_weight=None):
        given = None if log_weight is None else kind.floats([log_weight])
        loss = surrogates.vespo(kind.floats([log_ratio]), advantage, logp, mask, **VESPO, log_weight_NT=given)
        return plain(loss)[0] * [1, -1]

    def expected(log_w):
        return [plain_vespo_weight(math.exp(log_w), 1.0), plain_vespo_weight(math.exp(log_w), -1.0)]

    tiny = math.log(1e-8)
    np.testing.assert_allclose(weights([50.0, -70.0]), expected(0.0), rtol=1e-12)  # 20 − 20
    np.testing.assert_allclose(weights([-15.0, -15.0]), expected(tiny), rtol=1e-12)
    np.testing.assert_allclose(weights([-18.0, 0.0]), expected(-18.0), rtol=1e-12)
    np.testing.assert_allclose(weights([18.0, 0.0], [-100.0, 0.0]), expected(18.0 + tiny), rtol=1e-12)
    np.testing.assert_allclose(weights([-19.0, 0.0], [100.0, 0.0]), expected(1.0), rtol=1e-12)


def test_vespo_weight_takes_no_gradient_and_stays_finite(autodiff):
    old, mask = autodiff.floats([[-1.0, -2.0], [-90.0, -1.0], [-1.0, -1.0]]), autodiff.bools([[1, 1]] * 3)
    advantage = autodiff.floats([[2.0, -1.0]] * 3)
    logp = [[-0.9, -2.3], [-1.0, -1.0], [-90.0, -1.0]]

    def loss(x):
        return surrogates.vespo(x - old, advantage, x, mask, **VESPO).sum()

    weight = [plain_vespo_weight(math.exp(-0.2), a) for a in (2.0, -1.0)]
    gradient = autodiff.gradient(loss, logp)
    np.testing.assert_allclose(gradient[0], [-2.0 * weight[0], weight[1]], rtol=1e-12)
    assert np.isfinite(gradient).all()
    assert not gradient[1].any()  # e^20 more likely: e^(−λe^20) is 0


# --- DRO, geometric mean ---------------------------------------------------------------------------------------------


def test_dro_value(kind):
    loss = surrogates.dro(kind.floats([[0.5, -2.0]]), kind.floats([[2.0, -1.0]]), kind.floats([[-1.0, -3.0]]), 0.5)
    kind.close(loss, [[2.0 + 0.25 * 0.25, -3.0 + 0.25 * 4.0]])


def test_dro_gradient_is_the_policy_gradient_with_a_leash(autodiff):
    old, advantage = autodiff.floats([[-1.5, -1.0]]), autodiff.floats([[2.0, -1.0]])
    gradient = autodiff.gradient(lambda x: surrogates.dro(x - old, advantage, x, 0.5).sum(), [[-1.0, -3.0]])
    np.testing.assert_allclose(gradient, [[-2.0 + 0.5 * 0.5, 1.0 - 0.5 * 2.0]], rtol=1e-12)


def test_geometric_of_one_decision_is_the_plain_ratio(kind):
    log_ratio, advantage = kind.floats([[0.1], [-0.3], [0.2]]), kind.floats([[2.0], [2.0], [-1.0]])
    loss = surrogates.geometric(log_ratio, advantage, kind.bools([[1]] * 3), 0.4, 0.4)
    kind.close(loss, plain(surrogates.unclipped(kind.module.exp(log_ratio), advantage)))


def test_geometric_clips_in_log_space_on_the_side_the_advantage_pushes_to(kind):
    log_ratio, mask = kind.floats([[0.9, -0.9, 0.1, 5.0]] * 2), kind.bools([[1, 1, 1, 0]] * 2)
    loss = surrogates.geometric(log_ratio, kind.floats([[0.5] * 4, [-0.5] * 4]), mask, 0.4, 0.3)
    up, down = math.exp((0.3 - 0.9 + 0.1) / 3), math.exp((0.9 - 0.4 + 0.1) / 3)
    kind.close(loss, [[-0.5 * up] * 3 + [0.0], [0.5 * down] * 3 + [0.0]])


def test_geometric_gradient_is_shared_by_the_unclipped_decisions(autodiff):
    mask, advantage = autodiff.bools([[1, 1, 1]] * 2), autodiff.floats([[2.0] * 3, [-2.0] * 3])
    log_ratio = [[0.9, -0.9, 0.1]] * 2
    # The loss of the first decision: each decision that is not held gets a third of it.
    gradient = autodiff.gradient(lambda d: surrogates.geometric(d, advantage, mask, 0.4, 0.3)[:, 0].sum(), log_ratio)
    up, down = math.exp(-0.5 / 3) * 2 / 3, math.exp(0.6 / 3) * 2 / 3
    np.testing.assert_allclose(gradient, [[0.0, -up, -up], [down, 0.0, down]], rtol=1e-12)


def test_geometric_takes_its_mean_over_the_chosen_decisions(kind):
    args = kind.floats([[0.1, -0.3, 0.2]]), kind.floats([[2.0, 4.0, 6.0]]), kind.bools([[1, 1, 1]]), 0.4, 0.4
    loss = surrogates.geometric(*args, chosen_NT=kind.bools([[1, 0, 1]]))
    kind.close(loss, [[-4.0 * math.exp(0.15)] * 3])


# --- trust regions ---------------------------------------------------------------------------------------------------


def flags(array):
    assert "bool" in str(array.dtype)
    return plain(array).astype(int).tolist()


def logs(kind, probabilities):
    return kind.floats([[math.log(p) for p in probabilities]])


def test_inside_total_variation(kind):
    old, new = logs(kind, [0.5] * 4), logs(kind, [0.65, 0.75, 0.35, 0.25])
    mask, up, down = kind.bools([[1] * 4]), kind.floats([[1.0] * 4]), kind.floats([[-1.0] * 4])
    assert flags(surrogates.inside_total_variation(new, old, up, mask, 0.1, 0.2)) == [[1, 0, 1, 1]]
    assert flags(surrogates.inside_total_variation(new, old, down, mask, 0.2, 0.1)) == [[1, 1, 1, 0]]
    assert flags(surrogates.inside_total_variation(new, old, down, mask, 0.1, 0.2)) == [[1, 1, 0, 0]]


def test_the_bound_of_the_total_variation_is_inside(eager):
    half, one, mask = eager.floats([[-math.log(2)]]), eager.floats([[0.0]]), eager.bools([[1]])
    for high, inside in ((0.5, 1), (0.49, 0)):
        assert flags(surrogates.inside_total_variation(one, half, one + 0.1, mask, 0.0, high)) == [[inside]]
        assert flags(surrogates.inside_total_variation(half, one, one - 0.1, mask, high, 0.0)) == [[inside]]


def binary_kl(q, p):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def test_inside_binary_kl(kind):
    q, moved = 0.5, [0.6, 0.8, 0.4, 0.2]
    near, far = binary_kl(q, 0.6), binary_kl(q, 0.8)
    assert near < 0.05 < far
    old, new = logs(kind, [q] * 4), logs(kind, moved)
    mask, up, down = kind.bools([[1] * 4]), kind.floats([[1.0] * 4]), kind.floats([[-1.0] * 4])
    assert flags(surrogates.inside_binary_kl(new, old, up, mask, 0.0, 0.05)) == [[1, 0, 1, 1]]
    assert flags(surrogates.inside_binary_kl(new, old, down, mask, 0.05, 0.0)) == [[1, 1, 1, 0]]


@pytest.mark.parametrize(("q", "p"), [(0.5, 0.8), (0.01, 0.03), (0.9, 0.95)])
def test_inside_binary_kl_turns_exactly_at_the_kl(kind, q, p):
    bound, mask, up = binary_kl(q, p), kind.bools([[1]]), kind.floats([[1.0]])
    args = logs(kind, [p]), logs(kind, [q]), up, mask, 0.0
    assert flags(surrogates.inside_binary_kl(*args, bound * 1.001)) == [[1]]
    assert flags(surrogates.inside_binary_kl(*args, bound * 0.999)) == [[0]]


def test_inside_binary_kl_is_decided_for_certain_decisions(eager):
    old, new = eager.floats([[0.0, -1e-3]]), eager.floats([[-1e-3, 0.0]])
    mask, up = eager.bools([[1, 1]]), eager.floats([[1.0, 1.0]])
    # From 1 to 0.999 is the way back; from 0.999 to 1 costs 0.001·log(0.001/1e-8).
    assert flags(surrogates.inside_binary_kl(new, old, up, mask, 0.1, 0.1)) == [[1, 1]]
    assert flags(surrogates.inside_binary_kl(new, old, up, mask, 0.1, 0.001)) == [[1, 0]]


def test_regions_read_no_garbage_outside_the_mask(kind):
    junk, mask, advantage = kind.floats([[NAN, -1.0]]), kind.bools([[0, 1]]), kind.floats([[1.0, 1.0]])
    old = kind.floats([[-1.0, -1.0]])
    assert flags(surrogates.inside_total_variation(junk, old, advantage, mask, 0.1, 0.1))[0][1] == 1
    assert flags(surrogates.inside_binary_kl(junk, old, advantage, mask, 0.1, 0.1))[0][1] == 1


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, y, m: surrogates.clipped(x, y, 0.2, 0.2), "advantage"),
        (lambda x, y, m: surrogates.dual_clipped(x, y, 3.0), "advantage"),
        (lambda x, y, m: surrogates.unclipped(x, y), "advantage"),
        (lambda x, y, m: surrogates.policy_gradient(x, y), "advantage"),
        (lambda x, y, m: surrogates.cispo(x, y, x, None, None), "advantage"),
        (lambda x, y, m: surrogates.cispo(x, x, y, None, None), "logp"),
        (lambda x, y, m: surrogates.sapo(x, y, 1.0, 1.0), "advantage"),
        (lambda x, y, m: surrogates.vespo(x, y, x, m, 1.0, 1.0, 1.0, 1.0), "advantage"),
        (lambda x, y, m: surrogates.vespo(x, x, x, m, 1.0, 1.0, 1.0, 1.0, y), "log_weight"),
        (lambda x, y, m: surrogates.dppo(x, x, x, m[:, :1], None), "inside"),
        (lambda x, y, m: surrogates.inside_total_variation(x, x, y, m, 0.1, 0.1), "advantage"),
        (lambda x, y, m: surrogates.inside_binary_kl(x, y, x, m, 0.1, 0.1), "old_logp"),
        (lambda x, y, m: surrogates.dro(x, y, x, 1.0), "advantage"),
        (lambda x, y, m: surrogates.geometric(x, x, m[:, :1], 0.1, 0.1), "mask"),
        (lambda x, y, m: surrogates.geometric(x, x, m, 0.1, 0.1, m[:, :1]), "chosen"),
    ],
)
def test_surrogates_name_the_argument_of_wrong_shape(kind, call, name):
    # (2, 1) would broadcast against (2, 3) without a word.
    x, y, mask = kind.floats([[1.0, 2.0, 3.0]] * 2), kind.floats([[1.0]] * 2), kind.bools([[1, 1, 1]] * 2)
    with pytest.raises(ValueError, match=rf"^{name} has shape \(2, 1\), expected \(2, 3\)"):
        call(x, y, mask)


# --- records ---------------------------------------------------------------------------------------------------------


def decisions(kind, **more):
    """Two rows of three decisions, the last of the second not made."""
    log_ratio = kind.floats([[0.1, -0.4, 0.6], [0.3, -0.2, 0.0]])
    given = {
        "mask": kind.bools([[1, 1, 1], [1, 1, 0]]),
        "logp": kind.floats([[-1.0, -2.0, -0.5], [-1.5, -0.7, 0.0]]),
        "log_ratio": log_ratio,
        "advantage": kind.floats([[2.0] * 3, [-1.0, -1.0, 0.0]]),
    }
    return surrogates.Decisions(**dict.fromkeys(surrogates.Decisions._fields) | given | more)


@pytest.mark.parametrize("own", surrogates.SURROGATES.values(), ids=surrogates.SURROGATES)
def test_every_surrogate_says_what_it_does(kind, own):
    made, d = own(), decisions(kind)
    ratio = kind.module.exp(d.log_ratio)
    assert np.isfinite(plain(made.loss(ratio, d))).all()
    assert "A" in made.formula and made.label.startswith(made.kind)
    assert surrogates.chosen(surrogates.Clip(), made.kind) == made and made.but({}) == made
    assert hash(made) == hash(own(**vars(made))) and set(made.settings()) == set(surrogates.names(own))
    if made.limits is not None:
        assert 0 <= made.limits[0] < 1 < made.limits[1]


def test_records_are_their_formulas(kind):
    d = decisions(kind)
    ratio = kind.module.exp(d.log_ratio)
    pairs = [
        (surrogates.Clip(0.1, 0.3, delta=1.5, dual_clip=2.0),
         surrogates.dual_clipped(surrogates.clipped(ratio, d.advantage, 0.1, 0.3, 1.5), d.advantage, 2.0)),
        (surrogates.Cispo(0.1), surrogates.cispo(ratio, d.advantage, d.logp, 0.9, 1.1)),
        (surrogates.Cispo(epsilon_high=1.2, bounds="absolute"),
         surrogates.cispo(ratio, d.advantage, d.logp, None, 1.2)),
        (surrogates.Sapo(2.0, 3.0), surrogates.sapo(ratio, d.advantage, 2.0, 3.0)),
        (surrogates.Vespo(1.0, 2.0, 3.0, 4.0),
         surrogates.vespo(d.log_ratio, d.advantage, d.logp, d.mask, 1.0, 2.0, 3.0, 4.0)),
        (surrogates.Dro(2.0), surrogates.dro(d.log_ratio, d.advantage, d.logp, 2.0)),
    ]  # fmt: skip
    for made, expected in pairs:
        kind.close(made.loss(ratio, d), plain(expected))


def test_how_each_corrects_for_the_sampler(kind):
    d = decisions(kind, mismatch=kind.floats([[2.0, 0.5, 8.0], [1.0, 4.0, 1.0]]))
    kind.close(surrogates.Clip().mismatch(d), plain(d.mismatch))
    kind.close(surrogates.Geometric().mismatch(d), [[2.0] * 3, [2.0] * 3])
    assert surrogates.Vespo().mismatch(d) is None  # it is a part of W


def test_numbers_are_given_by_one_name_everywhere():
    assert surrogates.owners()["epsilon"] == ["clip", "geometric", "cispo", "dppo_tv", "dppo_kl"]
    assert surrogates.owners()["vespo_k_pos"] == ["vespo"]
    block = {"kind": "vespo", "k_pos": 1.0, "vespo_k_neg": 2.0}
    assert surrogates.flattened(block) == {"surrogate": "vespo", "vespo_k_pos": 1.0, "vespo_k_neg": 2.0}
    short = [
        name
        for own in surrogates.SURROGATES.values()
        for name in {n.removeprefix(own.prefix): n for n in surrogates.names(own)}.items()
    ]
    assert len(dict(short)) == len(set(short)), "a number's short name stands for two settings"


def test_another_kind_takes_over_what_both_have():
    wide = surrogates.chosen(surrogates.Clip(0.1, 0.3, delta=2.0, dual_clip=5.0), "dppo_kl")
    assert wide == surrogates.DppoBinaryKL(0.1, 0.3, dual_clip=5.0)
    assert surrogates.chosen(surrogates.Cispo(epsilon_high=5.0, bounds="absolute"), "clip") == surrogates.Clip()
    assert surrogates.chosen(surrogates.Clip(0.1), "vespo", vespo_k_pos=1.0) == surrogates.Vespo(k_pos=1.0)
    assert surrogates.chosen(surrogates.Clip(0.1), surrogates.Clip(0.3)) == surrogates.Clip(0.3)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: surrogates.Sapo(tau_neg=0.0), "tau_neg must be positive, got 0.0"),
        (lambda: surrogates.Dro(-1.0), "dro_beta must not be negative, got -1.0"),
        (lambda: surrogates.Clip(float("inf")), "epsilon must be a finite number, got inf"),
        (lambda: surrogates.Cispo(bounds="absolute"), "bounds=absolute needs epsilon_high, the cap"),
        (lambda: surrogates.Cispo(bounds="both"), "bounds='both' is not one of relative, absolute"),
    ],
)
def test_numbers_without_meaning_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.parametrize("own", surrogates.SURROGATES.values(), ids=lambda own: own.kind)
def test_where_the_advantage_is_zero_the_gradient_is_or_the_record_says_no(own, autodiff):
    """Rows whose decisions have none are spared the backward pass on the strength of this."""
    mask = autodiff.module.asarray([[True] * 5])
    advantage = autodiff.floats([[0.0] * 5])
    old = autodiff.floats([[-1.0, -2.0, -0.5, -0.1, -3.0]])

    def loss(logp):
        d = surrogates.Decisions(mask, logp, logp - old, advantage, None, None, None, None, None, None)
        return own().loss(autodiff.module.exp(logp - old), d).sum()

    found = plain(autodiff.gradient(loss, [[-0.5, -2.5, -0.5, -0.2, -1.0]]))
    assert own.still_without_advantage == (not np.any(found))
