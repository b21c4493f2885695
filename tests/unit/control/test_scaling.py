"""Running scaling of observations."""

import gymnasium as gym
import numpy as np

from grpo.control.scaling import LIMIT, Scaling

BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)


def test_parts_add_up_to_the_whole():
    x = np.random.default_rng(0).normal([1.0, -50.0, 0.0], [2.0, 10.0, 0.01], (1000, 3)).astype(np.float32)
    one, many = Scaling(BOX, True), Scaling(BOX, True)
    one.update(x)
    for part in np.split(x, [1, 10, 500]):
        many.update(part)
    np.testing.assert_allclose(many.mean[""], x.astype(float).mean(0), rtol=1e-6)
    np.testing.assert_allclose(many.square[""], x.astype(float).var(0), rtol=1e-6)
    np.testing.assert_allclose(one(x), many(x), rtol=1e-5, atol=1e-5)
    scaled = one(x)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose([scaled.mean(0), scaled.std(0)], [[0] * 3, [1] * 3], atol=1e-2)


def test_outliers_are_limited_and_off_means_untouched():
    scaling = Scaling(BOX, True)
    scaling.update(np.random.default_rng(0).normal(size=(100, 3)))
    assert scaling(np.full((1, 3), 1e6)).max() == LIMIT
    off, x = Scaling(BOX, False), np.ones((2, 3))
    off.update(x)
    assert off(x) is x and off.tree() == (None, None)


def test_only_continuous_parts_of_a_dict_are_scaled():
    space = gym.spaces.Dict(
        {"speed": BOX, "picture": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8), "n": gym.spaces.Discrete(4)}
    )
    scaling = Scaling(space, True)
    tree = {"speed": np.full((5, 3), 7.0), "picture": np.zeros((5, 8, 8, 3), np.uint8), "n": np.arange(5)}
    scaling.update(tree)
    seen = scaling(tree)
    assert seen["picture"] is tree["picture"] and seen["n"] is tree["n"]
    np.testing.assert_allclose(seen["speed"], 0)
    assert set(scaling.tree()[0]) == {"speed"}


def test_saved_and_loaded():
    scaling, other = Scaling(BOX, True), Scaling(BOX, True)
    scaling.update(np.random.default_rng(0).normal(size=(10, 3)))
    other.load(scaling.count, scaling.arrays())
    more = np.random.default_rng(1).normal(size=(10, 3))
    scaling.update(more)
    other.update(more)
    np.testing.assert_array_equal(scaling.mean[""], other.mean[""])
    np.testing.assert_array_equal(scaling.square[""], other.square[""])
