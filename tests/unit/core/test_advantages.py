"""Baselines, scales, credit and whitening against formulas written out in plain Python."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo.core import advantages as adv
from tests.unit.conftest import KINDS, plain

NAN, INF = float("nan"), float("inf")

# Ragged groups of any integers, shuffled. Row 2 failed (weight 0, NaN); rows 4 and 6 are one episode of group −3.
GROUP = [7, -3, 7, 10**12, -3, 7, -3, 7, 10**12, 5, -3]
VALUE = [0.5, 2.0, NAN, -1.5, 0.25, 3.0, 0.25, -1.0, 4.0, 9.0, 1.0]
WEIGHT = [1, 1, 0, 1, 0.5, 1, 0.5, 1, 1, 1, 1]
LENGTH = [3, 1, 50, 4, 2, 6, 5, 1, 2, 8, 4]
COUNTS = [i for i, w in enumerate(WEIGHT) if w > 0]


def members(i):
    return [j for j in COUNTS if GROUP[j] == GROUP[i]]


def plain_mean(i, weight=WEIGHT):
    return sum(weight[j] * VALUE[j] for j in members(i)) / sum(weight[j] for j in members(i))


def plain_leave_one_out(i):
    others = sum(WEIGHT[j] for j in members(i)) - 1
    return (sum(WEIGHT[j] * VALUE[j] for j in members(i)) - VALUE[i]) / others if others > 0 else VALUE[i]


def plain_length_weighted(i):
    return plain_mean(i, [w * n for w, n in zip(WEIGHT, LENGTH, strict=True)])


def plain_runner_up(i):
    ranked = sorted((VALUE[j] for j in members(i)), reverse=True)
    unique_best = VALUE[i] == ranked[0] and ranked.count(ranked[0]) == 1 and len(ranked) > 1
    return ranked[1] if unique_best else VALUE[i]


def plain_std(rows, ddof):
    count = sum(WEIGHT[j] for j in rows)
    mean = sum(WEIGHT[j] * VALUE[j] for j in rows) / count
    square = sum(WEIGHT[j] * (VALUE[j] - mean) ** 2 for j in rows)
    return math.sqrt(square / (count - ddof)) if count > ddof else 0.0


def with_length(value, group, weight=None):
    length = adv.astype(adv.positions(value.shape[0], value) * 3 % 5 + 1, adv.wide(value)).reshape(value.shape)
    return adv.length_weighted_mean(value, group, length, weight)


BASELINES = {
    "group_mean": adv.group_mean,
    "leave_one_out": adv.leave_one_out,
    "length_weighted": with_length,
    "runner_up": adv.runner_up,
}


def batch(kind, order=None):
    order = list(range(len(GROUP))) if order is None else order
    pick = [[column[i] for i in order] for column in (VALUE, GROUP, WEIGHT, LENGTH)]
    return kind.floats(pick[0]), kind.ints(pick[1]), kind.floats(pick[2]), kind.floats(pick[3])


def check_rows(kind, actual, formula):
    """Rows that count equal the formula; a row that does not is at least no NaN."""
    assert np.isfinite(plain(actual)).all()
    kind.close(actual[kind.ints(COUNTS)], [formula(i) for i in COUNTS])


# --- baselines -------------------------------------------------------------------------------------------------------


def test_group_mean(kind):
    value, group, weight, _ = batch(kind)
    check_rows(kind, adv.group_mean(value, group, weight), plain_mean)


def test_leave_one_out(kind):
    value, group, weight, _ = batch(kind)
    check_rows(kind, adv.leave_one_out(value, group, weight), plain_leave_one_out)


def test_length_weighted_mean(kind):
    value, group, weight, length = batch(kind)
    check_rows(kind, adv.length_weighted_mean(value, group, length, weight), plain_length_weighted)


def test_runner_up(kind):
    value, group, weight, _ = batch(kind)
    check_rows(kind, adv.runner_up(value, group, weight), plain_runner_up)


def test_baselines_by_hand(eager):
    value, group = eager.floats([1.0, 2.0, 3.0, 6.0]), eager.ints([0, 0, 0, 0])
    eager.close(adv.group_mean(value, group), [3.0] * 4)
    eager.close(adv.leave_one_out(value, group), [11 / 3, 10 / 3, 3.0, 2.0])
    eager.close(adv.length_weighted_mean(value, group, eager.ints([1, 1, 2, 4])), [33 / 8] * 4)
    eager.close(adv.runner_up(value, group), [1.0, 2.0, 3.0, 3.0])


def test_runner_up_needs_a_unique_best(eager):
    value, group = eager.floats([-1.0, -1.0, -2.0, -5.0, -4.0]), eager.ints([0, 0, 0, 1, 1])
    eager.close(adv.runner_up(value, group), [-1.0, -1.0, -2.0, -5.0, -5.0])


def test_runner_up_counts_the_rows_of_the_best_episode_once(eager):
    value, group = eager.floats([4.0, 4.0, 1.0]), eager.ints([0, 0, 0])
    eager.close(adv.runner_up(value, group, eager.floats([0.5, 0.5, 1.0])), [1.0, 1.0, 1.0])
    eager.close(adv.runner_up(value, group, eager.floats([1.0, 1.0, 1.0])), [4.0, 4.0, 1.0])


@pytest.mark.parametrize("name", BASELINES)
def test_the_order_of_rows_does_not_matter(kind, name):
    def baseline(value, group, weight, length):
        if name == "length_weighted":
            return adv.length_weighted_mean(value, group, length, weight)
        return BASELINES[name](value, group, weight)

    order = random.Random(name).sample(range(len(GROUP)), len(GROUP))
    assert order != sorted(order)
    kind.close(baseline(*batch(kind, order)), plain(baseline(*batch(kind)))[order])


@pytest.mark.parametrize("name", BASELINES)
def test_a_singleton_is_its_own_baseline(eager, name):
    value, group = eager.floats([0.1, 0.7, -2.0]), eager.ints([3, 1, 2])
    assert plain(BASELINES[name](value, group)).tolist() == [0.1, 0.7, -2.0]


@pytest.mark.parametrize("name", BASELINES)
def test_a_group_without_a_valid_row_is_no_nan(kind, name):
    value, group = kind.floats([NAN, INF, 1.0, 1.0, 1.0, 1.0, NAN]), kind.ints([0, 0, 1, 1, 1, 1, 2])
    actual = BASELINES[name](value, group, kind.floats([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]))
    kind.close(actual, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0])


def test_no_weights_means_all_ones(eager):
    value, group = eager.floats([1.0, 2.0, 4.0, 9.0]), eager.ints([0, 0, 1, 1])
    for baseline in BASELINES.values():
        assert plain(baseline(value, group)).tolist() == plain(baseline(value, group, eager.ints([1] * 4))).tolist()


@pytest.mark.parametrize("name", BASELINES)
def test_half_precision_and_whole_rewards_are_widened(eager, name):
    group = eager.ints([0, 0, 0])
    expected = plain(BASELINES[name](eager.floats([1.0, 2.0, 4.0]), group))
    for value in (eager.floats([1.0, 2.0, 4.0], "float16"), eager.ints([1, 2, 4])):
        actual = BASELINES[name](value, group)
        assert "float32" in str(actual.dtype)
        eager.close(actual, expected, 1e-6)


@pytest.mark.parametrize("name", BASELINES)
def test_the_advantage_is_zero_for_equal_values(kind, name):
    # Summed naively, 7 × 0.1 has the mean 0.09999999999999999.
    assert sum([0.1] * 7) / 7 != 0.1
    for dtype in ("float32", "float64"):
        value, group = kind.floats([0.1] * 7, dtype), kind.ints([4] * 7)
        for weight in (None, kind.floats([1, 1, 0, 0.5, 0.5, 1, 1], dtype)):
            centred = value - BASELINES[name](value, group, weight)
            assert str(centred.dtype) == str(value.dtype)
            assert plain(centred)[[0, 1, 3, 4, 5, 6]].tolist() == [0.0] * 6
            assert weight is not None or plain(centred)[2] == 0.0  # row 2 has weight 0 the second time
            assert plain(adv.group_std(value, group, weight)).tolist() == [0.0] * 7


@pytest.mark.parametrize("name", BASELINES)
def test_the_advantage_is_zero_for_values_equal_but_for_rounding(kind, name):
    tie = [0.1 + 0.2, 0.3, 0.3]
    assert tie[0] != tie[1]
    ulp = float(np.spacing(np.float32(0.3)))
    for dtype, values in (("float64", tie), ("float32", tie), ("float32", [0.3 + ulp, 0.3, 0.3 - ulp])):
        group = kind.ints([1, 1, 1, 0, 0, 0, 2])
        value = adv.settle_ties(kind.floats([*values, *values, 0.1], dtype), group)
        assert plain(value - BASELINES[name](value, group)).tolist() == [0.0] * 7
        assert plain(adv.group_std(value, group)).tolist() == [0.0] * 7


# --- ties ------------------------------------------------------------------------------------------------------------


def test_settle_ties_takes_the_largest_of_its_own_group(eager):
    high = 0.1 + 0.2
    value, group = eager.floats([0.3, high, 0.3, 0.2, 5.0]), eager.ints([0, 0, 1, 0, 1])
    assert plain(adv.settle_ties(value, group)).tolist() == [high, high, 0.3, 0.2, 5.0]


def test_settle_ties_is_relative_and_narrow(eager):
    far = 1.0 - 8 * 2.0**-52
    value, group = eager.floats([1.0, far, 1e-30, 0.0, -1.0, -1.0 - 4 * 2.0**-52]), eager.ints([0, 0, 1, 1, 2, 2])
    assert plain(adv.settle_ties(value, group)).tolist() == [1.0, far, 1e-30, 0.0, -1.0, -1.0]


def test_settle_ties_knows_how_large_the_summands_were(eager):
    # 0.1 + 0.2 − 0.3 = 5.6e-17 is 0 up to the rounding of numbers around 0.3.
    rest = 0.1 + 0.2 - 0.3
    value, group = eager.floats([rest, 0.0, 1.0, 1.0 - 1e-15]), eager.ints([0, 0, 1, 1])
    assert rest != 0
    assert plain(adv.settle_ties(value, group)).tolist() == plain(value).tolist()
    settled = plain(adv.settle_ties(value, group, None, eager.floats([0.6, 0.0, 1.0, 1.0])))
    assert settled.tolist() == [rest, rest, 1.0, 1.0 - 1e-15]


def test_settle_ties_reads_no_failed_row(eager):
    value, group = eager.floats([0.3, 0.1 + 0.2, NAN]), eager.ints([0, 0, 0])
    actual = adv.settle_ties(value, group, eager.floats([1.0, 0.0, 0.0]))
    assert plain(actual)[0] == 0.3


# --- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ddof", [0.0, 1.0])
def test_group_std(kind, ddof):
    value, group, weight, _ = batch(kind)
    check_rows(kind, adv.group_std(value, group, weight, ddof), lambda i: plain_std(members(i), ddof))


@pytest.mark.parametrize("ddof", [0.0, 1.0])
def test_batch_std(kind, ddof):
    value, _, weight, _ = batch(kind)
    kind.close(adv.batch_std(value, weight, ddof), [plain_std(COUNTS, ddof)] * len(VALUE))


def test_std_by_hand(eager):
    value, group = eager.floats([1.0, 2.0, 3.0, 6.0, 5.0]), eager.ints([0, 0, 0, 0, 1])
    eager.close(adv.group_std(value, group), [math.sqrt(14 / 3)] * 4 + [0.0])
    eager.close(adv.group_std(value, group, ddof=0.0), [math.sqrt(3.5)] * 4 + [0.0])
    eager.close(adv.batch_std(eager.floats([1.0, 3.0])), [math.sqrt(2.0)] * 2)


def test_std_of_one_episode_of_several_rows_is_zero(eager):
    # k × 1/k is not always 1: with ddof 1 a positive remainder would divide by almost nothing.
    assert {sum([1 / k] * k) > 1 for k in range(1, 50)} == {False, True}
    value, group = eager.floats([0.1] * 50), eager.ints([0] * 50)
    for k in [k for k in range(1, 50) if sum([1 / k] * k) > 1] + [1, 2, 3, 6]:
        weight = eager.floats([1 / k] * k + [0.0] * (50 - k))
        assert plain(adv.group_std(value, group, weight)).tolist() == [0.0] * 50


def test_divide(kind):
    actual = adv.divide(kind.floats([2.0, -3.0, 0.0]), kind.floats([0.5, 1.5, 0.0]), 0.5)
    kind.close(actual, [2.0, -1.5, 0.0])


def test_divide_by_no_spread_is_zero(kind):
    actual = adv.divide(kind.floats([0.0, 3.0]), kind.floats([0.0, 2.0]), 0.0)
    assert plain(actual).tolist() == [0.0, 1.5]


def test_divide_by_no_spread_has_no_gradient(autodiff):
    scale = autodiff.floats([0.0, 2.0])
    assert autodiff.gradient(lambda x: adv.divide(x, scale, 0.0).sum(), [0.0, 3.0]).tolist() == [0.0, 0.5]


def test_expect_not_negative(kind):
    value = kind.floats([1.0, -0.25, -7.0])
    adv.expect_not_negative(value, kind.floats([1.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match=r"scale=group_mean needs rewards ≥ 0, got -0\.25; shift them"):
        adv.expect_not_negative(value, kind.floats([1.0, 1.0, 0.0]))


def test_zero_is_not_negative(eager):
    adv.expect_not_negative(eager.floats([0.0, 0.5]), eager.floats([1.0, 1.0]))


def test_signal_share(kind):
    kind.close(adv.signal_share(kind.floats([1, 0, 0, 1, 0, 1, 0]), kind.floats([0])), [7 / 3] * 7)
    kind.close(adv.signal_share(kind.bools([1, 0, 0, 1]), kind.floats([0])), [2.0] * 4)
    kind.close(adv.signal_share(kind.bools([0, 0]), kind.floats([0])), [2.0] * 2)


def test_signal_share_of_a_mask_is_exact_enough_for_float64(kind):
    value = kind.floats([3.0] * 7)
    advantage = value * adv.signal_share(kind.bools([1, 0, 0, 1, 0, 1, 0]), value)
    kind.close(advantage, [7.0] * 7)


# --- numbers and shapes at the door ----------------------------------------------------------------------------------

GROUPED = {
    **BASELINES,
    "settle_ties": adv.settle_ties,
    "group_std": adv.group_std,
    "batch_std": lambda value, group, weight=None: adv.batch_std(value, weight),
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_number_that_counts_must_be_finite(kind, name, bad):
    value, group = kind.floats([1.0, 2.0, 0.0, bad, 1.0, 1.0, 2.0]), kind.ints([0, 0, 1, 1, 0, 0, 0])
    with pytest.raises(ValueError, match=rf"value: row 3 is {bad}"):
        GROUPED[name](value, group)
    with pytest.raises(ValueError, match=rf"value: row 3 is {bad}"):
        GROUPED[name](value, group, kind.floats([1.0, 1.0, 1.0, 0.25, 1.0, 1.0, 1.0]))
    actual = GROUPED[name](value, group, kind.floats([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    assert np.isfinite(plain(actual)).all()


@pytest.mark.parametrize("name", [name for name in GROUPED if name != "batch_std"])
def test_grouped_functions_name_the_argument_of_wrong_shape(kind, name):
    value, group = kind.floats([1.0, 2.0, 3.0]), kind.ints([0, 0, 1])
    with pytest.raises(ValueError, match=r"^group has shape \(2,\), expected \(3,\)"):
        GROUPED[name](value, group[:2])
    with pytest.raises(ValueError, match=r"^weight has shape \(3, 1\), expected \(3,\)"):
        GROUPED[name](value, group, value[:, None])
    with pytest.raises(ValueError, match=r"^value has shape \(3, 1\), expected 1 dim"):
        GROUPED[name](value[:, None], group)


def shape_errors(kind):
    """(call, name of the argument that is wrong)."""
    one_2, ints_2, two_22 = kind.floats([1.0, 2.0]), kind.ints([0, 0]), kind.floats([[1.0, 2.0], [3.0, 4.0]])
    mask_22, mask_21 = kind.bools([[1, 1], [1, 0]]), kind.bools([[1], [0]])
    return [
        (lambda: adv.length_weighted_mean(one_2, ints_2, kind.floats([1.0])), "length"),
        (lambda: adv.group_count(kind.ints([0]), one_2), "group"),
        (lambda: adv.divide(one_2, kind.floats([1.0]), 0.0), "scale"),
        (lambda: adv.batch_std(one_2, kind.floats([1.0])), "weight"),
        (lambda: adv.combine_rewards(one_2, one_2), "reward_parts"),
        (lambda: adv.combine_rewards(two_22, kind.floats([1.0])), "weight"),
        (lambda: adv.reward_to_go(one_2, mask_22), "reward"),
        (lambda: adv.reward_to_go(two_22, mask_21), "mask"),
        (lambda: adv.optimal_token_baseline(two_22, two_22, mask_21, ints_2), "mask"),
        (lambda: adv.optimal_token_baseline(two_22, one_2, mask_22, ints_2), "energy"),
        (lambda: adv.decision_energy(two_22, one_2), "sum_sq"),
        (lambda: adv.whiten(two_22, mask_21), "mask"),
        (lambda: adv.whiten(two_22, mask_22, one_2), "weight"),
    ]


@pytest.mark.parametrize("case", range(13))
def test_the_other_functions_name_the_argument_of_wrong_shape(kind, case):
    call, name = shape_errors(kind)[case]
    with pytest.raises(ValueError, match=rf"^{name} has shape"):
        call()


def test_optimal_token_baseline_names_a_group_of_wrong_shape(kind):
    x, mask = kind.floats([[1.0, 2.0], [3.0, 4.0]]), kind.bools([[1, 1], [1, 1]])
    with pytest.raises(ValueError, match=r"^group has shape \(3,\)"):
        adv.optimal_token_baseline(x, x, mask, kind.ints([0, 0, 1]))


def test_baselines_compile():
    value, group, weight, _ = batch(KINDS["jax"])
    for baseline in (adv.group_mean, adv.leave_one_out, adv.runner_up):
        KINDS["jax"].close(jax.jit(baseline)(value, group, weight), plain(baseline(value, group, weight)))


# --- credit ----------------------------------------------------------------------------------------------------------


def test_group_count(kind):
    _, group, weight, _ = batch(kind)
    expected = [sum(WEIGHT[j] for j in range(len(GROUP)) if GROUP[j] == g) for g in GROUP]
    kind.close(adv.group_count(group, weight), expected)


def test_combine_rewards_skips_parts_without_an_opinion(kind):
    parts = kind.floats([[1.0, 2.0, 3.0], [NAN, 2.0, -1.0], [NAN, NAN, NAN], [0.0, NAN, NAN]])
    total, opinion = adv.combine_rewards(parts, kind.floats([1.0, 0.5, -2.0]))
    kind.close(total, [-4.0, 3.0, 0.0, 0.0])
    assert plain(opinion).tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("bad", [INF, -INF])
def test_combine_rewards_refuses_an_infinite_part(kind, bad):
    with pytest.raises(ValueError, match=rf"^reward_parts: row 1, part 0 is {bad};"):
        adv.combine_rewards(kind.floats([[1.0, NAN], [bad, 1.0]]), kind.floats([1.0, 1.0]))


def test_episode_mean(kind):
    values, episodes = kind.floats([1.0, 5.0, 3.0, 7.0]), kind.ints([-4, 10**12, -4, 2])
    mean, weight = adv.episode_mean(values, episodes, kind.floats([1.0] * 4))
    kind.close(mean, [2.0, 5.0, 2.0, 7.0])
    kind.close(weight, [0.5, 1.0, 0.5, 1.0])
    mean, weight = adv.episode_mean(values, episodes, kind.floats([1.0, 1.0, 0.0, 1.0]))
    kind.close(mean, [1.0, 5.0, 1.0, 7.0])
    kind.close(weight, [1.0, 1.0, 0.0, 1.0])


def test_episode_mean_of_equal_rows_is_exact(eager):
    mean, _ = adv.episode_mean(eager.floats([0.1] * 7), eager.ints([3] * 7), eager.floats([1.0] * 7))
    assert plain(mean).tolist() == [0.1] * 7


def test_step_groups_are_one_a_group_and_step(kind):
    group = [10**12, -3, 10**12, 0]
    ids = adv.step_groups(kind.ints(group), 3)
    seen = {}
    for i, g in enumerate(group):
        for t in range(3):
            seen.setdefault((g, t), set()).add(int(plain(ids)[i, t]))
    assert all(len(found) == 1 for found in seen.values())
    assert len({min(found) for found in seen.values()}) == 3 * 3


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_step_groups_of_narrow_integers_do_not_run_over(kind, dtype):
    ids = adv.step_groups(kind.from_numpy(np.arange(60, dtype=dtype)), 5)
    assert len(np.unique(plain(ids))) == 60 * 5


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 33])
def test_reward_to_go_against_a_loop(kind, steps):
    random_ = random.Random(steps)
    reward = [[random_.uniform(-1, 1) for _ in range(steps)] for _ in range(3)]
    mask = [[1] * steps, [random_.random() < 0.6 for _ in range(steps)], [0] * steps]
    garbage = [[r if m else NAN for r, m in zip(*row, strict=True)] for row in zip(reward, mask, strict=True)]
    for gamma in (1.0, 0.9, 0.0):
        expected = np.zeros((3, steps))
        for i in range(3):
            following = 0.0
            for t in reversed(range(steps)):
                following = reward[i][t] + gamma * following if mask[i][t] else following
                expected[i, t] = following
        kind.close(adv.reward_to_go(kind.floats(garbage), kind.bools(mask), gamma), expected)


def test_reward_to_go_by_hand(eager):
    reward, mask = eager.floats([[1.0, 99.0, 2.0, 4.0, 99.0]]), eager.bools([[1, 0, 1, 1, 0]])
    eager.close(adv.reward_to_go(reward, mask, 0.5), [[3.0, 4.0, 4.0, 4.0, 0.0]])
    eager.close(adv.reward_to_go(reward, mask), [[7.0, 6.0, 6.0, 4.0, 0.0]])


def test_decision_energy_is_the_squared_gradient_of_a_softmax(autodiff):
    logits = [[0.3, -1.2, 2.0, 0.7]]
    logp = autodiff.log_softmax(autodiff.floats(logits))
    sum_sq = autodiff.floats([[float((np.exp(plain(logp)) ** 2).sum())] * 4])
    expected = [(autodiff.gradient(lambda x, a=a: autodiff.log_softmax(x)[0, a], logits) ** 2).sum() for a in range(4)]
    autodiff.close(adv.decision_energy(logp, sum_sq), [expected])


def test_decision_energy_by_hand(eager):
    # Two choices of probability ¼ and ¾: the gradient of log p(a) is (1 − p(a))·(1, −1).
    logp = eager.floats([[math.log(0.25), math.log(0.75)]])
    eager.close(adv.decision_energy(logp, eager.floats([[0.625, 0.625]])), [[2 * 0.75**2, 2 * 0.25**2]])


# Group 9: rows 0, 2, 3, of lengths 4, 3, 2, the longest with a hole; group 4: row 1, alone.
RETURN = [[1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0], [-1.0, 0.5, 0.25, 0.0], [2.0, 4.0, 0.0, 0.0]]
ENERGY = [[0.1, 0.7, 0.2, 0.4], [1.0, 1.0, 1.0, 1.0], [0.5, 0.3, 0.9, 0.0], [0.6, 0.8, 0.0, 0.0]]
HOLES = [[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]


def plain_optimal_baseline():
    """Decisions are numbered along each row, holes left out."""
    groups = [9, 4, 9, 9]
    made = [[t for t in range(4) if HOLES[i][t]] for i in range(4)]
    spent = [np.cumsum([ENERGY[i][t] for t in made[i]]) for i in range(4)]
    expected = np.zeros((4, 4))
    for i in range(4):
        for number, t in enumerate(made[i]):
            rows = [j for j in range(4) if groups[j] == groups[i] and len(made[j]) > number]
            if len(rows) > 1:
                above = sum(RETURN[j][made[j][number]] * spent[j][number] for j in rows)
                expected[i, t] = above / sum(spent[j][number] for j in rows)
    return expected


def test_optimal_token_baseline(kind):
    args = kind.floats(RETURN), kind.floats(ENERGY), kind.bools(HOLES), kind.ints([9, 4, 9, 9])
    expected = plain_optimal_baseline()
    assert expected[0, 0] != 0
    assert expected[0, 1] == expected[1, 0] == 0  # a hole; only one trajectory gets there
    kind.close(adv.optimal_token_baseline(*args), expected)


def test_optimal_token_baseline_reads_no_energy_outside_the_mask(kind):
    energy = [[e if m else NAN for e, m in zip(*row, strict=True)] for row in zip(ENERGY, HOLES, strict=True)]
    args = kind.floats(RETURN), kind.floats(energy), kind.bools(HOLES), kind.ints([9, 4, 9, 9])
    kind.close(adv.optimal_token_baseline(*args), plain_optimal_baseline())


def test_optimal_token_baseline_reads_no_return_outside_the_mask(kind):
    returns = [[g if m else NAN for g, m in zip(*row, strict=True)] for row in zip(RETURN, HOLES, strict=True)]
    args = kind.floats(returns), kind.floats(ENERGY), kind.bools(HOLES), kind.ints([9, 4, 9, 9])
    kind.close(adv.optimal_token_baseline(*args), plain_optimal_baseline())


# --- whitening -------------------------------------------------------------------------------------------------------

WHITE = [[1.0, 4.0, NAN], [-2.0, NAN, 0.5]]
WHITE_MASK = [[1, 1, 0], [1, 0, 1]]
WHITE_WEIGHT = [[1.0, 0.5, 3.0], [0.5, 1.0, 2.0]]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ddof", [0.0, 1.0])
@pytest.mark.parametrize(("eps", "root"), [(1e-8, True), (0.5, True), (0.5, False)])
def test_whiten(kind, weighted, ddof, eps, root):
    places = [(i, t) for i in range(2) for t in range(3) if WHITE_MASK[i][t]]
    w = {p: WHITE_WEIGHT[p[0]][p[1]] if weighted else 1.0 for p in places}
    x = {p: WHITE[p[0]][p[1]] for p in places}
    count = sum(w.values())
    mean = sum(w[p] * x[p] for p in places) / count
    variance = sum(w[p] * (x[p] - mean) ** 2 for p in places) / (count - ddof)
    spread = math.sqrt(variance + eps) if root else math.sqrt(variance) + eps
    expected = np.zeros((2, 3))
    for p in places:
        expected[p] = (x[p] - mean) / spread
    weight = kind.floats(WHITE_WEIGHT) if weighted else None
    kind.close(adv.whiten(kind.floats(WHITE), kind.bools(WHITE_MASK), weight, ddof, eps, root), expected)


def test_whiten_adds_1e_8_to_the_variance_unless_told(eager):
    # ±1e-4 has the variance 1e-8 (ddof 0): as much again is added.
    white = adv.whiten(eager.floats([[1e-4, -1e-4]]), eager.bools([[1, 1]]), ddof=0.0)
    eager.close(white, [[math.sqrt(0.5), -math.sqrt(0.5)]], 1e-9)


def test_credit_and_whitening_widen_half_precision(eager):
    x, mask = eager.floats([[40000.0, 40000.0]], "float16"), eager.bools([[1, 1]])
    eager.close(adv.reward_to_go(x, mask), [[80000.0, 40000.0]], 1e-6)
    eager.close(adv.combine_rewards(x, eager.floats([1.0, 1.0]))[0], [80000.0], 1e-6)
    eager.close(adv.whiten(x, mask), [[0.0, 0.0]])
    eager.close(adv.optimal_token_baseline(x, eager.floats([[1.0, 1.0]]), mask, eager.ints([0])), [[0.0, 0.0]])


def test_whitened_numbers_have_mean_0_and_variance_1(eager):
    white = plain(adv.whiten(eager.floats([[1.0, 2.0, 7.0, 4.0]]), eager.bools([[1] * 4]), ddof=0.0, eps=0.0))
    np.testing.assert_allclose([white.mean(), white.std()], [0.0, 1.0], atol=1e-12)


def test_whitening_shifts_a_group_without_signal(eager):
    eager.close(adv.whiten(eager.floats([[0.0, 0.0, 3.0]]), eager.bools([[1] * 3]), eps=0.0)[0, 0], -1 / math.sqrt(3))


@pytest.mark.parametrize(("eps", "root"), [(1e-8, True), (0.0, True), (0.0, False)])
def test_whitening_nothing_or_equal_numbers_gives_zero(kind, eps, root):
    x = kind.floats([[0.5, 0.5], [0.5, NAN]])
    assert not plain(adv.whiten(x, kind.bools([[1, 1], [1, 0]]), None, 1.0, eps, root)).any()
    assert not plain(adv.whiten(x, kind.bools([[0, 0], [0, 0]]), None, 1.0, eps, root)).any()
    assert not plain(adv.whiten(x, kind.bools([[0, 1], [0, 0]]), None, 1.0, eps, root)).any()


@pytest.mark.parametrize("value", [0.1, 1000.1])
def test_whitening_equal_numbers_whose_mean_rounds_gives_zero(kind, value):
    assert not plain(adv.whiten(kind.floats([[value] * 7], "float32"), kind.bools([[1] * 7]))).any()


# --- the three kinds -------------------------------------------------------------------------------------------------


def test_the_three_kinds_agree():
    results = {}
    for name, kind in KINDS.items():
        value, group, weight, length = batch(kind)
        results[name] = [
            plain(adv.group_mean(value, group, weight)),
            plain(adv.leave_one_out(value, group, weight)),
            plain(adv.length_weighted_mean(value, group, length, weight)),
            plain(adv.runner_up(value, group, weight)),
            plain(adv.group_std(value, group, weight)),
            plain(adv.batch_std(value, weight)),
        ]
    for name in ("torch", "jax"):
        np.testing.assert_allclose(results[name], results["numpy"], rtol=1e-12, atol=1e-12)


def test_advantages_differentiate_to_nothing_strange():
    # A reward model's gradient through a group mean: dA_i/dr_j = δ_ij − 1/G.
    group = jnp.asarray([0, 0, 0, 1])
    jacobian = jax.jacobian(lambda r: r - adv.group_mean(r, group))(jnp.asarray([1.0, 2.0, 4.0, 3.0]))
    expected = np.zeros((4, 4))
    expected[:3, :3] = np.eye(3) - 1 / 3
    np.testing.assert_allclose(jacobian, expected, atol=1e-12)
