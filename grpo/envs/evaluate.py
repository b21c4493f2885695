"""How good an agent was in whole episodes, with confidence intervals; and an environment made to be looked at.

Letters: E episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import EnvError, Tree
from grpo.envs.make import EnvFactory
from grpo.envs.serial import name_of
from grpo.envs.spaces import as_rows
from grpo.protocols import Playing
from grpo.statistics import bootstrap, wilson


@dataclass(frozen=True)
class Evaluation:
    """Whole episodes of an agent that does not learn meanwhile."""

    return_E: np.ndarray
    length_E: np.ndarray
    success_E: np.ndarray
    """NaN where the environment does not tell."""
    failed: int = 0
    why: str = ""
    """What went wrong with the first that failed."""

    def metrics(self) -> dict[str, float | None]:
        """Means and spread, for a run's metrics."""
        known_E = self.success_E[~np.isnan(self.success_E)]
        if not len(self.return_E):
            return {"return": None, "failed": float(self.failed)}
        found: dict[str, float | None] = {
            "return": float(self.return_E.mean()),
            "return_std": float(self.return_E.std()),
            "length": float(self.length_E.mean()),
        }
        if len(known_E):
            low, high = wilson(known_E)
            found |= {"success": float(known_E.mean()), "success_low": low, "success_high": high}
        return found | ({"failed": float(self.failed)} if self.failed else {})

    def table(self) -> list[dict[str, Any]]:
        """A row a quantity: mean, 95 % interval of the mean, spread, extremes."""
        if not len(self.return_E):
            raise EnvError(f"all {self.failed} episodes failed{f': {self.why}' if self.why else ''}")
        known_E = self.success_E[~np.isnan(self.success_E)]
        rows = [_row("return", self.return_E), _row("length", self.length_E)]
        return rows + ([_row("success", known_E)] if len(known_E) else [])


def _row(name: str, value_E: np.ndarray) -> dict[str, Any]:
    low, high = wilson(value_E) if name == "success" else bootstrap(value_E)
    return {
        "quantity": name,
        "mean": float(value_E.mean()),
        "low": low,
        "high": high,
        "interval": "wilson" if name == "success" else "bootstrap",
        "std": float(value_E.std()),
        "min": float(value_E.min()),
        "max": float(value_E.max()),
        "episodes": len(value_E),
    }


@dataclass(frozen=True)
class EnvPlayer:
    """A policy as somebody asks it who plays the environment himself: see `grpo.protocols.Player`."""

    space: gym.Space[Any]
    make: Callable[[int, int], Playing]
    """The policy in so many episodes, with a seed."""

    def rows(self, observation: Any) -> tuple[Tree, bool]:
        """One observation or several, a row each, and whether it was one."""
        return as_rows(observation, self.space)

    def players(self, rows: int, seed: int) -> Playing:
        """The policy in so many episodes."""
        return self.make(rows, seed)


def rendered(env: EnvFactory | gym.Env[Any, Any], mode: str | None) -> gym.Env[Any, Any]:
    """The environment in a render mode: the one that was given where it has it, else made again."""
    if isinstance(env, EnvFactory):
        return env.make(render_mode=mode)
    if mode is None or env.render_mode == mode:
        return env
    if env.spec is None:
        raise EnvError(f"{name_of(env)} was not made with gym.make, so it cannot be made again to draw it; pass an id")
    return gym.make(env.spec, render_mode=mode)
