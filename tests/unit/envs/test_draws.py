"""What actions are drawn with, one generator an episode."""

import numpy as np
import pytest
from gymnasium import spaces

from grpo.envs.draws import AHEAD, EpisodeDraws
from grpo.envs.heads import make_head

SPACES = {
    "categorical": (spaces.Discrete(3), "auto"),
    "several": (spaces.MultiDiscrete([2, 3]), "auto"),
    "gaussian": (spaces.Box(-1, 1, (2,)), "gaussian"),
    "beta": (spaces.Box(-1, 1, (2,)), "beta"),
}


def tries(head, draws, rows, steps, first=0):
    """What each row decides, step after step; a row ends after as many steps as its place says."""
    out = np.random.default_rng(0).normal(size=(8, head.size)).astype(np.float32)
    found = {row: [] for row in rows}
    for step in range(steps):
        live = [row for row in rows if step < 30 + 10 * row]
        recorded, _ = head.sample(out[live], draws.of([row - first for row in live]))
        for row, action in zip(live, recorded, strict=True):
            found[row].append(action)
    return found


@pytest.mark.parametrize("kind", SPACES)
def test_an_episode_draws_the_same_whoever_plays_beside_it(kind):
    head, steps = make_head(*SPACES[kind]), AHEAD + 20
    everyone = tries(head, EpisodeDraws((3, 1), range(8)), range(8), steps)
    some = tries(head, EpisodeDraws((3, 1), range(5, 8)), range(5, 8), steps, first=5)
    for row in range(5, 8):
        np.testing.assert_array_equal(everyone[row], some[row])
    assert not np.array_equal(everyone[5][:30], everyone[6][:30])  # and each its own
    other = tries(head, EpisodeDraws((3, 2), range(8)), range(8), steps)
    assert not np.array_equal(everyone[5], other[5])


def test_draws_are_what_they_are_called():
    draws = EpisodeDraws((0,), range(50))
    uniform = np.concatenate([draws.random(100) for _ in range(200)])
    normal = np.concatenate([draws.standard_normal((50, 2), dtype=np.float32) for _ in range(200)])
    beta = np.concatenate([draws.beta(np.full((50, 1), 2.0), np.full((50, 1), 6.0)) for _ in range(200)])
    assert normal.dtype == np.float32
    # 20,000 or 10,000 numbers each: five deviations of the mean.
    assert abs(uniform.mean() - 1 / 2) < 5 * 0.289 / 20_000**0.5 and uniform.min() >= 0 and uniform.max() < 1
    assert abs(normal.mean()) < 5 / 20_000**0.5 and abs(normal.std() - 1) < 5 / 40_000**0.5
    assert abs(beta.mean() - 1 / 4) < 5 * 0.145 / 10_000**0.5
    assert len(np.unique(uniform)) == len(uniform)


def test_numbers_are_of_the_type_that_was_asked_for_whatever_was_before():
    draws = EpisodeDraws((0,), range(3))
    for dtype in (np.float32, np.float64, np.float32):
        assert draws.standard_normal((3, 2), dtype=dtype).dtype == dtype
