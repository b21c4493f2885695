"""Which tries of a group learn."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from grpo.core import selection
from tests.batches import MAKERS


def chosen(mask):
    return np.flatnonzero(np.asarray(mask)).tolist()


@pytest.mark.parametrize("kind", MAKERS)
def test_the_most_varied_are_those_of_the_largest_variance_among_all_choices(kind):
    random = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 7):
        value = random.choice([0.0, 0.1, 0.5, 1.0, 3.0], size=16) if count % 2 else random.normal(size=16)
        group = np.repeat([4, -1], 8)[random.permutation(16)]
        got = np.asarray(selection.most_varied(MAKERS[kind](value), MAKERS[kind](group), count))
        for number in (4, -1):
            rows = np.flatnonzero(group == number)
            best = max(value[list(some)].var() for some in combinations(rows, count))
            assert got[rows].sum() == count
            np.testing.assert_allclose(value[rows][got[rows]].var(), best, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", MAKERS)
def test_extremes_and_smallest_by_hand(kind):
    value, group = MAKERS[kind](np.array([3.0, 1.0, 2.0, 9.0, 7.0, 8.0])), MAKERS[kind](np.array([0, 0, 0, 1, 1, 1]))
    assert chosen(selection.extremes(value, group, 2)) == [0, 1, 3, 4]
    assert chosen(selection.extremes(value, group, 1)) == [0, 3]  # an odd number: one best more
    assert chosen(selection.smallest(value, group, 2)) == [1, 2, 4, 5]
    assert chosen(selection.smallest(value, group, 5)) == [0, 1, 2, 3, 4, 5]


def test_tries_without_a_reward_are_chosen_last():
    value, group, weight = np.array([np.nan, 1.0, 5.0, np.nan, 3.0]), np.zeros(5, int), np.array([0.0, 1, 1, 0, 1])
    for choose in (selection.most_varied, selection.extremes):
        assert chosen(choose(value, group, 2, weight)) == [1, 2]
        assert chosen(choose(value, group, 4, weight)) == [0, 1, 2, 4]
    assert chosen(selection.smallest(value, group, 2, weight)) == [1, 4]
    assert chosen(selection.most_varied(value, group, 2, weight * 0)) == [0, 1]


def test_equal_rewards_take_the_first_and_as_many_of_both_ends():
    assert selection.most_varied(np.ones(6), np.zeros(6, int), 4).sum() == 4
    value = np.array([0.0, 0, 0, 0, 0, 1, 1, 1])
    assert chosen(selection.most_varied(value, np.zeros(8, int), 4)) == [0, 1, 6, 7]
