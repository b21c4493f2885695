"""Masks and weights: which decisions may teach, on constructed points."""

import math
import random

import jax
import numpy as np
import pytest

from grpo.core import gates
from tests.golden import beyond
from tests.unit.conftest import KINDS, plain

NAN, INF = float("nan"), float("inf")


def flags(array):
    assert "bool" in str(array.dtype)
    return plain(array).astype(int).tolist()


# --- ends and signals ------------------------------------------------------------------------------------------------


def test_alive_up_to_and_including_the_first_done(kind):
    done = kind.bools([[0, 0, 1, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    assert flags(gates.alive(done)) == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1] * 5, [1] * 5]
    assert flags(gates.alive(kind.ints([[0, 1, 1]]))) == [[1, 1, 0]]


def test_has_signal_where_a_group_has_two_different_rewards(kind):
    reward = kind.floats([1.0, 0.1, 0.0, 0.1, 5.0, 0.1 + 0.2, 0.3])
    group = kind.ints([10**12, -3, 10**12, -3, 7, 8, 8])
    assert flags(gates.has_signal(reward, group)) == [1, 0, 1, 0, 0, 0, 0]


def test_has_signal_reads_no_failed_row_and_gives_it_none(kind):
    reward, group = kind.floats([1.0, NAN, 1.0, 0.0, INF, 2.0, NAN]), kind.ints([0, 0, 0, 1, 1, 1, 2])
    weight = kind.floats([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    assert flags(gates.has_signal(reward, group, weight)) == [0, 0, 0, 1, 0, 1, 0]


def test_has_signal_knows_how_large_the_summands_were(eager):
    reward, group = eager.floats([0.1 + 0.2 - 0.3, 0.0]), eager.ints([0, 0])
    assert flags(gates.has_signal(reward, group)) == [1, 1]
    assert flags(gates.has_signal(reward, group, None, eager.floats([0.6, 0.0]))) == [0, 0]


def test_has_signal_refuses_a_nan_that_counts(eager):
    with pytest.raises(ValueError, match="row 1 is nan"):
        gates.has_signal(eager.floats([1.0, NAN]), eager.ints([0, 0]))


# --- entropy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_top_entropy_is_numpys_linear_quantile(kind, share, seed):
    dice = np.random.default_rng(seed)
    entropy, mask = dice.random((3, 4)), dice.random((3, 4)) < 0.7
    entropy[~mask] = dice.choice([NAN, INF, 100.0, -100.0], size=(~mask).sum())
    threshold = np.quantile(entropy[mask], 1 - share, method="linear")
    expected = mask & (np.where(mask, entropy, -INF) >= threshold)
    assert 0 < expected.sum() <= mask.sum()
    assert flags(gates.top_entropy(kind.floats(entropy), kind.bools(mask), share)) == expected.astype(int).tolist()


def test_top_entropy_by_hand(kind):
    # Quantile 0.8 of 1…5 is 4.2: only 5 is kept. Quantile 0.5 is 3.
    entropy, mask = kind.floats([[5.0, 3.0, 9.0], [1.0, 2.0, 4.0]]), kind.bools([[1, 1, 0], [1, 1, 1]])
    assert flags(gates.top_entropy(entropy, mask, 0.2)) == [[1, 0, 0], [0, 0, 0]]
    assert flags(gates.top_entropy(entropy, mask, 0.5)) == [[1, 1, 0], [0, 0, 1]]
    assert flags(gates.top_entropy(entropy, mask, 1.0)) == [[1, 1, 0], [1, 1, 1]]


def test_top_entropy_keeps_all_of_equal_entropies_and_nothing_of_nothing(kind):
    entropy = kind.floats([[0.7, 0.7, 0.7]])
    assert flags(gates.top_entropy(entropy, kind.bools([[1, 1, 0]]), 0.2)) == [[1, 1, 0]]
    assert flags(gates.top_entropy(entropy, kind.bools([[0, 0, 0]]), 0.2)) == [[0, 0, 0]]


def test_top_entropy_keeps_what_lies_on_a_whole_place(kind):
    # The 0.6 quantile of 26 lies on place 25 · 0.6 = 15: the 11 from there on are kept.
    entropy = np.arange(26.0)[None]
    kept = gates.top_entropy(kind.floats(entropy), kind.bools([[1] * 26]), 0.4)
    assert int(plain(kept).sum()) == int((entropy >= np.quantile(entropy, 1 - 0.4)).sum()) == 11


def test_top_entropy_keeps_what_lies_on_a_whole_place_in_float32(kind):
    entropy = np.arange(26, dtype=np.float32)[None]
    kept = gates.top_entropy(kind.floats(entropy, "float32"), kind.bools([[1] * 26]), 0.4)
    assert int(plain(kept).sum()) == 11


def test_top_entropy_compiles():
    kind = KINDS["jax"]
    entropy, mask = kind.floats([[5.0, 3.0, 9.0], [1.0, 2.0, 4.0]]), kind.bools([[1, 1, 0], [1, 1, 1]])
    compiled = jax.jit(gates.top_entropy, static_argnums=2)(entropy, mask, 0.2)
    assert flags(compiled) == [[1, 0, 0], [0, 0, 0]]


# --- trust regions ---------------------------------------------------------------------------------------------------


def test_on_policy_enough_drops_the_negative_advantages_of_a_row_that_drifted(kind):
    sampled = kind.floats([[-1.0, -1.0, NAN]] * 3)
    logp = kind.floats([[-1.5, -2.5, 0.0], [-1.1, -1.1, 0.0], [0.0, 0.0, 0.0]])  # mean drift 1.0, 0.1, −1.0
    advantage, mask = kind.floats([[0.5, -0.5, -1.0]] * 3), kind.bools([[1, 1, 0]] * 3)
    kept = gates.on_policy_enough(logp, sampled, advantage, mask, 0.5)
    assert [row[:2] for row in flags(kept)] == [[1, 0], [1, 1], [1, 1]]
    assert [row[:2] for row in flags(gates.on_policy_enough(logp, sampled, advantage, mask, 1.0))] == [[1, 1]] * 3


def test_on_policy_enough_takes_an_unknown_sampler_as_no_drift(kind):
    logp, advantage, mask = kind.floats([[-3.0, -3.0]]), kind.floats([[-1.0, -1.0]]), kind.bools([[1, 1]])
    assert flags(gates.on_policy_enough(logp, kind.floats([[NAN, NAN]]), advantage, mask, 0.0)) == [[1, 1]]
    # (−1 + 3 + 0) / 2 = 1: the unknown one counts in the mean.
    assert flags(gates.on_policy_enough(logp, kind.floats([[-1.0, NAN]]), advantage, mask, 1.0)) == [[1, 1]]
    assert flags(gates.on_policy_enough(logp, kind.floats([[-1.0, NAN]]), advantage, mask, 0.99)) == [[0, 0]]


@pytest.mark.parametrize(
    ("ratio", "limit", "too_large"),
    [
        ([[1.0, 3.0, 99.0]], 2.0, False),
        ([[1.0, 3.1, 99.0]], 2.0, True),
        ([[1.0, NAN, 1.0]], 2.0, True),
        ([[1.0, INF, 1.0]], 2.0, True),
        ([[1.0, 1.0, NAN]], 2.0, False),
        ([[1.0, 1.0, INF]], 2.0, False),
    ],
)
def test_ratio_too_large(kind, ratio, limit, too_large):
    mask = kind.bools([[1, 1, 0]])
    assert bool(beyond.ratio_too_large(kind.floats(ratio), mask, limit)) is too_large


def test_one_decision_is_its_own_mean(eager):
    assert bool(beyond.ratio_too_large(eager.floats([[3.0, 0.0]]), eager.bools([[1, 0]]), 2.9))
    weight = eager.floats([[3.0, 3.0]])
    eager.close(beyond.mean_one(weight, eager.bools([[1, 1]]), "sequence"), [[1.0, 1.0]])
    eager.close(beyond.mean_one(weight, eager.bools([[1, 0]]), "token"), [[1.0, 1.0]])


def test_nothing_is_not_too_large(eager):
    assert not bool(beyond.ratio_too_large(eager.floats([[9.0]]), eager.bools([[0]]), 2.0))


# --- covariance ------------------------------------------------------------------------------------------------------


def test_covariance_is_about_the_means_of_what_counts(kind):
    logp, advantage = (
        kind.floats([[-1.0, -3.0, NAN], [-5.0, 1e9, 0.0]]),
        kind.floats([[1.0, 2.0, NAN], [3.0, 1e9, 0.0]]),
    )
    mask = kind.bools([[1, 1, 0], [1, 0, 0]])
    actual = gates.covariance(logp, advantage, mask)
    assert np.isfinite(plain(actual)).all()
    kind.close(actual.reshape(-1)[kind.ints([0, 1, 3])], [-1 * 2.0, 0.0, 1 * -2.0])


def test_covariance_averages_to_the_covariance(eager):
    logp, advantage = [-0.5, -1.0, -2.5, -3.0], [1.0, -1.0, 0.5, 2.0]
    actual = gates.covariance(eager.floats([logp]), eager.floats([advantage]), eager.bools([[1] * 4]))
    assert plain(actual).mean() == pytest.approx(np.cov(logp, advantage, ddof=0)[0, 1], abs=1e-12)


def test_covariance_takes_no_gradient_and_no_half_precision(autodiff):
    advantage, mask = autodiff.floats([[1.0, -1.0]]), autodiff.bools([[1, 1]])
    assert not autodiff.gradient(lambda x: (gates.covariance(x, advantage, mask) ** 2).sum(), [[-1.0, -2.0]]).any()
    half = autodiff.floats([[300.0, -300.0]], "float16")
    assert plain(gates.covariance(half, half, mask)).tolist() == [[90000.0, 90000.0]]


def open_(kind, share=0.25, ratio=None, advantage=None, covariance=None, priority=None, mask=None):
    eight = [0.8, 0.1, 0.6, 0.3, 0.5, 0.2, 0.7, 0.4]
    return flags(
        gates.clip_cov(
            kind.floats([ratio or [1.0] * 8]),
            kind.floats([advantage or [1.0] * 8]),
            kind.floats([covariance or [2.0] * 8]),
            kind.bools([mask or [1] * 8]),
            0.2,
            0.2,
            share,
            1.0,
            5.0,
            kind.floats([priority or eight]),
        )
    )[0]


def test_clip_cov_cuts_its_budget_of_the_smallest_priorities(kind):
    assert open_(kind) == [1, 0, 1, 1, 1, 0, 1, 1]
    assert open_(kind, share=0.49) == [1, 0, 1, 0, 1, 0, 1, 1]  # ⌊3.92⌋ = 3
    assert open_(kind, share=1e-4) == [1, 0, 1, 1, 1, 1, 1, 1]  # at least one
    assert open_(kind, share=1.0) == [0] * 8


def test_clip_cov_draws_only_inside_the_band(kind):
    covariance = [2.0, 1.0, 0.5, 5.0, -3.0, 6.0, 4.9, 1.1]
    assert open_(kind, share=1.0, covariance=covariance) == [0, 1, 1, 1, 1, 1, 0, 0]
    assert open_(kind, share=0.25, covariance=covariance) == [1, 1, 1, 1, 1, 1, 0, 0]


def test_clip_cov_leaves_what_the_clip_already_holds(kind):
    ratio = [1.3, 1.3, 0.7, 0.7, 1.1, 0.9, 1.1, 0.9]
    advantage = [1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    assert open_(kind, share=1.0, ratio=ratio, advantage=advantage) == [1, 0, 0, 1, 0, 0, 0, 0]


def test_clip_cov_counts_and_cuts_only_what_counts(kind):
    mask = [1, 0, 1, 1, 1, 0, 1, 1]
    assert open_(kind, share=1 / 3, mask=mask) == [1, 1, 1, 0, 1, 1, 1, 0]  # 2 of 6: priorities 0.3 and 0.4


def test_kl_cov_takes_the_share_with_the_largest_covariance(kind):
    covariance, mask = kind.floats([[3.0, -1.0, 9.0], [7.0, 5.0, 0.0]]), kind.bools([[1, 1, 0], [1, 1, 1]])
    assert flags(gates.kl_cov(covariance, mask, 0.4)) == [[0, 0, 0], [1, 1, 0]]
    assert flags(gates.kl_cov(covariance, mask, 0.79)) == [[1, 0, 0], [1, 1, 0]]  # ⌊3.95⌋ = 3
    assert flags(gates.kl_cov(covariance, mask, 1e-4)) == [[0, 0, 0], [1, 0, 0]]  # at least one
    assert flags(gates.kl_cov(covariance, mask, 1.0)) == [[1, 1, 0], [1, 1, 1]]


def test_kl_cov_of_nothing_takes_nothing(eager):
    assert flags(gates.kl_cov(eager.floats([[3.0, 1.0]]), eager.bools([[0, 0]]), 0.5)) == [[0, 0]]


def test_kl_cov_does_not_depend_on_the_order_of_rows_even_with_ties(kind):
    values, dice = [4.0, 2.0, 2.0, 2.0, 1.0, 0.0], random.Random(0)
    for _ in range(5):
        order = dice.sample(values, 6)
        taken = flags(gates.kl_cov(kind.floats([order]), kind.bools([[1] * 6]), 0.5))[0]
        assert [value for value, one in zip(order, taken, strict=True) if one] == [4.0]


# --- sampler mismatch ------------------------------------------------------------------------------------------------


def test_mismatch_log_ratio(kind):
    old = kind.floats([[-1.0, -2.0, NAN, -3.0, 0.0, -90.0]])
    sampled = kind.floats([[-1.5, NAN, -1.0, -2.0, -90.0, 0.0]])
    actual = gates.mismatch_log_ratio(old, sampled, kind.bools([[1, 1, 0, 1, 1, 1]]))
    kind.close(actual, [[0.5, 0.0, 0.0, -1.0, 20.0, -20.0]])


GAPS = [[math.log(3.0), math.log(0.5), 0.0], [math.log(0.2), math.log(2.0), math.log(9.0)]]
GAP_MASK = [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("level", "mode", "low", "high", "expected"),
    [
        ("token", "truncate", None, 2.0, [[2.0, 0.5, 1.0], [0.2, 2.0, 2.0]]),
        ("token", "truncate", 0.4, None, [[3.0, 0.5, 1.0], [0.4, 2.0, 9.0]]),
        ("token", "truncate", None, None, [[3.0, 0.5, 1.0], [0.2, 2.0, 9.0]]),
        ("token", "mask", 0.4, 2.5, [[0.0, 0.5, 1.0], [0.0, 2.0, 0.0]]),
        ("token", "mask", None, 2.5, [[0.0, 0.5, 1.0], [0.2, 2.0, 0.0]]),
        ("sequence", "truncate", None, 1.2, [[1.2] * 3, [0.4] * 3]),
        ("sequence", "truncate", 0.5, 2.0, [[1.5] * 3, [0.5] * 3]),
        ("sequence", "mask", 0.5, 2.0, [[1.5] * 3, [0.0] * 3]),
    ],
)
def test_mismatch_weight(kind, level, mode, low, high, expected):
    actual = gates.mismatch_weight(kind.floats(GAPS), kind.bools(GAP_MASK), level, mode, low, high)
    kind.close(actual, expected)


def test_a_weight_on_its_bound_is_within(eager):
    gap, mask = eager.floats([[0.0, 0.5]]), eager.bools([[1, 1]])
    assert plain(gates.mismatch_weight(gap, mask, "token", "mask", 1.0, 1.0)).tolist() == [[1.0, 0.0]]
    assert flags(beyond.mismatch_keep(gap, mask, "k1", "token", -0.5, -0.5)) == [[0, 1]]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_an_engine_without_numbers_is_no_mismatch(kind, level, mode):
    old, mask = kind.floats([[-1.0, -7.0]]), kind.bools([[1, 1]])
    gap = gates.mismatch_log_ratio(old, kind.floats([[NAN, NAN]]), mask)
    assert plain(gates.mismatch_weight(gap, mask, level, mode, 0.5, 2.0)).tolist() == [[1.0, 1.0]]


def test_mismatch_weight_of_a_long_row_stays_finite(eager):
    gap, mask = eager.floats([[20.0] * 50, [-20.0] * 50], "float32"), eager.bools([[1] * 50] * 2)
    weight = plain(gates.mismatch_weight(gap, mask, "sequence", "truncate", None, None))
    np.testing.assert_allclose(weight[:, 0], [math.exp(20), math.exp(-20)], rtol=1e-6)


def test_mismatch_takes_no_gradient(autodiff):
    sampled, mask = autodiff.floats([[-1.5, -0.5]]), autodiff.bools([[1, 1]])

    def weight(old):
        gap = gates.mismatch_log_ratio(old, sampled, mask)
        return gates.mismatch_weight(gap, mask, "token", "truncate", None, None).sum()

    assert not autodiff.gradient(weight, [[-1.0, -1.0]]).any()


def test_mean_one_over_decisions(kind):
    weight, mask = kind.floats([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0]]), kind.bools([[1, 1, 0], [1, 0, 0]])
    kind.close(beyond.mean_one(weight, mask, "token")[:, 0], [1 / 3, 2.0])
    kind.close(beyond.mean_one(weight, mask, "token")[0, 1], 2 / 3)


def test_mean_one_raises_small_weights_too(eager):
    weight, mask = eager.floats([[0.1, 0.3]]), eager.bools([[1, 1]])
    eager.close(beyond.mean_one(weight, mask, "token"), [[0.5, 1.5]])


def test_mean_one_over_rows_that_have_decisions(kind):
    weight = kind.floats([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0], [50.0, 50.0, 50.0]])
    mask = kind.bools([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    actual = beyond.mean_one(weight, mask, "sequence")
    kind.close(actual[:2], [[0.5] * 3, [1.5] * 3])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("weight", "mask"), [([[0.0, 0.0]], [[1, 1]]), ([[1.0, 1.0]], [[0, 0]])])
def test_mean_one_of_no_weight_is_a_number(kind, level, weight, mask):
    with np.errstate(invalid="ignore", divide="ignore"):
        actual = beyond.mean_one(kind.floats(weight), kind.bools(mask), level)
    assert np.isfinite(plain(actual)).all()


# −gap and its relatives, decision by decision: k1 is ∓, k2 is gap²/2, k3 is e^gap − 1 − gap.
KEEP = [[0.1, -0.2, 0.0], [1.0, -1.0, 9.0], [0.0, 0.0, 0.0]]
KEEP_MASK = [[1, 1, 1], [1, 1, 0], [0, 0, 0]]


def plain_keep(estimator, level, low, high):
    value = {"k1": lambda g: -g, "k2": lambda g: g * g / 2, "k3": lambda g: math.exp(g) - 1 - g}[estimator]
    rows = []
    for gaps, mask in zip(KEEP, KEEP_MASK, strict=True):
        found = [value(g) for g in gaps]
        inside = [v for v, m in zip(found, mask, strict=True) if m]
        if level == "token":
            rows.append([low <= v <= high for v in found])
            continue
        total = sum(inside)
        whole = {
            "sequence_sum": total,
            "sequence_mean": total / max(len(inside), 1),
            "sequence_max": max(inside, default=-INF),
        }[level]
        rows.append([low <= whole <= high] * 3)
    return rows


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.05), (0.001, 0.6), (-2.0, 0.4)])
def test_mismatch_keep(kind, estimator, level, low, high):
    actual = flags(beyond.mismatch_keep(kind.floats(KEEP), kind.bools(KEEP_MASK), estimator, level, low, high))
    expected = plain_keep(estimator, level, low, high)
    for i, t in [(i, t) for i in range(3) for t in range(3) if KEEP_MASK[i][t]]:
        assert bool(actual[i][t]) is expected[i][t]


def test_mismatch_keep_with_an_open_side(kind):
    gap, mask = kind.floats([[0.5, -3.0]]), kind.bools([[1, 1]])
    assert flags(beyond.mismatch_keep(gap, mask, "k1", "token", None, 1.0)) == [[1, 0]]
    assert flags(beyond.mismatch_keep(gap, mask, "k1", "token", 0.0, None)) == [[0, 1]]
    assert flags(beyond.mismatch_keep(gap, mask, "k1", "token", None, None)) == [[1, 1]]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, y, m: gates.top_entropy(x, m[:, :1], 0.5), "mask"),
        (lambda x, y, m: gates.on_policy_enough(x, y, x, m, 0.1), "sampled_logp"),
        (lambda x, y, m: gates.covariance(x, y, m), "advantage"),
        (lambda x, y, m: gates.clip_cov(x, x, x, m, 0.2, 0.2, 0.5, 1.0, 5.0, y), "priority"),
        (lambda x, y, m: gates.kl_cov(x, m[:, :1], 0.5), "mask"),
        (lambda x, y, m: gates.mismatch_log_ratio(x, y, m), "sampled_logp"),
        (lambda x, y, m: gates.mismatch_weight(x, m[:, :1], "token", "mask", None, None), "mask"),
        (lambda x, y, m: beyond.mismatch_keep(x, m[:, :1], "k1", "token", None, None), "mask"),
    ],
)
def test_gates_name_the_argument_of_wrong_shape(kind, call, name):
    x, y, mask = kind.floats([[1.0, 2.0, 3.0]] * 2), kind.floats([[1.0]] * 2), kind.bools([[1, 1, 1]] * 2)
    with pytest.raises(ValueError, match=rf"^{name} has shape \(2, 1\), expected \(2, 3\)"):
        call(x, y, mask)
