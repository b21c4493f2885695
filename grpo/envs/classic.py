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

Letters: D numbers of a state, M members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from grpo.envs.classic_fleet import ClassicFleet
from grpo.envs.fleet import EnvError, Fleet

TWO = np.array(2.0)


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
