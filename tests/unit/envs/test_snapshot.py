"""A moment that is restored has the same future, bit for bit, or there is no such moment."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, TimeLimit

from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory
from grpo.envs.processes import ProcessFleet
from grpo.envs.serial import SerialFleet, self_test
from grpo.envs.snapshot import same
from tests.faults import envs

REPLAYED = (
    *("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "FrozenLake-v1", "Taxi-v4", "CliffWalking-v1"),
    *("Blackjack-v1", "LunarLander-v3", "MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0"),
)
WRITTEN = ("InvertedPendulum-v5", "Hopper-v5", "HalfCheetah-v5", "Ant-v5")
HORIZON = 25


def play(fleet, members, actions):
    """What members see, are paid and how they end, with the same actions, until the first end."""
    tape = []
    for action in actions:
        stepped = fleet.step(members, np.array([action] * len(members)))
        assert not stepped.errors, stepped.errors
        tape.append(stepped)
        if (stepped.terminated_M | stepped.truncated_M).any():
            break
    return tape


def row(tree, at):
    return {key: row(part, at) for key, part in tree.items()} if isinstance(tree, dict) else tree[at]


def agree(tape, copies, at):
    """Every step of the tape equals that of the copy at this position."""
    assert len(tape) == len(copies)
    for one, other in zip(tape, copies, strict=True):
        assert same(row(one.observation, 0), row(other.observation, at))
        for name in ("reward_M", "terminated_M", "truncated_M"):
            assert getattr(one, name)[0] == getattr(other, name)[at]


def branch(fleet, before, targets=(1, 2), seed=5):
    """Keep member 0 after `before` steps or as late as it lives, restore it into others, compare to the end."""
    fleet.action_space.seed(seed)
    actions = [fleet.action_space.sample() for _ in range(HORIZON + 1)]
    fleet.reset([0, *targets], [seed, *(seed + 1 + i for i in range(len(targets)))])
    lived = len(play(fleet, [0], actions))
    before = min(before, lived - 1)
    first = fleet.reset([0], [seed]).observation
    lead = play(fleet, [0], actions[:before])
    moment = fleet.snapshot([0])[0]
    play(fleet, targets, actions[7:8])  # they are elsewhere
    begun = fleet.restore(targets, [moment] * len(targets))
    assert not begun.errors
    tape, copies = play(fleet, [0], actions[before:]), play(fleet, targets, actions[before:])
    assert len(moment.actions) == before and len(tape) == lived - before
    for at in range(len(targets)):
        assert same(row(lead[-1].observation if lead else first, 0), row(begun.observation, at))
        agree(tape, copies, at)
    return moment


@pytest.mark.parametrize("id", REPLAYED + WRITTEN)
def test_a_restored_member_has_the_same_future(id):
    """To the end of the episode, so that the steps it had left are restored as well."""
    fleet = SerialFleet(EnvFactory(id, horizon=HORIZON), 3)
    for before in (0, 1, 9):
        moment = branch(fleet, before)
        assert (moment.state is not None) == (id in WRITTEN)
    assert fleet.branching() == ("state" if id in WRITTEN else "replay")


def test_a_moment_outlives_its_episode_and_is_not_used_up():
    fleet = SerialFleet(EnvFactory("Hopper-v5", horizon=HORIZON), 2)
    fleet.reset([0, 1], [1, 2])
    actions = [fleet.action_space.sample() for _ in range(12)]
    play(fleet, [0], actions[:4])
    moment = fleet.snapshot([0])[0]
    tapes = [play(fleet, [0], actions[4:])]
    for _ in range(2):
        fleet.restore([0], [moment])
        tapes.append(play(fleet, [0], actions[4:]))
    agree(tapes[0], tapes[1], 0)
    agree(tapes[0], tapes[2], 0)
    later = fleet.restore([1], [moment]) and play(fleet, [1], actions[4:6]) and fleet.snapshot([1])[0]
    assert later.seed == 1
    np.testing.assert_array_equal(later.actions, actions[:6])


def test_moments_travel_between_processes():
    for id in ("FrozenLake-v1", "Hopper-v5"):
        fleet = ProcessFleet(EnvFactory(id, horizon=HORIZON), 2, workers=2, timeout=60)
        assert fleet.branching() == ("state" if id == "Hopper-v5" else "replay")
        moment = branch(fleet, 3, targets=(1,))
        assert (moment.state is not None) == (id == "Hopper-v5")
        fleet.close()


class Kept(envs.Walk):
    """A walk whose author wrote down how to keep it."""

    def get_state(self):
        return {"at": self.at, "steps": self.steps, "random": self._numbers()}

    def set_state(self, state):
        assert type(state["steps"]) is int
        self.at, self.steps = state["at"], state["steps"]
        self.np_random.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": self._whole(state["random"][:2]), "inc": self._whole(state["random"][2:4])},
            "has_uint32": 0,
            "uinteger": 0,
        }

    def _numbers(self):
        words = self.np_random.bit_generator.state["state"].values()
        return np.array([part for word in words for part in (word >> 64, word & (2**64 - 1))], np.uint64)

    def _whole(self, halves):
        return (int(halves[0]) << 64) + int(halves[1])


class Careless(Kept):
    """Forgets the generator."""

    def set_state(self, state):
        self.at, self.steps = state["at"], state["steps"]


class Moody(Kept):
    """Keeps what cannot be kept."""

    def get_state(self):
        return {"generator": self.np_random}


class Failing(Kept):
    """Cannot do it after all."""

    def get_state(self):
        raise NotImplementedError


@pytest.mark.parametrize("env, kind", [(Kept, "state"), (Careless, "replay"), (Moody, "replay"), (Failing, "replay")])
def test_an_authors_own_state_is_used_if_it_is_proven(env, kind):
    assert self_test(EnvFactory(env)) == kind
    branch(SerialFleet(EnvFactory(env), 3), 4)


def test_a_wrapper_that_remembers_is_found_out():
    """Frames before the moment are in the wrapper, where no state of the environment reaches."""
    fleet = SerialFleet(lambda: TimeLimit(FrameStackObservation(Kept(), 3), HORIZON), 3)
    assert fleet.branching() == "replay"
    branch(fleet, 4)


@pytest.mark.parametrize("env", [envs.Forgetful, envs.Restless])
def test_what_does_not_repeat_itself_is_refused(env):
    with pytest.raises(
        EnvError, match=rf"{env.__name__} cannot be branched: it does not repeat itself: with seed \d+, its"
    ):
        self_test(EnvFactory(env))


def test_a_single_given_environment_is_not_disturbed_by_a_proof():
    fleet = SerialFleet([gym.make("CartPole-v1")])
    fleet.reset([0], [1])
    with pytest.raises(EnvError, match="only this one copy is known"):
        fleet.snapshot([0])
    assert not fleet.step([0], [1]).errors


def test_a_proof_leaves_episodes_alone():
    fleet = SerialFleet(EnvFactory(envs.Walk), 1)
    other = SerialFleet(EnvFactory(envs.Walk), 1)
    for one in (fleet, other):
        one.reset([0], [3])
        one.step([0], [1])
    fleet.snapshot([0])
    np.testing.assert_array_equal(fleet.step([0], [1]).observation, other.step([0], [1]).observation)


def test_a_snapshot_that_cannot_be_played_is_an_error_of_its_member():
    fleet = SerialFleet(EnvFactory(envs.Walk, {"length": 4}), 2)
    fleet.reset([0, 1], [1, 2])
    play(fleet, [0], [1, 1])
    moment = fleet.snapshot([0])[0]
    longer = type(moment)(moment.seed, np.ones(9, int))
    foreign = type(moment)(moment.seed, np.full(2, 7))
    begun = fleet.restore([0, 1], [longer, moment])
    assert list(begun.errors) == [0] and "before the 9 actions of the snapshot were used" in begun.errors[0]
    assert "actions that are not in Discrete(2)" in fleet.restore([0], [foreign]).errors[0]
    assert not fleet.reset([0], [1]).errors


def test_an_ended_episode_stays_ended():
    for env in (envs.Walk, Kept):
        fleet = SerialFleet(EnvFactory(env, {"length": 3}), 2)
        fleet.reset([0], [1])
        play(fleet, [0], [1, 1, 1])
        fleet.restore([1], fleet.snapshot([0]))
        assert "its episode has ended" in fleet.step([1], [1]).errors[0]


def test_there_is_no_moment_before_a_reset():
    fleet = SerialFleet(EnvFactory(envs.Walk), 1)
    with pytest.raises(EnvError, match="Walk member 0: it has no episode yet"):
        fleet.snapshot([0])
