"""How further copies of an environment are made: one to look at, a fleet to evaluate with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

from grpo.envs.fleet import Fleet
from grpo.envs.make import EnvFactory


class EnvCopies:
    """The fleet for evaluation is kept until a larger one is needed."""

    def __init__(
        self, single: EnvFactory | gym.Env[Any, Any], others: Callable[[int], Fleet], only: bool = False
    ) -> None:
        """others: so many copies; only: there are none, and it gives the fleet that trains, which others own."""
        self.single = single
        """One to look at."""
        self._others, self._only = others, only
        self._fleet: Fleet | None = None

    def fleet(self, count: int) -> Fleet:
        """At least so many copies, apart from those that train where there are any."""
        if self._only:
            return self._others(count)
        if self._fleet is None or self._fleet.size < count:
            self.close()
            self._fleet = self._others(count)
        return self._fleet

    def close(self) -> None:
        """End them."""
        if self._fleet is not None:
            self._fleet.close()
        self._fleet = None
