"""The serial fleet plays as the environments do by themselves, and lays out what they see."""

import inspect
import warnings

import gymnasium as gym
import numpy as np
import pytest

from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory, make_fleet
from grpo.envs.serial import SerialFleet


class Mirror(gym.Env):
    """Shows what it was given: the last action is its observation, and `info` is what it was told to say."""

    def __init__(self, space, info=None):
        self.action_space, self.observation_space, self.info = space, space, info or {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.action_space.seed(seed)
        return self.action_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not what the space samples"
        self.given = action
        return np.array(action, self.action_space.dtype), 0.5, False, False, self.info


SPACES = [
    gym.spaces.Discrete(3),
    gym.spaces.Discrete(3, start=-1),
    gym.spaces.MultiDiscrete([2, 3]),
    gym.spaces.MultiBinary(4),
    gym.spaces.Box(-1, 1, (2,), np.float32),
    gym.spaces.Box(-1, 1, (2, 2), np.float64),
    gym.spaces.Box(0, 255, (2,), np.uint8),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_actions_arrive_as_the_space_samples_them(space):
    fleet = SerialFleet([Mirror(space), Mirror(space)])
    fleet.reset([0, 1], [1, 2])
    actions = np.array([space.sample(), space.sample()])
    stepped = fleet.step([0, 1], actions)
    assert not stepped.errors
    np.testing.assert_array_equal(stepped.observation, actions)
    assert stepped.observation.dtype == space.dtype
    assert stepped.observation.shape == (2, *space.shape)


def test_an_environment_may_write_into_its_action():
    class Scribbler(Mirror):
        def step(self, action):
            answer = super().step(action)
            action[:] = 0
            return answer

    given = np.ones((1, 2), np.float32)
    fleet = SerialFleet([Scribbler(SPACES[4])])
    fleet.reset([0], [1])
    fleet.step([0], given)
    assert given.all()
    assert fleet.take(0, state=False).actions.all()


def test_a_float_may_leave_its_box_but_not_the_numbers():
    class Loose(Mirror):
        def step(self, action):
            return np.clip(action, -1, 1), 0.0, False, False, {}

    fleet = SerialFleet([Loose(SPACES[4]), Loose(SPACES[4])])
    fleet.reset([0, 1], [1, 2])
    stepped = fleet.step([0, 1], np.array([[7, 0], [np.nan, 0]]))
    assert list(stepped.errors) == [1]
    np.testing.assert_array_equal(stepped.observation[0], [1, 0])


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "LunarLander-v3"])
def test_plays_as_the_environment_does_alone(id):
    """Three members, of which one rests every other turn."""
    fleet = SerialFleet(EnvFactory(id), 3)
    alone = [gym.make(id) for _ in range(3)]
    begun = fleet.reset([2, 0, 1], [7, 7, 9])
    expected = [alone[m].reset(seed=s)[0] for m, s in ((2, 7), (0, 7), (1, 9))]
    np.testing.assert_array_equal(begun.observation, expected)
    alone[0].action_space.seed(3)
    live = {0, 1, 2}
    for turn in range(30):
        members = sorted(live - ({1} if turn % 2 else set()))
        actions = [alone[0].action_space.sample() for _ in members]
        if not members:
            break
        stepped = fleet.step(members, np.array(actions))
        for at, (m, action) in enumerate(zip(members, actions, strict=True)):
            observation, reward, terminated, truncated, _ = alone[m].step(action)
            np.testing.assert_array_equal(stepped.observation[at], observation)
            ends = stepped.terminated_M[at], stepped.truncated_M[at]
            assert (stepped.reward_M[at], *ends) == (reward, terminated, truncated)
            if terminated or truncated:
                live.remove(m)
                assert fleet.step([m], [action]).errors == {
                    0: f"{id} member {m}: its episode has ended; reset it first"
                }


def test_dicts_are_trees_without_their_words():
    fleet = SerialFleet(EnvFactory("MiniGrid-Empty-5x5-v0"), 2)
    begun = fleet.reset([0, 1], [1, 2])
    assert {key: (array.shape, array.dtype) for key, array in begun.observation.items()} == {
        "direction": ((2,), np.int64),
        "image": ((2, 7, 7, 3), np.uint8),
    }
    assert set(fleet.observation_space.spaces) == {"direction", "image"}
    alone = gym.make("MiniGrid-Empty-5x5-v0")
    np.testing.assert_array_equal(begun.observation["image"][1], alone.reset(seed=2)[0]["image"])


def test_tuples_are_dicts_of_their_numbers():
    fleet = SerialFleet(EnvFactory("Blackjack-v1"), 2)
    observation = fleet.reset([0, 1], [1, 2]).observation
    assert list(observation) == ["0", "1", "2"]
    alone = gym.make("Blackjack-v1")
    assert [observation[key][1] for key in observation] == list(alone.reset(seed=2)[0])


@pytest.mark.parametrize(
    "info, told", [({}, None), ({"is_success": True}, 1.0), ({"success": np.float64(0)}, 0.0), ({"is_success": 1}, 1.0)]
)
def test_success_is_told_or_not(info, told):
    fleet = SerialFleet([Mirror(SPACES[0], info)])
    fleet.reset([0], [1])
    success_M = fleet.step([0], [1]).success_M
    assert success_M is None if told is None else success_M[0] == told


def test_success_of_some_leaves_the_others_unknown():
    fleet = SerialFleet([Mirror(SPACES[0], {"success": True}), Mirror(SPACES[0])])
    fleet.reset([0, 1], [1, 2])
    np.testing.assert_array_equal(fleet.step([0, 1], [1, 1]).success_M, [1, np.nan])


@pytest.mark.parametrize("members", [[0, 0], [2], [-1]])
def test_members_are_distinct_and_known(members):
    fleet = SerialFleet([Mirror(SPACES[0]), Mirror(SPACES[0])])
    with pytest.raises(EnvError, match="members must be distinct numbers from 0 to 1"):
        fleet.reset(members, [1] * len(members))


def test_nobody_moves_before_a_reset_and_none_is_a_call():
    fleet = SerialFleet([Mirror(SPACES[0]), Mirror(SPACES[0])])
    assert fleet.step([1], [0]).errors == {0: "Mirror member 1: it has no episode yet; reset it first"}
    assert fleet.reset([], []).observation.shape == (0,)
    assert fleet.step([], []).reward_M.shape == (0,)
    with pytest.raises(EnvError, match="1 starts for 2 members"):
        fleet.reset([0, 1], [5])


def test_a_factory_must_make_new_ones():
    one = Mirror(SPACES[0])
    begun = SerialFleet(lambda: one, 2).reset([0, 1], [1, 2])
    assert "it must make a new one whenever it is called" in begun.errors[1]


def test_members_must_be_alike():
    kinds = iter(SPACES)
    begun = SerialFleet(lambda: Mirror(next(kinds)), 2).reset([0, 1], [1, 2])
    assert begun.errors == {
        1: "Mirror member 1, reset: its observation space is Discrete(3, start=-1), the fleet's Discrete(3)"
    }


def test_a_space_that_changes_at_a_reset_is_named():
    fleet = SerialFleet([Mirror(gym.spaces.Discrete(3))])
    fleet.reset([0], [1])
    fleet._members[0].env.observation_space = gym.spaces.Box(0, 1, (4,))
    error = fleet.reset([0], [1]).errors[0]
    assert "its observation space is Box(0.0, 1.0, (4,), float32), the fleet's Discrete(3)" in error


def test_integers_are_taken_for_other_integers_only_where_they_fit():
    class Wide(Mirror):
        def step(self, action):
            return np.array([3, 4 if self.given is None else 400]), 0.0, False, False, {}

    env = Wide(SPACES[6])
    env.given = None
    fleet = SerialFleet([env])
    fleet.reset([0], [1])
    stepped = fleet.step([0], np.zeros((1, 2), np.uint8))
    assert stepped.observation.dtype == np.uint8 and list(stepped.observation[0]) == [3, 4]
    env.given = 1
    assert "observation is int64, its space uint8" in fleet.step([0], np.zeros((1, 2), np.uint8)).errors[0]


class Endless(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_a_limit_that_nobody_asked_for_is_said_once(monkeypatch):
    monkeypatch.setattr("grpo.envs.make.DEFAULT_HORIZON", 3)
    said = []
    for horizon in (None, 3):
        fleet = make_fleet(Endless, 2, kind="serial", horizon=horizon)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                fleet.reset([0, 1], [0, 1])
                ends = [fleet.step([0, 1], [0, 0]).truncated_M.all() for _ in range(3)]
                assert ends == [False, False, True]
        said += [str(one.message) for one in caught]
    (only,) = said
    assert only == (
        "Endless: an episode did not end by itself and was cut after 3 steps, as all such will be; max_episode_steps "
        "chooses another limit"
    )


class Broken(Endless):
    def step(self, action):
        raise KeyError("goal")


def test_what_an_environment_raises_names_its_file_and_line():
    number = inspect.getsourcelines(Broken.step)[1] + 1
    with pytest.raises(EnvError, match=rf"Broken member 0, step 1: KeyError: 'goal' \(.*test_serial.py:{number}\)"):
        make_fleet(Broken, 1, kind="serial")
