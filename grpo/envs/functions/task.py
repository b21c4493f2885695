"""What an environment is once it is a function: where it begins, how it moves, what is seen.

    state = task.start(key)
    state, reward, over = task.step(state, action, key)
    observation = task.see(state)

All of it is of one member, and of JAX arrays; whoever plays several maps it over them. The time limit is not the
task's affair: who plays counts steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

import gymnasium as gym

from grpo.errors import install

FOREIGN = ("gymnax", "brax", "pgx")
"""Libraries whose environments are functions: `gymnax:CartPole-v1`."""


OLDEST = (0, 8)
"""Of JAX's versions, the first that has what is used here."""


def no_jax() -> str | None:
    """Why JAX cannot be used; None: it can."""
    if util.find_spec("jax") is None:
        return f"JAX is not installed ({install('jax')})"
    version = metadata.version("jax")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"JAX {version} is too old ({install('jax', '--upgrade ')})"
    return None


class NotAFunction(ValueError):
    """An environment that is none, or that JAX cannot follow: why, in one line."""


def takes_state(source: Any) -> bool:
    """Whether this is an environment's step: a function whose first arguments are called state and action."""
    if not (callable(source) and inspect.isfunction(inspect.unwrap(source))):  # also under jax.jit
        return False
    return list(inspect.signature(source).parameters)[:2] == ["state", "action"]


State = Any
"""Arrays in any nesting of tuples and dicts."""


@dataclass(frozen=True)
class FunctionTask:
    """An environment as functions."""

    name: str
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    limit: int
    """Steps after which an episode is cut."""
    start: Callable[[Any], State]
    """From a key: the state in which an episode begins."""
    step: Callable[[State, Any, Any], tuple[State, Any, Any]]
    """State, action, key: the next state, what is paid, and whether the episode is over."""
    see: Callable[[State], Any]
    """The observation, one array."""
    seeded: Callable[[int], State]
    """The state in which an episode begins that the ordinary way begins with a seed."""
