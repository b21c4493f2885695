"""Streams of episodes go on and come back to where they were; whole episodes are played by the members there are."""

import numpy as np
import pytest

from grpo.envs.action_repeat import ActionRepeat
from grpo.envs.copies import EnvCopies
from grpo.envs.episodes import RESETS, CannotBegin, EpisodeRunner, EpisodeStream
from grpo.envs.fleet import Begun
from grpo.envs.make import make_fleet
from grpo.envs.rules import EpisodeRules
from grpo.envs.serial import SerialFleet
from tests.faults import envs

STEPS = 10
"""Of an episode of `Walk`, whatever is done."""


def seed_of(stream, number):
    return 100 * stream + number


def walk(size=2):
    return SerialFleet(envs.Walk, size)


def ahead(stream, steps):
    """Each stream so many steps on; episodes that are over begin anew first."""
    everyone = np.arange(len(stream))
    for _ in range(steps):
        if stream.over_S.any():
            stream.begin(np.flatnonzero(stream.over_S))
        stepped = stream.step(everyone, np.ones(len(stream), int))
    return stepped


def test_a_stream_counts_whole_episodes_and_goes_on():
    stream = EpisodeStream(walk(), 2, seed_of)
    ahead(stream, 2 * STEPS + 3)
    assert stream.episodes == stream.ended == 4 and stream.env_steps == 2 * (2 * STEPS + 3)
    assert [length for _, length in stream.finished] == [STEPS] * 4 and stream.length_S.tolist() == [3, 3]
    assert stream.values()["seeds"] == [2, 102] and not stream.over_S.any() and not stream.failures


def test_a_stream_comes_back_to_where_it_was():
    one, other = (EpisodeStream(walk(), 2, seed_of) for _ in range(2))
    assert one.actions() == [] and other.load(one.values(), []) is None
    seen = ahead(one, STEPS + 4).observation
    np.testing.assert_array_equal(other.load(one.values(), one.actions()), seen)
    assert other.values() == one.values()
    np.testing.assert_array_equal(ahead(other, 1).observation, ahead(one, 1).observation)


def test_a_stream_whose_episode_is_over_begins_the_next_one_where_it_is_loaded():
    one, other = (EpisodeStream(walk(), 2, seed_of) for _ in range(2))
    ahead(one, STEPS)
    assert one.over_S.all()
    assert other.load(one.values(), one.actions()) is None
    ahead(other, 1)
    assert other.values()["seeds"] == [1, 101]


def test_states_that_say_less_are_taken_up():
    one, other = (EpisodeStream(walk(), 2, seed_of) for _ in range(2))
    ahead(one, 4)
    less = {name: one.values()[name] for name in ("begun", "return", "length", "finished", "seeds")}
    assert other.load(less, one.actions()) is not None
    assert not other.over_S.any() and other.actions()[1].tolist() == [1, 1, 1, 1]


def test_a_stream_that_cannot_begin_says_so_after_a_few_tries(monkeypatch):
    fleet = walk()
    stream, tried = EpisodeStream(fleet, 2, seed_of), []

    def reset(members, seeds):
        tried.append(seeds)
        return Begun(np.zeros((2, 1)), {0: "no"})

    monkeypatch.setattr(fleet, "reset", reset)
    with pytest.raises(CannotBegin, match=f"no episode could begin in {RESETS} tries: no"):
        stream.begin(np.arange(2))
    assert tried == [[number, 100 + number] for number in range(RESETS)] and stream.failures == ["no"] * RESETS


def test_more_starts_than_members_are_played_in_turn():
    runner = EpisodeRunner(walk(), [1, 2, 3], EpisodeRules(action_repeat=4))
    changes = []
    while len(runner.row_L):
        at = np.arange(len(runner.row_L))
        stepped = runner.step(at, np.ones(len(at), int))
        changes.append(runner.move(stepped, np.ones(len(at), int)))
    assert runner.length_N.tolist() == [3, 3, 3] and runner.steps_N.tolist() == [STEPS] * 3
    assert runner.terminated_N.all() and not runner.errors
    stay_L, begun = changes[2]
    assert changes[:2] == [None, None] and not stay_L.any() and begun == 1


def test_an_action_is_repeated_alike_in_a_fleet_and_in_an_environment():
    env, runner = ActionRepeat(envs.Walk(), 4), EpisodeRunner(walk(1), [5], EpisodeRules(action_repeat=4))
    env.reset(seed=5)
    for _ in range(3):
        stepped = runner.step(np.array([0]), np.array([1]))
        seen, reward, terminated, truncated, _ = env.step(1)
        np.testing.assert_array_equal(stepped.observation[0], seen)
        assert (stepped.reward_M[0], stepped.terminated_M[0]) == (reward, terminated)
    assert terminated and not truncated


def test_copies_for_evaluation_are_closed_and_an_only_one_is_not(monkeypatch):
    made = []

    def others(count):
        made.append(make_fleet("CartPole-v1", count))
        monkeypatch.setattr(made[-1], "close", lambda fleet=made[-1]: closed.append(fleet))
        return made[-1]

    closed = []
    copies = EnvCopies("CartPole-v1", others)
    assert copies.fleet(2) is copies.fleet(1) is made[0]
    assert copies.fleet(3) is made[1] and closed == [made[0]]
    copies.close()
    assert closed == made
    only = EnvCopies("CartPole-v1", lambda count: made[0], only=True)
    assert only.fleet(9) is made[0]
    only.close()
    assert closed == made
