"""Moments of an episode that can be continued more than once: read, written, and proven exact before they are used.

    state     the environment's own: `get_state()` and `set_state(state)` that its author wrote (a dict of numbers, or
              an array), MuJoCo's integration state, or ALE's system state; and the time limit's count of steps
    replay    the seed and every action since, played again

A copy that is nearly right branches into futures that the original never had, so nothing is believed here: copies
continue with the same actions, bit for bit, or the next kind is tried. Environments are never copied as objects,
because a copied physics engine may share what it should not.

Letters: M members of a call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit

from grpo.envs.fleet import EnvError, Fleet, Snapshot, Tree
from grpo.errors import line

SEEDS = (11, 23, 47)
"""Episodes that a proof plays, with random actions."""
STEPS = 48
"""Steps of each, at most."""
MOMENTS = (0, 1, 3, 8, 20)
"""Steps after which a moment is kept, continued by a copy, and compared."""
FUTURE = 16
"""Steps that the copy is followed for."""

_SEEN_LATE = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "subtree_com", "cvel"),
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
)
"""What MuJoCo computed at the beginning of its last step, and rewards read at the beginning of the next."""


class Branchable(Fleet, Protocol):
    """A fleet whose moments can be taken with the environment's own state, or without."""

    def take(self, number: int, state: bool) -> Snapshot: ...


def proven(fleet: Branchable) -> str:
    """The first kind of snapshot that two idle members prove exact."""
    for kind in ("state", "replay"):
        difference = _difference(fleet, kind == "state")
        if difference is None:
            return kind
    raise EnvError(f"{fleet.name} cannot be branched: {difference}")


def same(one: Tree, other: Tree) -> bool:
    """Whether two observations are equal, bit for bit."""
    if isinstance(one, Mapping):
        return all(same(part, other[key]) for key, part in one.items())
    return bool(np.array_equal(one, other))


def read_state(env: gym.Env[Any, Any], seen: Tree) -> dict[str, np.ndarray] | None:
    """Everything that `write_state` needs; None where an environment keeps it to itself."""
    own = _read_own(env.unwrapped)
    if own is None:
        return None
    elapsed = np.array([limit._elapsed_steps or 0 for limit in _limits(env)], np.int64)
    return {"elapsed": elapsed, **dict(_flat(seen, "seen")), **{f"own/{key}": array for key, array in own.items()}}


def write_state(env: gym.Env[Any, Any], state: Mapping[str, np.ndarray], like: Tree) -> Tree:
    """Put an environment that was just reset into a state; what it sees there, laid out as `like`."""
    own = {key.removeprefix("own/"): array for key, array in state.items() if key.startswith("own/")}
    _write_own(env.unwrapped, own)
    for limit, elapsed in zip(_limits(env), state["elapsed"], strict=True):
        limit._elapsed_steps = int(elapsed)
    return _nested(like, state, "seen")


# --- the environment's own state ------------------------------------------------------------------------------------


def _read_own(env: Any) -> dict[str, np.ndarray] | None:
    if _is_user(env):
        state = env.get_state()
        named = state if isinstance(state, Mapping) else {"": state}
        arrays = {str(key): np.array(value) for key, value in named.items()}
        kinds = {array.dtype.kind for array in arrays.values()}
        return arrays if arrays and kinds <= {*"biufUS"} else None
    if _is_mujoco(env):
        mujoco: Any = sys.modules["mujoco"]
        integration = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(env.model, integration))
        mujoco.mj_getState(env.model, env.data, physics, integration)
        return {"physics": physics, **{name: getattr(env.data, name).copy() for name in _SEEN_LATE}}
    if _is_atari(env):
        serial = env.ale.cloneSystemState().serialize()
        return {"system": np.frombuffer(serial.encode("latin-1") if isinstance(serial, str) else serial, np.uint8)}
    return None


def _write_own(env: Any, own: Mapping[str, np.ndarray]) -> None:
    if _is_user(env):
        given = {key: _plain(array) for key, array in own.items()}
        env.set_state(given[""] if given.keys() == {""} else given)
    elif _is_mujoco(env):
        mujoco: Any = sys.modules["mujoco"]
        integration = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(env.model, env.data, own["physics"], integration)
        mujoco.mj_forward(env.model, env.data)
        mujoco.mj_setState(env.model, env.data, own["physics"], integration)  # what mj_forward may have warmed up
        for name in _SEEN_LATE:
            getattr(env.data, name)[...] = own[name]
    else:
        empty = env.ale.cloneSystemState()
        env.ale.restoreSystemState(type(empty)(own["system"].tobytes()))


def _is_user(env: Any) -> bool:
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


def _is_mujoco(env: Any) -> bool:
    mujoco = sys.modules.get("mujoco")
    return mujoco is not None and isinstance(getattr(env, "data", None), mujoco.MjData) and hasattr(env, "model")


def _is_atari(env: Any) -> bool:
    return hasattr(getattr(env, "ale", None), "cloneSystemState")


def _plain(array: np.ndarray) -> Any:
    """A copy; a single number as Python's own, or NumPy's where Python has no such type."""
    if array.ndim:
        return array.copy()
    return array.item() if array.dtype in (np.int64, np.float64, np.bool_) else array[()]


def _limits(env: Any) -> Iterator[Any]:
    while isinstance(env, gym.Wrapper):
        if isinstance(env, TimeLimit):
            yield env
        env = env.env


def _flat(tree: Tree, name: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _flat(part, f"{name}/{key}")
    else:
        yield name, np.array(tree)


def _nested(like: Tree, state: Mapping[str, np.ndarray], name: str) -> Tree:
    if isinstance(like, Mapping):
        return {key: _nested(part, state, f"{name}/{key}") for key, part in like.items()}
    return state[name].copy()


# --- proofs ---------------------------------------------------------------------------------------------------------


def _difference(fleet: Branchable, state: bool) -> str | None:
    """Play, keep moments, continue each of them on both members: what differs from the first time, if anything."""
    for seed in SEEDS:
        fleet.action_space.seed(seed)
        begun = fleet.reset([0], [seed])
        if begun.errors:
            return begun.errors[0]
        tape: list[tuple[Any, ...]] = [(begun.observation,)]
        actions, kept = [], {}
        for t in range(STEPS):
            if t in MOMENTS:
                try:
                    kept[t] = fleet.take(0, state)
                except Exception as error:  # anything an author's get_state may raise
                    return line(error)
                if state and kept[t].state is None:
                    return "it has no state to read"
            actions.append(fleet.action_space.sample())
            stepped = fleet.step([0], np.array([actions[-1]]))
            if stepped.errors:
                return stepped.errors[0]
            ends = bool(stepped.terminated_M[0]), bool(stepped.truncated_M[0])
            tape.append((stepped.observation, float(stepped.reward_M[0]), *ends))
            if any(ends):
                break
        for t, moment in kept.items():
            fleet.reset([1], [seed + 1])  # somewhere else, so that nothing is right by chance
            fleet.step([1], np.array([fleet.action_space.sample()]))
            begun = fleet.restore([0, 1], [moment, moment])
            if begun.errors:
                return next(iter(begun.errors.values()))
            for member in (0, 1):
                if not same(tape[t][0], _row(begun.observation, member)):
                    return f"it does not repeat itself: with seed {seed}, its observation differs after step {t}"
            for k in range(t, min(t + FUTURE, len(actions))):
                stepped = fleet.step([0, 1], np.array([actions[k]] * 2))
                if stepped.errors:
                    return next(iter(stepped.errors.values()))
                if found := _unlike(tape[k + 1], stepped):
                    return f"it does not repeat itself: with seed {seed}, its {found} differs after step {k + 1}"
    return None


def _unlike(first: tuple[Any, ...], again: Any) -> str | None:
    """What of a step is not as it was, for either member."""
    observation, reward, terminated, truncated = first
    for member in (0, 1):
        if not same(observation, _row(again.observation, member)):
            return "observation"
        if reward != again.reward_M[member]:
            return "reward"
        if (terminated, truncated) != (again.terminated_M[member], again.truncated_M[member]):
            return "end"
    return None


def _row(tree: Tree, at: int) -> Tree:
    return {key: _row(part, at) for key, part in tree.items()} if isinstance(tree, Mapping) else tree[at : at + 1]
