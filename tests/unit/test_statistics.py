"""Intervals of a mean."""

import numpy as np
import pytest

from grpo.statistics import bootstrap, wilson


def test_the_interval_is_that_of_the_mean():
    value_E = np.random.default_rng(0).normal(10.0, 2.0, 400)
    low, high = bootstrap(value_E)
    half = 1.96 * value_E.std() / 20
    assert low == pytest.approx(value_E.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(value_E.mean() + half, abs=0.1 * half)
    assert bootstrap(value_E) == (low, high)
    narrow = bootstrap(value_E, 0.5)
    assert low < narrow[0] < narrow[1] < high
    assert bootstrap(np.array([3.0, 3.0])) == (3.0, 3.0) == bootstrap(np.array([3.0]))


def test_a_share_s_interval_is_wilsons():
    low, high = wilson(np.ones(20))
    assert high == 1.0 and low == pytest.approx(0.8389, abs=1e-3)
    low, high = wilson(np.repeat([0.0, 1.0], 10))
    assert (low, high) == (pytest.approx(0.2993, abs=1e-3), pytest.approx(0.7007, abs=1e-3))
