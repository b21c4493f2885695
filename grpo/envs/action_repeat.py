"""An action that lasts several steps of the environment: coarser time, so that a short imagined future reaches far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from grpo.envs.make import EnvFactory


class Held(gym.Wrapper[Any, Any, Any, Any]):
    """Every action is taken `times` times, or until the episode ends; rewards add up."""

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
class HeldFactory:
    """How to make such an environment; it can be sent to other processes if its parts can."""

    factory: EnvFactory
    times: int

    @property
    def name(self) -> str:
        """For messages."""
        return self.factory.name

    def __call__(self, render_mode: str | None = None) -> gym.Env[Any, Any]:
        """One more."""
        return Held(self.factory.make(render_mode), self.times)
