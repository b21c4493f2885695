"""A function of the user's as an environment: `grpo train --env my_env.py:step`.

    import jax, jax.numpy as np

    actions = 2                                   # so many choices; or bounds, a pair for each number: [(-2, 2)]
    limit = 200                                   # steps after which an episode is cut

    def start(key):                               # the state in which an episode begins
        return jax.random.uniform(key, (2,), minval=-1, maxval=1)

    def step(state, action):                      # or step(state, action, key), where chance plays a part
        place = state + 0.1 * np.array([1.0, 2.0 * action - 1.0])
        return place, -np.abs(place).sum(), np.abs(place).max() > 3

    def see(state):                               # what the policy is told; without it the state itself
        return state

One written with plain NumPy, whose `start` takes a `numpy.random.Generator`, is played the ordinary way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import EnvError
from grpo.envs.functions.task import FunctionTask, NotAFunction
from grpo.errors import line, located

LIMIT = 1000
"""Steps of an episode where the file does not say."""


def parts(step: Callable[..., Any]) -> tuple[str, Mapping[str, Any]]:
    """A function's name and what stands beside it, with everything that an environment needs."""
    plain = inspect.unwrap(step)
    own, name = plain.__globals__, plain.__qualname__
    if not callable(own.get("start")) or "actions" not in own:
        missing = "actions" if callable(own.get("start")) else "start"
        what = "def start(key), the state in which an episode begins" if missing == "start" else "actions = 2, say"
        raise EnvError(f"{own.get('__file__', name)}: an environment as a function, {name}, needs {what}")
    limit = own.get("limit", LIMIT)
    if not isinstance(limit, int) or limit < 1:
        raise EnvError(f"{own.get('__file__', name)}: limit must be a number of steps, got {limit!r}")
    return name, {"start": own["start"], "see": own.get("see"), "limit": limit, "actions": action_space(own, name)}


def action_space(own: Mapping[str, Any], name: str) -> gym.Space[Any]:
    """From a count, bounds or a space."""
    given = own["actions"]
    if isinstance(given, gym.Space):
        return given
    if isinstance(given, int) and not isinstance(given, bool) and given > 1:
        return gym.spaces.Discrete(given)
    try:
        low, high = np.asarray(given, np.float32).reshape(-1, 2).T
        return gym.spaces.Box(low, high)
    except (TypeError, ValueError):
        place = own.get("__file__", name)
        raise EnvError(f"{place}: actions must be a number of choices or pairs of bounds, got {given!r}") from None


def observation_space(shape: tuple[int, ...]) -> gym.Space[Any]:
    """Numbers without bounds."""
    return gym.spaces.Box(-np.inf, np.inf, shape or (1,), np.float32)


@functools.cache  # whoever asks again gets the same functions, and so what was compiled of them
def written_task(step: Callable[..., Any]) -> FunctionTask:
    """The function for JAX; NotAFunction where it cannot follow it."""
    import jax
    import jax.numpy as jnp

    from grpo.envs.functions.numbers import numbers

    name, own = parts(step)
    chance = len(inspect.signature(step).parameters) > 2
    start, see = own["start"], own["see"]

    def begun(key: Any) -> Any:
        return jax.tree.map(jnp.asarray, start(key))

    def moved(state: Any, action: Any, key: Any) -> tuple[Any, Any, Any]:
        found = step(state, action, key) if chance else step(state, action)
        if not isinstance(found, tuple) or len(found) != 3:
            raise EnvError(f"{name} must return three things: the next state, the reward, and whether it is over")
        new, reward, over = found
        new = jax.tree.map(lambda x, old: jnp.asarray(x).astype(old.dtype).reshape(old.shape), new, state)
        return new, jnp.asarray(reward, jnp.float64).reshape(()), jnp.asarray(over, bool).reshape(())

    def seen(state: Any) -> Any:
        return jnp.asarray(state if see is None else see(state), jnp.float32).reshape(-1)  # as the policy reads it

    def seeded(seed: int) -> Any:
        with numbers():
            return begun(jax.random.key(seed))

    space = own["actions"]
    try:
        with numbers():
            key = jax.random.key(0)
            state = jax.eval_shape(begun, key)
            shape = jax.eval_shape(seen, state).shape
            action = jnp.asarray(space.sample())
            jax.eval_shape(moved, state, action, key)
    except EnvError:
        raise
    except Exception as error:  # whatever a function of the user's may raise
        remedy = "write it with jax.numpy in place of numpy, and jnp.where in place of if"
        raise NotAFunction(f"JAX cannot follow {name} ({located(error) or line(error)}); {remedy}") from error
    return FunctionTask(name, observation_space(shape), space, own["limit"], begun, moved, seen, seeded)
