"""Gymnasium's tasks as functions: step by step what Gymnasium does; a user's function as an environment."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest

from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory, make_fleet

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from grpo.envs.functions import classic, named, task, written  # noqa: E402
from grpo.envs.functions.numbers import numbers  # noqa: E402

STEPS = 60


@pytest.mark.parametrize("id", [id for id in classic.TASKS if id != "CartPole-v0"])
def test_a_classic_task_is_gymnasiums_step_by_step(id: str) -> None:
    one, env = classic.classic_task(id), gym.make(id)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(STEPS)]
    first, _ = env.reset(seed=5)
    found = []
    for action in actions:
        found.append(env.step(action)[:3])
        if found[-1][2]:
            break

    def go(state, action):
        state, reward, over = one.step(state, action, None)
        return state, (one.see(state), reward, over)

    with numbers():
        start = jax.numpy.asarray(one.seeded(5))
        _, (seen_TD, reward_T, over_T) = jax.lax.scan(go, start, np.array(actions[: len(found)]))
        np.testing.assert_allclose(one.see(start), first, atol=1e-7)
    np.testing.assert_allclose(seen_TD, [seen for seen, _, _ in found], atol=1e-6)
    np.testing.assert_allclose(reward_T, [float(reward) for _, reward, _ in found], atol=1e-9)
    assert np.asarray(over_T).tolist() == [over for _, _, over in found]


def test_starts_are_drawn_from_gymnasiums_distributions() -> None:
    with numbers():
        for id, low, high in (("CartPole-v1", -0.05, 0.05), ("Acrobot-v1", -0.1, 0.1), ("Pendulum-v1", -np.pi, np.pi)):
            drawn = jax.vmap(classic.classic_task(id).start)(jax.random.split(jax.random.key(0), 64))
            assert drawn.dtype == np.float64 and low <= drawn.min() < 0.7 * low and 0.7 * high < drawn.max() <= high


WALK = """
import {library} as np

actions = {actions}
limit = 7

def start({random}):
    return {drawn}

def step(state, action):
    place = state + 0.1 * np.asarray([1.0, 2.0 * {picked} - 1.0])
    return place, -np.abs(place).sum(), np.abs(place).max() > 3

def other(state):
    return state, 0.0, False
"""


def walk(tmp_path, library="jax.numpy", actions="2", picked="action", name="walk.py") -> str:
    jaxed = library == "jax.numpy"
    drawn = "__import__('jax').random.uniform(key, (2,))" if jaxed else "random.uniform(size=2)"
    words = {"library": library, "actions": actions, "random": "key" if jaxed else "random", "drawn": drawn}
    (tmp_path / name).write_text(WALK.format(**words, picked=picked))
    return f"{tmp_path / name}:step"


def test_a_function_is_an_environment_like_any_other(tmp_path) -> None:
    env = walk(tmp_path)
    fleet = make_fleet(env, 2)
    begun = fleet.reset([0, 1], [3, 3])
    assert begun.observation.shape == (2, 2) and (begun.observation[0] == begun.observation[1]).all()
    with numbers():
        assert np.allclose(begun.observation[0], written.written_task(EnvFactory(env).resolve()).seeded(3))
    moved = fleet.step([0, 1], np.array([0, 1]))
    assert np.allclose(moved.observation - begun.observation, [[0.1, -0.1], [0.1, 0.1]], atol=1e-6)
    for _ in range(6):
        moved = fleet.step([0, 1], np.array([0, 1]))
    assert moved.truncated_M.all() and not moved.terminated_M.any()


def test_one_that_is_written_with_numpy_says_why_and_is_played_the_ordinary_way(tmp_path) -> None:
    env = walk(tmp_path, "numpy", name="plain.py")
    assert named.is_function(env)
    with pytest.raises(task.NotAFunction, match=r"JAX cannot follow step .*write it with jax\.numpy"):
        named.find_task(env)
    assert make_fleet(env, 1).reset([0], [1]).observation.shape == (1, 2)


@pytest.mark.parametrize(("actions", "space"), [("2", gym.spaces.Discrete(2)), ("[(-2, 2)]", gym.spaces.Box(-2, 2))])
def test_actions_are_a_count_or_bounds(tmp_path, actions, space) -> None:
    found = named.find_task(walk(tmp_path, actions=actions, picked="action" if actions == "2" else "action[0]"))
    assert found.action_space == space or found.action_space.shape == (1,)


def test_what_is_no_environment_is_told(tmp_path) -> None:
    (tmp_path / "bare.py").write_text("def step(state, action):\n    return state, 0.0, False\n")
    with pytest.raises(EnvError, match="needs def start"):
        make_fleet(f"{tmp_path / 'bare.py'}:step", 1)
    assert not named.is_function(walk(tmp_path).replace(":step", ":other"))
    with pytest.raises(task.NotAFunction, match=r"Taxi-v4 is no function; Gymnasium's classic tasks are"):
        named.find_task("Taxi-v4")
    with pytest.raises(EnvError, match=r"gymnax:Nothing-v0 needs|gymnax cannot make"):
        named.find_task("gymnax:Nothing-v0")


class Turns(NamedTuple):
    """Two players in turn; whoever plays 1 pays the other, and the sixth move is the last."""

    current_player: Any
    observation: Any
    rewards: Any
    terminated: Any
    legal_action_mask: Any
    moves: Any


class TurnsGame:
    num_players, num_actions, observation_shape = 2, 3, (2, 1)

    def init(self, key):
        return self._at(jnp.int32(key[0] % 2), jnp.int32(0), jnp.zeros(2, jnp.float32))

    def step(self, state, action, key):
        assert action.dtype == jnp.int32  # as its games have it, also where integers are wide
        paid = jnp.where(action == 1, 1.0, 0.0) * jnp.where(jnp.arange(2) == state.current_player, -1.0, 1.0)
        return self._at(1 - state.current_player, state.moves + 1, paid.astype(jnp.float32))

    def _at(self, player, moves, paid):
        legal = jnp.where(player == 0, jnp.ones(3, bool), jnp.arange(3) == 1)
        return Turns(player, jnp.stack([player, moves])[:, None], paid, moves >= 6, legal, moves)


def test_of_a_game_of_several_the_others_draw_legal_moves(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pgx", SimpleNamespace(make=lambda name: TurnsGame()))
    with numbers():
        game = named.find_task("pgx:turns")
        assert game.observation_space.shape == (2,) and game.action_space.n == 3
        firsts = set()
        for seed in range(8):
            state = game.seeded(seed)
            firsts.add(int(state.moves))  # 1: the other began
            paid, over = [], False
            while not over:
                assert int(state.current_player) == 0 and game.see(state).dtype == jnp.float32
                state, reward, over = jax.jit(game.step)(state, 0, jax.random.key(seed))
                paid.append(float(reward))
            assert sum(paid) in (2.0, 3.0) and int(state.moves) == 6
        assert firsts == {0, 1}
