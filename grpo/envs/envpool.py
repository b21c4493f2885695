"""A fleet over EnvPool, whose C++ threads step its members; seeds and physics are EnvPool's own.

EnvPoolFleet("Ant-v4", size=64)

Letters: M members.
"""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo.envs.batched import BatchedFleet, success_of
from grpo.envs.fleet import EnvError, Tree
from grpo.envs.serial import told
from grpo.envs.spaces import each, put, zeros
from grpo.errors import line

_UNLIMITED = 2**31 - 1
"""EnvPool's word for no horizon, and the first seed that it cannot take."""


class EnvPoolFleet(BatchedFleet):
    """Members of EnvPool, stepped by its threads (`kwargs={"num_threads": …}`; else as many as fit the machine).

    EnvPool takes seeds only when a pool is made and ignores them in `reset`, so each call of `reset` makes a pool for
    its members: under a millisecond for small tasks, about one for each MuJoCo member. Members that are reset in one
    call are stepped by one pool, so reset as many together as you can.

    EnvPool tells an episode that ends in its last allowed step from one that was cut there no better than as cut.
    """

    def __init__(self, id: str, size: int, kwargs: Mapping[str, Any] | None = None, horizon: int | None = None) -> None:
        try:
            self._envpool: Any = importlib.import_module("envpool")
        except ImportError as error:
            raise EnvError(f"{id}: EnvPool is not installed ({error}); pip install envpool") from error
        known = self._envpool.list_all_envs()
        if id not in known:
            near = ", ".join(difflib.get_close_matches(id, known)) or "see envpool.list_all_envs()"
            raise EnvError(f"EnvPool has no {id} ({near}); use one of its own, or vector='serial'")
        self._id = id
        self._options = dict(kwargs or {}) | ({} if horizon is None else {"max_episode_steps": horizon})
        first = self._pool([0])
        if first.config.get("max_num_players", 1) != 1:
            raise EnvError(f"{id}: EnvPool plays it with several players; a fleet has one in each environment")
        limit = first.config.get("max_episode_steps", _UNLIMITED)
        horizon = None if limit >= _UNLIMITED else limit
        super().__init__(id, size, first.observation_space, first.action_space, horizon)
        self._home_M: list[Any] = [None] * size
        self._slot_M = np.zeros(size, np.int32)

    def close(self) -> None:
        """Let go of the pools; their threads end with them."""
        self._home_M = [None] * self.size
        self._over_M[:] = True

    def _pool(self, seeds: list[int]) -> Any:
        try:
            pool = self._envpool.make(
                self._id,
                env_type="gymnasium",
                num_envs=len(seeds),
                seed=[seed % _UNLIMITED for seed in seeds],
                **self._options,
            )
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise EnvError(f"{self._id}: EnvPool cannot make it with {self._options}: {line(error)}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that bounds lose digits in float32, once for each pool
            _ = pool.observation_space, pool.action_space
        return pool

    def _start(self, members: np.ndarray, seeds: list[int]) -> Tree:
        pool = self._pool(seeds)
        observation, _ = pool.reset()
        for slot, member in enumerate(members.tolist()):
            self._home_M[member], self._slot_M[member] = pool, slot
        return each(observation, np.copy)

    def _advance(self, members: np.ndarray, action_M: np.ndarray) -> tuple[Tree, Any, Any, Any, np.ndarray | None]:
        together: dict[int, list[int]] = {}
        for p, member in enumerate(members.tolist()):
            together.setdefault(id(self._home_M[member]), []).append(p)
        at = list(together.values())
        pools = [self._home_M[members[positions[0]]] for positions in at]
        for pool, positions in zip(pools, at, strict=True):
            pool.send(action_M[positions], self._slot_M[members[positions]])
        # Only now: the pools work at the same time.
        heard = [pool.recv() for pool in pools]
        if len(pools) == 1:
            observation, reward, terminated, truncated, info = heard[0]
            return each(observation, np.copy), reward, terminated, truncated, success_of(info)
        count = len(members)
        observation, reward_M = zeros(self.observation_space, count), np.zeros(count)
        terminated_M, truncated_M, success_M = np.zeros(count, bool), np.zeros(count, bool), np.full(count, np.nan)
        for positions, (part, reward, terminated, truncated, info) in zip(at, heard, strict=True):
            put(observation, positions, part)
            reward_M[positions], terminated_M[positions], truncated_M[positions] = reward, terminated, truncated
            known = success_of(info)
            success_M[positions] = np.nan if known is None else known
        return observation, reward_M, terminated_M, truncated_M, told(success_M)
