"""What to watch while learning, on constructed decisions."""

import math

import numpy as np
import pytest

from grpo.core import diagnostics
from grpo.core.reductions import count
from tests.golden import beyond
from tests.unit.conftest import plain

NAN = float("nan")

RATIO = [[0.5, 0.8, 1.0, 1.3, 3.0, 4.0]]
POSITIVE, NEGATIVE, NONE = [[0.5] * 6], [[-0.5] * 6], [[0.0] * 6]


def flags(array):
    assert "bool" in str(array.dtype)
    return plain(array)[0].astype(int).tolist()


def test_clipped_low_needs_a_negative_advantage(kind):
    ratio = kind.floats(RATIO)
    assert flags(diagnostics.clipped_low(ratio, kind.floats(NEGATIVE), 0.2)) == [1, 0, 0, 0, 0, 0]
    assert flags(diagnostics.clipped_low(ratio, kind.floats(POSITIVE), 0.2)) == [0] * 6
    assert flags(diagnostics.clipped_low(ratio, kind.floats(NONE), 0.2)) == [0] * 6


def test_clipped_high_needs_a_positive_advantage(kind):
    ratio = kind.floats(RATIO)
    assert flags(diagnostics.clipped_high(ratio, kind.floats(POSITIVE), 0.3)) == [0, 0, 0, 0, 1, 1]
    assert flags(diagnostics.clipped_high(ratio, kind.floats(NEGATIVE), 0.3)) == [0] * 6
    assert flags(diagnostics.clipped_high(ratio, kind.floats(NONE), 0.3)) == [0] * 6


def test_dual_clip_binds_needs_a_negative_advantage(kind):
    ratio = kind.floats(RATIO)
    assert flags(beyond.dual_clip_binds(ratio, kind.floats(NEGATIVE), 3.0)) == [0, 0, 0, 0, 0, 1]
    assert flags(beyond.dual_clip_binds(ratio, kind.floats(POSITIVE), 3.0)) == [0] * 6
    assert flags(beyond.dual_clip_binds(ratio, kind.floats(NONE), 3.0)) == [0] * 6


@pytest.mark.parametrize("flag", [diagnostics.clipped_low, diagnostics.clipped_high, beyond.dual_clip_binds])
def test_flags_name_an_advantage_of_wrong_shape(kind, flag):
    with pytest.raises(ValueError, match=r"^advantage has shape \(1, 1\), expected \(1, 6\)"):
        flag(kind.floats(RATIO), kind.floats([[1.0]]), 0.2)


FLAG, MASK = [[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_share_is_over_the_decisions_that_count(kind):
    mask = kind.bools(MASK)
    assert float(diagnostics.share(kind.bools(FLAG), mask, count(mask, True))) == pytest.approx(3 / 5, abs=1e-7)


def test_shares_of_micro_batches_add_up(kind):
    flag, mask = kind.bools(FLAG), kind.bools(MASK)
    over = count(mask, True)
    parts = [float(diagnostics.share(flag[i : i + 1], mask[i : i + 1], over)) for i in range(3)]
    assert parts == pytest.approx([2 / 5, 1 / 5, 0.0], abs=1e-7)


def test_row_share(kind):
    kind.close(beyond.row_share(kind.bools(FLAG), kind.bools(MASK)), [[2 / 3], [1 / 2], [0.0]], 1e-7)


def test_approx_kl_is_the_mean_of_old_minus_new(kind):
    log_ratio, mask = kind.floats([[0.5, -2.0, NAN], [0.25, NAN, NAN]]), kind.bools([[1, 1, 0], [1, 0, 0]])
    kind.close(diagnostics.approx_kl(log_ratio, mask, count(mask, True)), (-0.5 + 2.0 - 0.25) / 3)


def test_approx_kl_is_a_kl_in_expectation(eager):
    old, new = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.3, 0.4])
    # One sample in ten a decision: old's 2, 5 and 3 of ten.
    log_ratio = np.repeat(np.log(new / old), [2, 5, 3])
    mask = eager.bools([[1] * 10])
    exact = sum(p * math.log(p / q) for p, q in zip(old, new, strict=True))
    eager.close(diagnostics.approx_kl(eager.floats([log_ratio]), mask, count(mask, True)), exact)


def test_approx_kl_takes_no_gradient(autodiff):
    mask = autodiff.bools([[1, 1]])
    over = count(mask, True)
    assert not autodiff.gradient(lambda x: diagnostics.approx_kl(x, mask, over), [[0.5, -1.0]]).any()
