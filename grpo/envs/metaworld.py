"""Meta-World's arm (MT10, MT25, MT50): a start's seed says the task and where things lie, the only reward is success.

    env: grpo.envs.metaworld:MetaWorld
    warm_start: grpo.envs.metaworld:expert

One policy for all tasks: behind the 39 numbers of the arm stands which task it is. The scripted experts that come with
Meta-World are one function here, which reads the task there too. With `differences` nine numbers more stand behind
both: the ways from the hand to what it handles, from there to the goal, and from the hand to the goal. Metaworld 3.1
needs a MuJoCo before 4.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from grpo.envs.fleet import EnvError
from grpo.errors import line

SEEN = 39
"""Numbers of the arm, what it handles and the goal."""
WAYS = 9
"""Numbers of `differences`."""
HAND, THING, GOAL = slice(0, 3), slice(4, 7), slice(36, 39)
"""Where these stand among the numbers seen."""
BENCHMARKS = ("MT10", "MT25", "MT50")
INSTALL = "pip install metaworld 'mujoco<3.12'"
_free: dict[str, list[Any]] = {}
"""Simulations of this process that nobody plays in, by task: members take turns at them, since each costs megabytes."""


class MetaWorld(gym.Env[np.ndarray, np.ndarray]):
    """A task of the benchmark for each seed; `tasks` are those that are drawn from, None: all of them."""

    def __init__(
        self,
        benchmark: str = "MT10",
        tasks: Sequence[str] | None = None,
        sparse: bool = True,
        differences: bool = False,
    ) -> None:
        known = names(benchmark)
        unknown = [task for task in tasks or () if task not in known]
        if unknown or (tasks is not None and not len(tasks)):
            raise EnvError(f"{benchmark} has no task {', '.join(map(str, unknown))!r}; its tasks: {', '.join(known)}")
        self._known, self._drawn, self._sparse, self._differences = known, list(tasks or known), sparse, differences
        self._env, self._task = _taken(self._drawn[0]), self._drawn[0]
        self.max_episode_steps = int(self._env.max_path_length)
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        size = SEEN + len(known) + WAYS * differences
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The task and the places that this seed says."""
        super().reset(seed=seed)
        task = self._drawn[int(self.np_random.integers(len(self._drawn)))]
        if self._env is None or task != self._task:
            self.close()
            self._env, self._task = _taken(task), task
        self._env.seed(int(self.np_random.integers(2**31)))
        seen, _ = self._env.reset()
        return self._with_task(seen), {"task": task}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One action: where the hand goes, and whether it closes."""
        env, self._env = self._env, None  # one that raises is left to nobody
        seen, reward, _, truncated, info = env.step(np.asarray(action, np.float32))
        self._env = env
        success = bool(info["success"])
        paid = float(success) if self._sparse else float(reward) / 10.0
        return self._with_task(seen), paid, False, bool(truncated), {"success": success, "task": self._task}

    def close(self) -> None:
        """Leave the simulation to others."""
        if self._env is not None:
            _free.setdefault(self._task, []).append(self._env)
            self._env = None

    def _with_task(self, seen: np.ndarray) -> np.ndarray:
        which = np.zeros(len(self._known), np.float32)
        which[self._known.index(self._task)] = 1.0
        seen = np.asarray(seen, np.float32)
        hand, thing, goal = seen[HAND], seen[THING], seen[GOAL]
        ways = [thing - hand, goal - thing, goal - hand] if self._differences else []
        return np.concatenate([seen, which, *ways])


def names(benchmark: str) -> list[str]:
    """Its tasks, in their order."""
    if benchmark not in BENCHMARKS:
        raise EnvError(f"{benchmark!r} is none of Meta-World's {', '.join(BENCHMARKS)}")
    return list(vars(_module("metaworld.env_dict"))[f"{benchmark}_V3"])


def expert(seen: np.ndarray) -> np.ndarray:
    """What Meta-World's script of the task does."""
    count = len(seen) - SEEN
    count -= 0 if f"MT{count}" in BENCHMARKS else WAYS
    task = names(f"MT{count}")[int(np.argmax(seen[SEEN : SEEN + count]))]
    action = _script(task).get_action(np.asarray(seen[:SEEN], np.float64))
    return np.clip(np.asarray(action, np.float32), -1.0, 1.0)


@cache
def _script(task: str) -> Any:
    return _module("metaworld.policies").ENV_POLICY_MAP[task]()


def _taken(task: str) -> Any:
    """A simulation of this task that nobody else has, with the goal in sight."""
    if _free.get(task):
        return _free[task].pop()
    made = _module("metaworld.env_dict").ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"]
    try:
        env = made(seed=0)
    except Exception as error:  # with MuJoCo 4 its arrays no longer fit
        raise EnvError(f"Meta-World's {task} cannot be made: {line(error)}; {INSTALL}") from error
    env._freeze_rand_vec, env.seeded_rand_vec = False, True  # else things lie where its first seed put them, for ever
    return env


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvError(f"Meta-World is not installed ({error}); {INSTALL}") from error
