"""Fleets of arrays: members, clocks, errors and snapshots of tasks whose members all move in a few NumPy operations.

On so few numbers an operation costs its call, not its arithmetic: constants are arrays of no dimension, which NumPy
need not convert, and a step's bookkeeping is a handful of calls however many members there are.

Letters: D numbers of a state, M members, T steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.seeding import np_random

from grpo.envs.fleet import Begun, EnvError, Snapshot, Stepped

INT64 = np.dtype(np.int64)
ONE = np.array(1)
ROOM = 64
"""Steps whose actions can be noted at first; twice as many whenever that is too few."""


class ClassicFleet(ABC):
    """Members, clocks, errors and snapshots. A task adds where it begins, how it moves and what is seen."""

    sees: ClassVar[Box]
    """The observation space of one member."""
    acts: ClassVar[Box | Discrete]
    """The action space of one member."""
    dimensions: ClassVar[int]
    """D: how many numbers the state of a member is."""

    def __init__(self, name: str, limit: int, size: int, horizon: int | None = None) -> None:
        steps = limit if horizon is None else horizon
        if size < 1 or steps < 1:
            raise EnvError(f"{name}: size and horizon must be at least 1; got {size} and {steps}")
        self.name, self.size = name, size
        self.horizon: int | None = steps
        self.observation_space: gym.Space[Any] = copy(self.sees)  # a copy has its own generator
        self.action_space: gym.Space[Any] = copy(self.acts)
        self._shape: tuple[int, ...] = self.acts.shape or ()
        self._choices = np.array(self.acts.n, np.uint64) if isinstance(self.acts, Discrete) else None
        self._last = np.array(steps)
        self._everyone_M = np.arange(size)
        self._members_M, self._key = self._everyone_M, self._everyone_M.tobytes()
        self._state_DM = np.zeros((self.dimensions, size))
        self._elapsed_M = np.zeros(size, INT64)
        self._ended_M = np.ones(size, np.bool_)  # until the first reset
        self._seeds: list[int | None] = [None] * size
        self._actions_TM = np.zeros((ROOM, size, *self._shape), self.acts.dtype)
        self._room = ROOM  # steps that can be noted for sure, whichever members take them

    @abstractmethod
    def begin(self, random: np.random.Generator) -> np.ndarray:
        """The state (D,) in which an episode with this generator begins."""

    @abstractmethod
    def move(self, state_DM: np.ndarray, action_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """New states (D, M), rewards (M,) and which episodes terminate (M,), all in arrays of their own."""

    @abstractmethod
    def see(self, state_DM: np.ndarray) -> np.ndarray:
        """The observations (M, …) of these states."""

    def reset(self, members: Sequence[int] | np.ndarray, seeds: Sequence[int]) -> Begun:
        """Begin new episodes; members with the same seed begin in the same state."""
        members_M = self._named(members)
        self._one_each("seed", seeds, members_M)
        starts = {seed: self._start(seed) for seed in set(seeds)}
        self._state_DM[:, members_M] = np.array([starts[seed] for seed in seeds]).T
        self._elapsed_M[members_M] = 0
        self._ended_M[members_M] = False
        for member, seed in zip(members_M.tolist(), seeds, strict=True):
            self._seeds[member] = int(seed)
        return Begun(self.see(self._state_DM.take(members_M, axis=1)))

    def step(self, members: Sequence[int] | np.ndarray, actions: Any) -> Stepped:
        """Move these members by one step; each must have an episode under way."""
        members_M = self._named(members)
        everyone = members_M is self._everyone_M
        if np.count_nonzero(self._ended_M if everyone else self._ended_M[members_M]):
            raise EnvError(self._over(members_M))
        action_M, errors = self._read(members_M, actions)
        if errors:
            return self._step_others(members_M, action_M, errors)

        self._reserve()
        elapsed_M = self._elapsed_M if everyone else self._elapsed_M[members_M]
        self._actions_TM[elapsed_M, members_M] = action_M
        old_DM = self._state_DM if everyone else self._state_DM.take(members_M, axis=1)
        state_DM, reward_M, terminated_M = self.move(old_DM, action_M)
        elapsed_M = elapsed_M + ONE
        late_M = elapsed_M >= self._last
        ended_M = terminated_M | late_M
        if everyone:
            self._state_DM, self._elapsed_M, self._ended_M = state_DM, elapsed_M, ended_M
        else:
            self._state_DM[:, members_M] = state_DM
            self._elapsed_M[members_M] = elapsed_M
            self._ended_M[members_M] = ended_M
        return Stepped(self.see(state_DM), reward_M, terminated_M, truncated_M=late_M > terminated_M)

    def snapshot(self, members: Sequence[int] | np.ndarray) -> list[Snapshot]:
        """Where these members are; an episode that has ended is kept as ended."""
        return [self._snapshot(member) for member in self._named(members).tolist()]

    def restore(self, members: Sequence[int] | np.ndarray, snapshots: Sequence[Snapshot]) -> Begun:
        """Put members where the snapshots were taken: by state where they have one, else by playing the actions."""
        members_M = self._named(members)
        self._one_each("snapshot", snapshots, members_M)
        for member, snapshot in zip(members_M.tolist(), snapshots, strict=True):
            if snapshot.state is not None:
                self._put(member, snapshot, snapshot.state)
        errors = self._replay(members_M, {i: one for i, one in enumerate(snapshots) if one.state is None})
        observation = self.see(self._state_DM.take(members_M, axis=1))
        observation[list(errors)] = 0
        return Begun(observation, errors)

    def close(self) -> None:  # noqa: B027
        """Nothing is held."""

    def _named(self, members: Sequence[int] | np.ndarray) -> np.ndarray:
        """The members as indices, checked unless they are those of the call before."""
        named_M = np.asarray(members)
        if named_M.dtype != INT64 and (named_M.dtype.kind in "iu" or not named_M.size):
            named_M = named_M.astype(INT64)
        key = named_M.tobytes()
        if key != self._key or named_M.dtype != INT64:
            distinct = set(named_M.tolist()) if named_M.ndim == 1 and named_M.dtype == INT64 else {None}
            if len(distinct) != named_M.size or not distinct <= set(range(self.size)):
                wanted = f"distinct numbers from 0 to {self.size - 1}"
                raise EnvError(f"{self.name}: members must be {wanted}; got {_brief(members)}")
            everyone = key == self._everyone_M.tobytes()
            self._members_M, self._key = self._everyone_M if everyone else named_M.copy(), key
        return self._members_M

    def _one_each(self, what: str, given: Sequence[Any], members_M: np.ndarray) -> None:
        if len(given) != len(members_M):
            raise EnvError(f"{self.name}: give one {what} a member; got {len(given)} for {len(members_M)}")

    def _start(self, seed: Any) -> np.ndarray:
        if not isinstance(seed, (int, np.integer)) or seed < 0:
            raise EnvError(f"{self.name}: a seed must be an integer from 0 up; got {_brief(seed)}")
        return self.begin(np_random(int(seed))[0])

    def _over(self, members_M: np.ndarray) -> str:
        member = next(member for member in members_M.tolist() if self._ended_M[member])
        if self._seeds[member] is None:
            return f"{self.name}: member {member} has no episode yet; reset it first"
        return f"{self.name}: member {member} is over since step {self._elapsed_M[member]}; reset it first"

    def _read(self, members_M: np.ndarray, actions: Any) -> tuple[np.ndarray, dict[int, str]]:
        """The actions in the space's type, and by position what is wrong with those that cannot be taken."""
        action_M = self._typed(actions)
        if action_M.dtype == self._actions_TM.dtype and action_M.shape == (len(members_M), *self._shape):
            fits_M = self._fits(action_M)
            if np.count_nonzero(fits_M) == fits_M.size:
                return action_M, {}
        if not hasattr(actions, "__len__") or np.ndim(action_M) == 0:
            raise EnvError(f"{self.name}: give one action a member; got {_brief(actions)}")
        self._one_each("action", actions, members_M)

        read_M, errors = np.zeros((len(members_M), *self._shape), self._actions_TM.dtype), {}
        wanted = "finite numbers" if self._choices is None else f"an integer from 0 to {self._choices - ONE}"
        for i, (member, action) in enumerate(zip(members_M.tolist(), actions, strict=True)):
            one = self._typed(action)
            if one.dtype == read_M.dtype and one.shape == self._shape and self._fits(one).all():
                read_M[i] = one
            else:
                errors[i] = (
                    f"{self.name}: the action of member {member} at step {self._elapsed_M[member]} must be {wanted} of "
                    f"shape {self._shape}; got {_brief(action)}; reset the member to go on"
                )
        return read_M, errors

    def _typed(self, action: Any) -> np.ndarray:
        """An array of the space's type, if it is of that kind at all: 1.0 is no choice."""
        try:
            array = np.asarray(action)
        except ValueError:  # rows of several shapes
            return np.empty(1, np.object_)
        if array.dtype == self._actions_TM.dtype or array.dtype.kind not in ("iuf" if self._choices is None else "iu"):
            return array
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and that does not fit
            return array.astype(self._actions_TM.dtype)

    def _fits(self, action: np.ndarray) -> np.ndarray:
        if self._choices is None:
            return np.isfinite(action)
        return np.less(action.view(np.uint64), self._choices)  # −1 reads as huge

    def _step_others(self, members_M: np.ndarray, action_M: np.ndarray, errors: dict[int, str]) -> Stepped:
        """Step the members whose action can be taken; the others are over."""
        good = [i for i in range(len(members_M)) if i not in errors]
        stepped = self.step(members_M[good], action_M[good])
        self._ended_M[members_M[list(errors)]] = True

        def spread(rows: np.ndarray) -> np.ndarray:
            whole = np.zeros((len(members_M), *rows.shape[1:]), rows.dtype)
            whole[good] = rows
            return whole

        return Stepped(
            spread(stepped.observation),
            spread(stepped.reward_M),
            spread(stepped.terminated_M),
            spread(stepped.truncated_M),
            errors=errors,
        )

    def _reserve(self) -> None:
        """Make sure that every member's next action can be noted."""
        self._room -= 1
        if self._room < 0:
            noted, needed = self._actions_TM, int(self._elapsed_M.max()) + 1
            if needed > len(noted):
                self._actions_TM = np.zeros((max(needed, 2 * len(noted)), *noted.shape[1:]), noted.dtype)
                self._actions_TM[: len(noted)] = noted
            self._room = len(self._actions_TM) - needed

    def _snapshot(self, member: int) -> Snapshot:
        seed, elapsed = self._seeds[member], int(self._elapsed_M[member])
        if seed is None:
            raise EnvError(f"{self.name}: member {member} has no episode yet; reset it first")
        state = {
            "state": self._state_DM[:, member].copy(),
            "elapsed": np.array(elapsed),
            "ended": np.array(self._ended_M[member]),
        }
        return Snapshot(seed, self._actions_TM[:elapsed, member].copy(), state)

    def _put(self, member: int, snapshot: Snapshot, state: Mapping[str, np.ndarray]) -> None:
        numbers_D, elapsed = np.asarray(state.get("state")), int(state.get("elapsed", -1))
        if numbers_D.shape != (self.dimensions,) or np.shape(snapshot.actions) != (elapsed, *self._shape):
            raise EnvError(
                f"{self.name}: member {member} cannot go to a snapshot with a state of shape {numbers_D.shape} and "
                f"actions of shape {np.shape(snapshot.actions)} after {elapsed} steps; take it from {self.name}"
            )
        self._state_DM[:, member] = numbers_D
        self._elapsed_M[member] = elapsed
        self._ended_M[member] = bool(state.get("ended", False)) or elapsed >= self._last
        self._seeds[member] = snapshot.seed
        self._room = 0  # counted anew
        self._reserve()
        self._actions_TM[:elapsed, member] = snapshot.actions

    def _replay(self, members_M: np.ndarray, snapshots: Mapping[int, Snapshot]) -> dict[int, str]:
        """Play the actions of snapshots, which come by position in the call, as do the errors."""
        self.reset(members_M[list(snapshots)], [snapshot.seed for snapshot in snapshots.values()])
        errors: dict[int, str] = {}
        for t in range(max((len(snapshot.actions) for snapshot in snapshots.values()), default=0)):
            on = [i for i, snapshot in snapshots.items() if t < len(snapshot.actions) and i not in errors]
            for i in on:
                if self._ended_M[members_M[i]]:
                    errors[i] = f"{self._over(members_M[[i]])}; its snapshot has {len(snapshots[i].actions)} actions"
            on = [i for i in on if i not in errors]
            stepped = self.step(members_M[on], [snapshots[i].actions[t] for i in on])
            errors |= {on[position]: error for position, error in stepped.errors.items()}
        return errors


def _brief(value: object) -> str:
    return " ".join(repr(value).split())[:80]
