"""From decisions to one number, and the promise that parts add up to the whole."""

import random

import numpy as np
import pytest

from grpo.core import reductions
from grpo.core.reductions import count
from tests.unit.conftest import plain

NAN = float("nan")

X = [[1.0, 2.0, NAN], [4.0, NAN, 8.0], [NAN, NAN, NAN], [16.0, 32.0, 64.0]]
MASK = [[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1]]
TOTAL = 127.0

REDUCTIONS = {
    "token_mean": reductions.token_mean,
    "sequence_mean": reductions.sequence_mean,
    "sequence_sum": reductions.sequence_sum,
    "fixed_length": reductions.fixed_length,
}


# --- denominators ----------------------------------------------------------------------------------------------------


def test_count_with_and_without_empty_rows(kind):
    mask = kind.bools(MASK)
    assert count(mask, count_empty_rows=True)[:3] == (7.0, 4.0, 7.0)
    assert count(mask, count_empty_rows=False)[:3] == (7.0, 3.0, 7.0)


def test_count_of_selected_decisions_is_that_of_those_that_count(kind):
    selected = kind.bools([[1, 0, 1], [1, 1, 0], [1, 1, 1], [0, 0, 1]])
    over = count(kind.bools(MASK), True, selected)
    assert (over.tokens, over.selected) == (7.0, 3.0)


def test_count_takes_the_length_and_never_the_padding(kind):
    assert count(kind.bools(MASK), True).length == 1.0
    assert count(kind.bools(MASK), True, length=50.0).length == 50.0


def test_count_of_rows_that_are_present(kind):
    mask, present = kind.bools([*MASK, [0, 0, 0]]), kind.bools([1, 1, 1, 1, 0])
    assert count(mask, count_empty_rows=True).rows == 5.0
    assert count(mask, True, present_N=present).rows == 4.0  # the last row was dropped
    assert count(mask, False, present_N=present).rows == 3.0


def test_counts_are_plain_floats_and_never_below_one(kind):
    nothing = kind.bools([[0, 0], [0, 0]])
    over = count(nothing, count_empty_rows=False, selected_NT=nothing)
    assert over[:3] == (1.0, 1.0, 1.0)
    assert all(type(number) is float for number in over)


def test_count_refuses_a_flat_mask(kind):
    with pytest.raises(ValueError, match=r"^mask has shape \(3,\), expected 2 dim"):
        count(kind.bools([1, 1, 0]), True)


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "empty", "expected"),
    [
        ("token_mean", True, TOTAL / 7),
        ("sequence_mean", True, (1.5 + 6.0 + 0.0 + 112 / 3) / 4),
        ("sequence_mean", False, (1.5 + 6.0 + 112 / 3) / 3),
        ("sequence_sum", True, TOTAL / 4),
        ("sequence_sum", False, TOTAL / 3),
        ("fixed_length", True, TOTAL / (4 * 10)),
        ("fixed_length", False, TOTAL / (3 * 10)),
    ],
)
def test_closed_forms(kind, name, empty, expected):
    mask = kind.bools(MASK)
    kind.close(REDUCTIONS[name](kind.floats(X), mask, count(mask, empty, length=10.0)), expected)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("empty", [False, True])
def test_everything_masked_is_zero(kind, name, empty):
    nothing = kind.bools([[0] * 3] * 4)
    assert float(REDUCTIONS[name](kind.floats(X), nothing, count(nothing, empty))) == 0.0


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("token_mean", [1 / 7, 1 / 7, 1 / 7]),
        ("sequence_mean", [1 / 8, 1 / 8, 1 / 12]),
        ("sequence_sum", [1 / 4, 1 / 4, 1 / 4]),
        ("fixed_length", [1 / 40, 1 / 40, 1 / 40]),
    ],
)
def test_what_a_decision_weighs(autodiff, name, shares):
    mask = autodiff.bools(MASK)
    over = count(mask, True, length=10.0)
    gradient = autodiff.gradient(lambda x: REDUCTIONS[name](x, mask, over), X)
    per_row = [shares[0], shares[1], 0.0, shares[2]]
    np.testing.assert_allclose(gradient, np.array(MASK) * np.array(per_row)[:, None], rtol=1e-12, atol=0)


def test_half_precision_is_summed_in_float32(kind):
    x, mask = kind.floats([[60000.0, 60000.0]], "float16"), kind.bools([[1, 1]])
    for reduction in REDUCTIONS.values():
        assert np.isfinite(plain(reduction(x, mask, count(mask, True)))).all()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_name_a_mask_of_wrong_shape(kind, name):
    mask = kind.bools(MASK)
    with pytest.raises(ValueError, match=r"^mask has shape \(4, 1\), expected \(4, 3\)"):
        REDUCTIONS[name](kind.floats(X), mask[:, :1], count(mask, True))


# --- parts add up to the whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_add_up_to_the_whole(kind, name, empty, seed):
    rows, dice = 8, random.Random(seed)
    x = kind.floats([[dice.gauss(0, 1) for _ in range(4)] for _ in range(rows)])
    mask = kind.bools([[dice.random() < 0.6 for _ in range(4)] for _ in range(rows - 1)] + [[0] * 4])
    over = count(mask, empty, length=9.0)
    order = dice.sample(range(rows), rows)
    cuts = [4] if kind.name == "jax" else sorted(dice.sample(range(1, rows), dice.randint(1, rows - 1)))
    parts = [kind.ints(order[a:b]) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    whole = float(REDUCTIONS[name](x, mask, over))
    assert whole != 0
    assert sum(float(REDUCTIONS[name](x[p], mask[p], over)) for p in parts) == pytest.approx(whole, rel=1e-12)


def test_the_mean_of_micro_batch_means_is_something_else(kind):
    # What the global denominator is for: rows of 1 and 3 decisions, averaged one by one.
    x, mask = kind.floats([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), kind.bools([[1, 0, 0], [1, 1, 1]])
    each = [reductions.token_mean(x[i : i + 1], mask[i : i + 1], count(mask[i : i + 1], True)) for i in range(2)]
    assert float(sum(each)) / 2 == 2.0
    assert float(reductions.token_mean(x, mask, count(mask, True))) == 1.5
