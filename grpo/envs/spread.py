"""What fleets have in common whose members live elsewhere: a call is parted by worker, and the answers put together.

Member i lives with worker i mod `count`, which has a `SerialFleet` of its members; how workers are asked, and what
becomes of one that dies, is each fleet's own affair (`processes.py`, `ray_fleet.py`).

Letters: M members of a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import Begun, EnvError, Snapshot, Stepped, Tree
from grpo.envs.serial import SerialFleet, numbered, told
from grpo.envs.shared_memory import SharedObservations
from grpo.envs.spaces import leaves, put, zeros


@dataclass(frozen=True)
class About:
    """What the other side needs to know of an environment."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    horizon: int | None
    remarks: list[str]
    dice: bool


@dataclass(frozen=True)
class Parted:
    """A call, by worker."""

    numbers: list[int]
    errors: dict[int, str]
    """Positions that are not asked at all, and why."""
    at: dict[int, list[int]]
    """Worker → its positions in the call."""
    calls: dict[int, tuple[str, Any]]


class SpreadFleet(ABC):
    """`size` members among `count` workers."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    horizon: int | None
    remarks: list[str]
    """What works less well than it could."""
    dice: bool
    """Whether a step draws from the environment's generator."""

    def __init__(self, name: str, size: int, count: int) -> None:
        self.name, self.size, self._count = name, size, count
        self._lost: dict[int, str] = {}
        """Members that need a reset, and why."""
        self._shared: SharedObservations | None = None
        """Where workers write what is seen; None: it comes with their answers."""

    @abstractmethod
    def _ask(self, calls: Mapping[int, tuple[str, Any]]) -> dict[int, Any]:
        """What each worker answers; None from one whose members are all among the lost now."""

    def _described(self, about: About) -> None:
        self.observation_space, self.action_space = about.observation_space, about.action_space
        self.horizon, self.remarks, self.dice = about.horizon, about.remarks, about.dice

    def reset(self, members: Sequence[int] | np.ndarray, seeds: Sequence[int]) -> Begun:
        """Begin episodes; equal seeds, equal starts. A member that had failed is made anew."""
        return self._begin("reset", members, [int(seed) for seed in seeds])

    def restore(self, members: Sequence[int] | np.ndarray, snapshots: Sequence[Snapshot]) -> Begun:
        """Put members into moments of episodes, their own or those of others."""
        return self._begin("restore", members, list(snapshots))

    def step(self, members: Sequence[int] | np.ndarray, actions: Any) -> Stepped:
        """One action for each of these members; the others stand still."""
        parted = self._parted_step(members, actions)
        return self._stepped(parted, self._ask(parted.calls))

    def _parted_step(self, members: Sequence[int] | np.ndarray, actions: Any) -> Parted:
        numbers, action_M = numbered(members, self.size, self.name), np.asarray(actions)
        if action_M.shape[:1] != (len(numbers),):
            raise EnvError(
                f"{self.name}: actions of shape {action_M.shape} for {len(numbers)} members; give one for each"
            )
        lost = {
            at: f"{self._lost[number]}; reset it first" for at, number in enumerate(numbers) if number in self._lost
        }
        return self._parted("step", numbers, action_M, lost)

    def _stepped(self, parted: Parted, answers: Mapping[int, Any]) -> Stepped:
        count = len(parted.numbers)
        reward_M, success_M = np.zeros(count), np.full(count, np.nan)
        terminated_M, truncated_M = np.zeros(count, bool), np.zeros(count, bool)
        seen, errors, parts = self._joined(parted, answers)
        for at, part in parts:
            reward_M[at], terminated_M[at], truncated_M[at] = part.reward_M, part.terminated_M, part.truncated_M
            if part.success_M is not None:
                success_M[at] = part.success_M
        return Stepped(seen, reward_M, terminated_M, truncated_M, told(success_M), errors)

    def snapshot(self, members: Sequence[int] | np.ndarray) -> list[Snapshot]:
        """Moments to come back to; see `SerialFleet.snapshot`."""
        numbers = numbered(members, self.size, self.name)
        for number in numbers:
            if number in self._lost:
                raise EnvError(f"{self._lost[number]}; reset it first")
        at = self._positions(numbers)
        found = self._ask({w: ("snapshot", ([numbers[i] for i in at[w]],)) for w in at})
        taken: dict[int, Snapshot] = {}
        for w, snapshots in found.items():
            if snapshots is None:
                raise EnvError(self._lost[numbers[at[w][0]]])
            taken |= dict(zip(at[w], snapshots, strict=True))
        return [taken[i] for i in range(len(numbers))]

    def branching(self) -> str:
        """How snapshots are restored; see `SerialFleet.branching`."""
        found = self._ask({0: ("branching", ())})[0]
        if found is None:
            raise EnvError(self._lost[0])
        return str(found)

    def _begin(self, how: str, members: Sequence[int] | np.ndarray, starts: list[Any]) -> Begun:
        numbers = numbered(members, self.size, self.name)
        if len(starts) != len(numbers):
            raise EnvError(f"{self.name}: {len(starts)} starts for {len(numbers)} members; give one for each")
        for number in numbers:
            self._lost.pop(number, None)
        parted = self._parted(how, numbers, starts, {})
        seen, errors, _ = self._joined(parted, self._ask(parted.calls))
        return Begun(seen, errors)

    def _parted(self, how: str, numbers: list[int], given: Any, errors: dict[int, str]) -> Parted:
        at = self._positions(numbers, without=errors)
        calls = {w: (how, ([numbers[i] for i in at[w]], picked(given, at[w]))) for w in at}
        return Parted(numbers, errors, at, calls)

    def _joined(
        self, parted: Parted, answers: Mapping[int, Any]
    ) -> tuple[Tree, dict[int, str], list[tuple[list[int], Any]]]:
        """What is seen, all errors, and each worker's part of the answer."""
        numbers, errors, at = parted.numbers, dict(parted.errors), parted.at
        seen, parts = None if self._shared else zeros(self.observation_space, len(numbers)), []
        for w, part in answers.items():
            if part is None:
                errors |= {i: self._lost[numbers[i]] for i in at[w]}
                continue
            if self._shared is None:
                put(seen, at[w], part.observation)
            errors |= {at[w][i]: text for i, text in part.errors.items()}
            parts.append((at[w], part))
        if self._shared is not None:
            seen = self._shared.read(numbers)
            for x in leaves(seen):
                x[list(errors)] = 0
        return seen, errors, parts

    def _positions(self, numbers: list[int], without: Mapping[int, str] | None = None) -> dict[int, list[int]]:
        """Positions in the call, by worker."""
        at: dict[int, list[int]] = {}
        for i, number in enumerate(numbers):
            if i not in (without or {}):
                at.setdefault(number % self._count, []).append(i)
        return at


def picked(given: Any, at: Sequence[int]) -> Any:
    """Of what was given for each member of a call, the part for some of them."""
    return given[at] if isinstance(given, np.ndarray) else [given[i] for i in at]


def name_of_factory(make: Callable[[], Any]) -> str:
    """For messages."""
    return str(getattr(make, "name", None) or getattr(make, "__qualname__", type(make).__qualname__))


def calls(fleet: SerialFleet) -> Mapping[str, Callable[..., Any]]:
    """What can be asked of a worker."""
    return {
        "describe": partial(_about, fleet),
        "reset": fleet.reset,
        "step": fleet.step,
        "snapshot": fleet.snapshot,
        "restore": fleet.restore,
        "branching": fleet.branching,
        "close": fleet.close,
    }


def _about(fleet: SerialFleet) -> About:
    remarks = fleet.check()
    return About(fleet.observation_space, fleet.action_space, fleet.horizon, remarks, fleet.dice)
