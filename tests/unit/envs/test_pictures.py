"""Pictures are bytes from the screen to the network: made smaller exactly, stacked in order, restored with the game."""

import gymnasium as gym
import numpy as np
import pytest

from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory, make_fleet
from grpo.envs.pictures import PictureObservation, drawn, pushed, smaller
from grpo.envs.serial import SerialFleet, self_test
from tests.unit.control.catch import CELL, SIDE, Catch

# --- smaller --------------------------------------------------------------------------------------------------------


def test_a_pixel_is_the_mean_of_what_it_covers():
    picture = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
    assert np.array_equal(smaller(picture, 2, 3), picture.reshape(2, 2, 3, 2).mean((1, 3)).astype(np.uint8))
    thirds = smaller(np.array([[0], [90], [180]], np.uint8), 2, 1)  # 0 and half of 90, half of 90 and 180
    assert thirds.tolist() == [[30], [150]]


@pytest.mark.parametrize("shape", [(210, 160), (210, 160, 3), (40, 30), (84, 84)])
def test_the_mean_brightness_stays(shape):
    picture = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    small = smaller(picture, 84, 84)
    assert small.shape == (84, 84, *shape[2:]) and small.dtype == np.uint8
    assert abs(small.mean() - picture.mean()) < 0.1


def test_a_stack_is_a_new_array_with_the_newest_last():
    stack = np.stack([np.full((2, 2), n, np.uint8) for n in range(3)])
    later = pushed(stack, np.full((2, 2), 9, np.uint8))
    assert later[:, 0, 0].tolist() == [1, 2, 9] and stack[:, 0, 0].tolist() == [0, 1, 2]


# --- what an environment draws --------------------------------------------------------------------------------------


def test_what_is_drawn_is_seen():
    env = PictureObservation(Catch(render_mode="rgb_array"), size=SIDE, stack=3, grey=True)
    assert env.observation_space == gym.spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8)
    first, _ = env.reset(seed=0)
    assert (first == first[0]).all(), "before the first step nothing else has been seen"
    second = env.step(1)[0]
    assert np.array_equal(second[:2], first[1:]) and second[2, 1].max() == 255, "the ball is a row further down"
    coloured = PictureObservation(Catch(render_mode="rgb_array"), size=SIDE * CELL)
    assert coloured.reset(seed=0)[0].shape == (SIDE * CELL, SIDE * CELL, 3)


def test_minigrid_in_pictures_is_a_fleet_that_branches():
    pytest.importorskip("minigrid")
    kwargs = {"id": "MiniGrid-Empty-5x5-v0", "agent_pov": True, "tile_size": 8, "size": 56}
    factory = EnvFactory("grpo.envs.pictures:drawn", kwargs)
    fleet = SerialFleet(factory, 2)
    begun = fleet.reset([0, 1], [3, 3])
    assert not begun.errors and begun.observation.shape == (2, 56, 56, 3) and begun.observation.dtype == np.uint8
    assert np.array_equal(begun.observation[0], begun.observation[1]) and len(np.unique(begun.observation)) > 3
    assert self_test(factory) == "replay"


@pytest.mark.parametrize("limit", [3, 250, None])
def test_episodes_are_as_long_as_asked_for(limit):
    """Pendulum is registered with 200 steps, and never ends by itself."""
    fleet = make_fleet(
        "grpo.envs.pictures:drawn", 1, kind="serial", kwargs={"id": "Pendulum-v1", "size": 4}, horizon=limit
    )
    fleet.reset([0], [0])
    steps = next(t for t in range(1, 1000) if fleet.step([0], np.zeros((1, 1), np.float32)).truncated_M[0])
    assert steps == fleet.horizon == (limit or 200)
    fleet.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"render_mode": "human"}, "rgb_array"), ({"size": 0}, "at least 1"), ({"stack": 0}, "at least 1")],
)
def test_what_cannot_be_drawn_says_so(settings, says):
    with pytest.raises(EnvError, match=says):
        drawn("CartPole-v1", **settings)


def test_what_draws_no_picture_is_told_what_it_drew(monkeypatch):
    monkeypatch.setattr(Catch, "render", lambda self: np.zeros((SIDE, SIDE), np.float32))
    with pytest.raises(EnvError, match=rf"gave float32 of shape \({SIDE}, {SIDE}\), not a picture"):
        PictureObservation(Catch(render_mode="rgb_array")).reset(seed=0)
