"""Gymnasium's classic control tasks as fleets of arrays: all members of a call move in a few NumPy operations.

Every observation, reward and end equals Gymnasium's own, bit for bit, from the same seed on. That decides how the
arithmetic is written here:

- Operations keep Gymnasium's order; only factors that round nothing (½, 1) are moved or left out.
- NumPy's sin, cos and % answer alike for a number and for a contiguous row of them. `take` gives such rows where
  `[:, members]` does not.
- A NumPy number squared by `**` is the C library's `pow`, which is not always x·x. `np.float_power` is that `pow` on
  arrays of float64. None is for float32, so those are squared one by one; so is `math.cos` called, which NumPy's own
  cosine may miss by a bit on some processors.
- A Python float does not widen a float32 number: NumPy 2's rule. With NumPy 1, Gymnasium itself rounds differently.

On so few numbers an operation costs its call, not its arithmetic: constants are arrays of no dimension, which NumPy
need not convert, and a step's bookkeeping is a handful of calls however many members there are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.seeding import np_random

from grpo.envs.fleet import Begun, EnvError, Fleet, Snapshot, Stepped

INT64 = np.dtype(np.int64)
ONE, TWO = np.array(1), np.array(2.0)
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


def _symmetric(*high: float) -> Box:
    limit = np.array(high, np.float32)
    return Box(-limit, limit, dtype=np.float32)


def _columns(*columns_M: np.ndarray) -> np.ndarray:
    seen = np.empty((len(columns_M[0]), len(columns_M)), np.float32)
    for i, column_M in enumerate(columns_M):
        seen[:, i] = column_M
    return seen


def _clip(x: np.ndarray, limits: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    low, high = limits
    return np.minimum(np.maximum(x, low), high)  # half the time of np.clip


def _limits(high: float, dtype: type[np.floating[Any]] = np.float64) -> tuple[np.ndarray, np.ndarray]:
    return np.array(-high, dtype), np.array(high, dtype)


def _math_cos(x_M: np.ndarray) -> np.ndarray:
    return np.fromiter(map(math.cos, x_M.tolist()), np.float64, len(x_M))


class CartPole(ClassicFleet):
    """Keep a pole upright on a cart by pushing the cart left or right."""

    sees = _symmetric(2.4 * 2, np.inf, 12 * 2 * math.pi / 360 * 2, np.inf)
    acts = Discrete(2)
    dimensions = 4

    FAR, STEEP = np.array(2.4), np.array(12 * 2 * math.pi / 360)
    FORCE, REWARD = np.array([-10.0, 10.0]), np.array([1.0])
    GRAVITY, DT = np.array(9.8), np.array(0.02)
    MASS, POLE, TWO_THIRDS = np.array(0.1 + 1.0), np.array(0.1 * 0.5), np.array(0.5 * (4.0 / 3.0))

    def begin(self, random: np.random.Generator) -> np.ndarray:
        """Near the middle, nearly upright."""
        return random.uniform(-0.05, 0.05, 4)

    def move(self, state_DM: np.ndarray, action_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Euler's step; the end is a cart too far out or a pole too steep."""
        _, speed, angle, spin = state_DM
        sin, cos = np.sin(angle), np.cos(angle)
        push = (self.FORCE[action_M] + self.POLE * np.square(spin) * sin) / self.MASS
        inertia = self.TWO_THIRDS - self.POLE * np.square(cos) / self.MASS
        spin_rate = (self.GRAVITY * sin - cos * push) / inertia
        speed_rate = push - self.POLE * spin_rate * cos / self.MASS
        state_DM = state_DM + self.DT * np.array([speed, speed_rate, spin, spin_rate])
        fallen_M = (np.abs(state_DM[0]) > self.FAR) | (np.abs(state_DM[2]) > self.STEEP)
        return state_DM, self.REWARD.repeat(len(action_M)), fallen_M

    def see(self, state_DM: np.ndarray) -> np.ndarray:
        """Place, speed, angle and spin."""
        return state_DM.T.astype(np.float32, order="C")


HALF_TURN, WHOLE_TURN = np.array(np.pi), np.array(2 * np.pi)


class Acrobot(ClassicFleet):
    """Swing the tip of two hanging links over a line, by a torque between them.

    The state's last number is 1 until the first step: Gymnasium's start is float32, and so are its sine and cosine.
    """

    sees = _symmetric(1, 1, 1, 1, 4 * np.pi, 9 * np.pi)
    acts = Discrete(3)
    dimensions = 5

    TORQUE = np.array([-1.0, 0.0, 1.0])
    DT, HALF_DT, SIXTH_DT = np.array(0.2), np.array(0.2 / 2.0), np.array(0.2 / 6.0)
    SPINS_1, SPINS_2 = _limits(4 * np.pi), _limits(9 * np.pi)
    QUARTER, HALF, UNIT, FIVE_QUARTERS = np.array(0.25), np.array(0.5), np.array(1.0), np.array(1.25)
    MINUS_HALF, RIGHT_ANGLE, MINUS_HALF_TURN = np.array(-0.5), np.array(np.pi / 2), np.array(-np.pi)
    PULL_1, PULL_2 = np.array((0.5 + 1.0) * 9.8), np.array(0.5 * 9.8)

    def begin(self, random: np.random.Generator) -> np.ndarray:
        """Nearly hanging, nearly still."""
        return np.append(random.uniform(-0.1, 0.1, 4).astype(np.float32), 1.0)

    def move(self, state_DM: np.ndarray, action_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A Runge-Kutta step of fourth order; every step costs one until the tip is above the line."""
        old_4M, torque_M = state_DM[:4], self.TORQUE[action_M]
        rate1 = self._rate(old_4M, torque_M)
        rate2 = self._rate(old_4M + self.HALF_DT * rate1, torque_M)
        rate3 = self._rate(old_4M + self.HALF_DT * rate2, torque_M)
        rate4 = self._rate(old_4M + self.DT * rate3, torque_M)
        new_DM = np.zeros_like(state_DM)
        new_DM[:4] = old_4M + self.SIXTH_DT * (rate1 + TWO * rate2 + TWO * rate3 + rate4)
        angle_2M = new_DM[:2]
        while np.count_nonzero(over := angle_2M > HALF_TURN):
            angle_2M[over] -= WHOLE_TURN
        while np.count_nonzero(under := angle_2M < self.MINUS_HALF_TURN):
            angle_2M[under] += WHOLE_TURN
        new_DM[2], new_DM[3] = _clip(new_DM[2], self.SPINS_1), _clip(new_DM[3], self.SPINS_2)
        above_M = -np.cos(new_DM[0]) - np.cos(new_DM[1] + new_DM[0]) > self.UNIT
        return new_DM, above_M - self.UNIT, above_M

    def _rate(self, state_4M: np.ndarray, torque_M: np.ndarray) -> np.ndarray:
        """Change of the state in a second, by the equations of Sutton and Barto's book for two equal links."""
        angle1, angle2, spin1, spin2 = state_4M
        square1, square2 = np.float_power(state_4M[2:], TWO)
        sin, cos = np.sin(angle2), np.cos(angle2)
        d1 = self.QUARTER + (self.FIVE_QUARTERS + cos) + self.UNIT + self.UNIT
        d2 = self.QUARTER + self.HALF * cos + self.UNIT
        phi2 = self.PULL_2 * np.cos(angle1 + angle2 - self.RIGHT_ANGLE)
        swing = self.MINUS_HALF * square2 * sin - spin2 * spin1 * sin
        phi1 = swing + self.PULL_1 * np.cos(angle1 - self.RIGHT_ANGLE) + phi2
        drive = torque_M + d2 / d1 * phi1 - self.HALF * square1 * sin - phi2
        rate2 = drive / (self.FIVE_QUARTERS - np.float_power(d2, TWO) / d1)
        return np.array([spin1, spin2, -(d2 * rate2 + phi1) / d1, rate2])

    def see(self, state_DM: np.ndarray) -> np.ndarray:
        """Cosine and sine of both angles, and both spins."""
        angle1, angle2, spin1, spin2, fresh_M = state_DM
        seen = _columns(np.cos(angle1), np.sin(angle1), np.cos(angle2), np.sin(angle2), spin1, spin2)
        if np.count_nonzero(fresh_M):
            angle1, angle2 = state_DM[:2].astype(np.float32)
            first = _columns(np.cos(angle1), np.sin(angle1), np.cos(angle2), np.sin(angle2), spin1, spin2)
            seen = np.where(fresh_M[:, None], first, seen)
        return seen


class Pendulum(ClassicFleet):
    """Swing a pendulum up and hold it there, by a torque too weak to lift it at once. There is no end but the limit."""

    sees = _symmetric(1, 1, 8)
    acts = Box(-2.0, 2.0, (1,), np.float32)
    dimensions = 2

    TORQUES, SPINS = _limits(2.0, np.float32), _limits(8.0)
    DT, PULL, DRIVE = np.array(0.05), np.array(3 * 10.0 / 2), np.array(3.0, np.float32)
    SPIN_COST, TORQUE_COST = np.array(0.1), np.array(0.001, np.float32)

    def begin(self, random: np.random.Generator) -> np.ndarray:
        """At any angle, turning slowly."""
        return random.uniform([-np.pi, -1.0], [np.pi, 1.0])

    def move(self, state_DM: np.ndarray, action_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Euler's step, the angle by the new spin; the reward is for the state before."""
        angle, spin = state_DM
        torque = _clip(action_M[:, 0], self.TORQUES)
        effort = np.fromiter([one**2 for one in torque], np.float32, len(torque))
        off = (angle + HALF_TURN) % WHOLE_TURN - HALF_TURN
        cost_M = np.float_power(off, TWO) + self.SPIN_COST * np.float_power(spin, TWO) + self.TORQUE_COST * effort
        spin = _clip(spin + (self.PULL * np.sin(angle) + self.DRIVE * torque) * self.DT, self.SPINS)
        return np.array([angle + spin * self.DT, spin]), -cost_M, np.zeros(len(torque), np.bool_)

    def see(self, state_DM: np.ndarray) -> np.ndarray:
        """Cosine and sine of the angle, and the spin."""
        angle, spin = state_DM
        return _columns(np.cos(angle), np.sin(angle), spin)


class MountainCar(ClassicFleet):
    """Drive out of a valley with an engine too weak for the slope, by rocking to and fro."""

    sees = Box(np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32), dtype=np.float32)
    acts: ClassVar[Box | Discrete] = Discrete(3)
    dimensions = 2

    THREE, GRAVITY, STILL = np.array(3.0), np.array(-0.0025), np.array(0.0)
    FORCE, REWARD = np.array([-1, 0, 1]) * 0.001, np.array([-1.0])
    SPEEDS, PLACES, FLAG = _limits(0.07), (np.array(-1.2), np.array(0.6)), np.array(0.5)

    def begin(self, random: np.random.Generator) -> np.ndarray:
        """In the valley, standing still."""
        return np.array([random.uniform(-0.6, -0.4), 0.0])

    def move(self, state_DM: np.ndarray, action_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every step costs one; the end is the flag on the right, and the wall on the left stops the car."""
        place, speed = state_DM
        gain = self.FORCE[action_M] + _math_cos(self.THREE * place) * self.GRAVITY
        speed = _clip(speed + gain, self.SPEEDS)
        place = _clip(place + speed, self.PLACES)
        speed[(place == self.PLACES[0]) & (speed < self.STILL)] = 0.0
        there_M = (place >= self.FLAG) & (speed >= self.STILL)
        return np.array([place, speed]), self.REWARD.repeat(len(action_M)), there_M

    def see(self, state_DM: np.ndarray) -> np.ndarray:
        """Place and speed."""
        return state_DM[:2].T.astype(np.float32, order="C")


class MountainCarContinuous(MountainCar):
    """The same valley with an engine that pushes as hard as it is told, up to a limit, and costs its use.

    The state's last number is 1 until the first step: Gymnasium's start is float64, all later states are float32, and
    a step is reckoned in the precision of the state it starts from.
    """

    acts = Box(-1.0, 1.0, (1,), np.float32)
    dimensions = 3

    def begin(self, random: np.random.Generator) -> np.ndarray:
        """In the valley, standing still."""
        return np.append(super().begin(random), 1.0)

    def move(self, state_DM: np.ndarray, action_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A step costs the square of the action, also of what is beyond the limit; the flag pays 100."""
        push_M, fresh_M = action_M[:, 0], state_DM[2]
        new_DM = np.zeros_like(state_DM)
        new_DM[:2], there_M = self._roll(state_DM[:2].astype(np.float32), push_M)
        if np.count_nonzero(fresh_M):
            first_2M, first_there_M = self._roll(state_DM[:2], push_M)
            new_DM[:2] = np.where(fresh_M, first_2M.astype(np.float32), new_DM[:2])
            there_M = np.where(fresh_M, first_there_M, there_M)
        return new_DM, there_M * 100.0 - np.float_power(push_M, TWO) * 0.1, there_M

    def _roll(self, state_2M: np.ndarray, push_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """New place and speed, and whether the flag is reached, in the precision of the state."""
        place, speed = state_2M
        slope = 0.0025 * _math_cos(3 * place)
        partly = push_M * 0.0015 - slope.astype(np.float32)  # the action is float32, but its limits are Python's floats
        fully = (np.copysign(0.0015, push_M.astype(np.float64)) - slope).astype(place.dtype)
        speed = np.clip(speed + np.where(np.abs(push_M) > 1, fully, partly), -0.07, 0.07)
        place = np.clip(place + speed, -1.2, 0.6)
        speed[(place == -1.2) & (speed < 0)] = 0
        return np.array([place, speed]), (place >= 0.45) & (speed >= 0)


CLASSIC: Mapping[str, Callable[..., Fleet]] = {
    "CartPole-v0": partial(CartPole, "CartPole-v0", 200),
    "CartPole-v1": partial(CartPole, "CartPole-v1", 500),
    "Acrobot-v1": partial(Acrobot, "Acrobot-v1", 500),
    "Pendulum-v1": partial(Pendulum, "Pendulum-v1", 200),
    "MountainCar-v0": partial(MountainCar, "MountainCar-v0", 200),
    "MountainCarContinuous-v0": partial(MountainCarContinuous, "MountainCarContinuous-v0", 999),
}
"""Gymnasium id → (size, horizon=None) → fleet; without a horizon, the registered limit holds."""


def make_classic(id: str, size: int, horizon: int | None = None) -> Fleet:
    """A fleet of one of the tasks in `CLASSIC`."""
    if id not in CLASSIC:
        raise EnvError(f"{id} is not built in; these are: {', '.join(CLASSIC)}")
    return CLASSIC[id](size, horizon)
