"""Environments that are functions as Gymnasium's: for what is played one by one, and for what JAX cannot follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import EnvError
from grpo.envs.functions.task import FunctionTask, NotAFunction, no_jax
from grpo.envs.functions.written import observation_space, parts, written_task
from grpo.errors import located

Stepped = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class FunctionEnv(gym.Env[np.ndarray, Any]):
    """One member of a task, each of whose functions is compiled by itself."""

    def __init__(self, task: FunctionTask) -> None:
        import jax

        self.task, self._jax = task, jax
        self.observation_space, self.action_space = task.observation_space, task.action_space
        self.max_episode_steps = task.limit
        self._step, self._see = jax.jit(task.step), jax.jit(task.see)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """The state of a seed."""
        from grpo.envs.functions.numbers import numbers

        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        with numbers():
            self._state, self._key = self.task.seeded(drawn), self._jax.random.key(drawn)
            return np.asarray(self._see(self._state)), {}

    def step(self, action: Any) -> Stepped:
        """As the function says."""
        from grpo.envs.functions.numbers import numbers

        with numbers():
            self._key, key = self._jax.random.split(self._key)
            self._state, reward, over = self._step(self._state, np.asarray(action), key)
            return np.asarray(self._see(self._state)), float(reward), bool(over), False, {}


class NumpyEnv(gym.Env[np.ndarray, Any]):
    """A function of the user's that is written with NumPy."""

    def __init__(self, step: Callable[..., Any]) -> None:
        _, own = parts(step)
        self._begin, self._see, self._move = own["start"], own["see"], step
        self._chance = len(inspect.signature(step).parameters) > 2
        self.action_space, self.max_episode_steps = own["actions"], own["limit"]
        self.observation_space = observation_space(self.reset(seed=0)[0].shape)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """A state drawn by Gymnasium's generator."""
        super().reset(seed=seed)
        self._state = self._begin(self.np_random)
        return self._seen(), {}

    def step(self, action: Any) -> Stepped:
        """As the function says."""
        self._state, reward, over = self._move(self._state, action, *([self.np_random] if self._chance else []))
        return self._seen(), float(reward), bool(over), False, {}

    def _seen(self) -> np.ndarray:
        return np.atleast_1d(np.asarray(self._state if self._see is None else self._see(self._state), np.float32))


def written_env(step: Callable[..., Any]) -> gym.Env[Any, Any]:
    """A function of the user's as an environment, by JAX where it can follow."""
    why = no_jax()
    if why is None:
        try:
            return FunctionEnv(written_task(step))
        except NotAFunction as error:
            why = str(error)
    try:
        return NumpyEnv(step)
    except EnvError:
        raise
    except Exception as error:  # whatever a function of the user's may raise, most often as it was written for JAX
        raise EnvError(f"{why}; as plain NumPy it fails, too: {located(error)}") from error
