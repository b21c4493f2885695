"""Action repeat: an action that lasts several steps of the environment, until the episode ends; rewards add up.

Coarser time, so that a short imagined future, or a short trajectory, reaches far.

    repeated(step, at, actions, 4)    members of a fleet, each with its own action
    ActionRepeat(env, 4)              one environment

Letters: M members of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import Stepped
from grpo.envs.make import EnvFactory
from grpo.envs.spaces import each, put


def repeated(step: Callable[[np.ndarray, Any], Stepped], at: np.ndarray, actions: Any, times: int) -> Stepped:
    """The actions of the members `at`, `times` times; `step` moves those that are still playing."""
    stepped = step(at, actions)
    for _ in range(times - 1):
        going = np.flatnonzero(stepped.going_M)
        if not len(going):
            break
        stepped = later(stepped, going, step(at[going], actions[going]))
    return stepped


def later(stepped: Stepped, at: np.ndarray, further: Stepped) -> Stepped:
    """What is known after the members `at` have made a further step; rewards add up."""
    observation = each(stepped.observation, np.copy)
    put(observation, at, further.observation)
    reward_M, terminated_M, truncated_M = (
        x.copy() for x in (stepped.reward_M, stepped.terminated_M, stepped.truncated_M)
    )
    reward_M[at] += further.reward_M
    terminated_M[at], truncated_M[at] = further.terminated_M, further.truncated_M
    success_M = stepped.success_M
    if further.success_M is not None:
        success_M = np.full(len(reward_M), np.nan) if success_M is None else success_M.copy()
        success_M[at] = further.success_M
    errors = {**stepped.errors, **{int(at[i]): text for i, text in further.errors.items()}}
    return Stepped(observation, reward_M, terminated_M, truncated_M, success_M, errors)


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Every action is taken `times` times."""

    def __init__(self, env: gym.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """What was seen last, and all that was paid."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        for _ in range(self._times - 1):
            if terminated or truncated:
                break
            observation, more, terminated, truncated, info = self.env.step(action)
            reward = reward + more  # type: ignore[operator]
        return observation, reward, terminated, truncated, info  # type: ignore[return-value]


@dataclass(frozen=True)
class ActionRepeatFactory:
    """How to make such an environment; it can be sent to other processes if its parts can."""

    factory: EnvFactory
    times: int

    @property
    def name(self) -> str:
        """For messages."""
        return self.factory.name

    def __call__(self, render_mode: str | None = None) -> gym.Env[Any, Any]:
        """One more."""
        return ActionRepeat(self.factory.make(render_mode), self.times)
