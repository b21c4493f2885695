"""Gymnasium's classic control tasks as functions: its dynamics, operation by operation, in float64.

A sine of XLA's may differ from NumPy's in its last bit; beside that every step is Gymnasium's. Starts are drawn from
the same distributions by JAX's generator; `gymnasium_start` gives those of Gymnasium's own seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.utils.seeding import np_random

from grpo.envs.classic import make_classic
from grpo.envs.classic_fleet import ClassicFleet
from grpo.envs.functions.task import FunctionTask

Moved = tuple[jax.Array, jax.Array, jax.Array]
"""The next state, the reward, and whether the episode is over."""


def _uniform(key: Any, low: Any, high: Any, count: int) -> jax.Array:
    return jax.random.uniform(key, (count,), jnp.float64, jnp.asarray(low), jnp.asarray(high))


# --- CartPole -------------------------------------------------------------------------------------------------------


def _cartpole_start(key: Any) -> jax.Array:
    return _uniform(key, -0.05, 0.05, 4)


def _cartpole_step(state: jax.Array, action: Any, key: Any) -> Moved:
    place, speed, angle, spin = state
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * (spin * spin) * sin) / 1.1
    spin_rate = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * (cos * cos) / 1.1))
    speed_rate = push - 0.05 * spin_rate * cos / 1.1
    place, angle = place + 0.02 * speed, angle + 0.02 * spin
    new = jnp.stack([place, speed + 0.02 * speed_rate, angle, spin + 0.02 * spin_rate])
    fallen = (jnp.abs(place) > 2.4) | (jnp.abs(angle) > 12 * 2 * math.pi / 360)
    return new, jnp.float64(1.0), fallen


# --- Acrobot --------------------------------------------------------------------------------------------------------


def _acrobot_start(key: Any) -> jax.Array:
    return _uniform(key, -0.1, 0.1, 4)


def _acrobot_rate(state: jax.Array, torque: Any) -> jax.Array:
    """Change of the state in a second, by the equations of Sutton and Barto's book for two equal links."""
    angle1, angle2, spin1, spin2 = state
    sin, cos = jnp.sin(angle2), jnp.cos(angle2)
    d1 = 0.25 + (1.25 + cos) + 1.0 + 1.0
    d2 = 0.25 + 0.5 * cos + 1.0
    phi2 = 0.5 * 9.8 * jnp.cos(angle1 + angle2 - math.pi / 2)
    swing = -0.5 * spin2**2 * sin - spin2 * spin1 * sin
    phi1 = swing + (0.5 + 1.0) * 9.8 * jnp.cos(angle1 - math.pi / 2) + phi2
    rate2 = (torque + d2 / d1 * phi1 - 0.5 * spin1**2 * sin - phi2) / (1.25 - d2**2 / d1)
    return jnp.stack([spin1, spin2, -(d2 * rate2 + phi1) / d1, rate2])


def _wrapped(angle: jax.Array) -> jax.Array:
    """In [−π, π]. A spin is at most 9π, so that 1.8 turns are the most a step of 0.2 s makes."""
    for _ in range(2):
        angle = jnp.where(angle > math.pi, angle - 2 * math.pi, angle)
        angle = jnp.where(angle < -math.pi, angle + 2 * math.pi, angle)
    return angle


def _acrobot_step(state: jax.Array, action: Any, key: Any) -> Moved:
    torque = jnp.asarray(action, jnp.float64) - 1.0
    rate1 = _acrobot_rate(state, torque)
    rate2 = _acrobot_rate(state + 0.1 * rate1, torque)
    rate3 = _acrobot_rate(state + 0.1 * rate2, torque)
    rate4 = _acrobot_rate(state + 0.2 * rate3, torque)
    angle1, angle2, spin1, spin2 = state + 0.2 / 6.0 * (rate1 + 2 * rate2 + 2 * rate3 + rate4)
    angle1, angle2 = _wrapped(angle1), _wrapped(angle2)
    spin1, spin2 = jnp.clip(spin1, -4 * math.pi, 4 * math.pi), jnp.clip(spin2, -9 * math.pi, 9 * math.pi)
    above = -jnp.cos(angle1) - jnp.cos(angle2 + angle1) > 1.0
    return jnp.stack([angle1, angle2, spin1, spin2]), jnp.where(above, 0.0, -1.0), above


def _acrobot_see(state: jax.Array) -> jax.Array:
    angle1, angle2, spin1, spin2 = state
    seen = [jnp.cos(angle1), jnp.sin(angle1), jnp.cos(angle2), jnp.sin(angle2), spin1, spin2]
    return jnp.stack(seen).astype(jnp.float32)


# --- Pendulum -------------------------------------------------------------------------------------------------------


def _pendulum_start(key: Any) -> jax.Array:
    return _uniform(key, [-math.pi, -1.0], [math.pi, 1.0], 2)


def _pendulum_step(state: jax.Array, action: Any, key: Any) -> Moved:
    angle, spin = state
    torque = jnp.clip(action[0], -2.0, 2.0)
    off = (angle + math.pi) % (2 * math.pi) - math.pi
    cost = off**2 + 0.1 * spin**2 + (0.001 * torque**2).astype(jnp.float64)
    drive = (3.0 * torque).astype(jnp.float64)
    spin = jnp.clip(spin + (15.0 * jnp.sin(angle) + drive) * 0.05, -8.0, 8.0)
    return jnp.stack([angle + spin * 0.05, spin]), -cost, jnp.bool_(False)


def _pendulum_see(state: jax.Array) -> jax.Array:
    angle, spin = state
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), spin]).astype(jnp.float32)


# --- MountainCar ----------------------------------------------------------------------------------------------------


def _valley_start(key: Any) -> jax.Array:
    return jnp.stack([_uniform(key, -0.6, -0.4, 1)[0], jnp.float64(0.0)])


def _rolled(state: jax.Array, gain: Any, flag: float) -> tuple[jax.Array, jax.Array]:
    place, speed = state
    speed = jnp.clip(speed + gain, -0.07, 0.07)
    place = jnp.clip(place + speed, -1.2, 0.6)
    speed = jnp.where((place == -1.2) & (speed < 0), 0.0, speed)
    return jnp.stack([place, speed]), (place >= flag) & (speed >= 0)


def _mountaincar_step(state: jax.Array, action: Any, key: Any) -> Moved:
    force = (jnp.asarray(action, jnp.float64) - 1.0) * 0.001
    new, there = _rolled(state, force + jnp.cos(3 * state[0]) * -0.0025, 0.5)
    return new, jnp.float64(-1.0), there


def _continuous_step(state: jax.Array, action: Any, key: Any) -> Moved:
    """Gymnasium's states are float32 from the first step on, and so are these."""
    push = action[0].astype(jnp.float64)
    force = jnp.clip(push, -1.0, 1.0)
    new, there = _rolled(state, force * 0.0015 - 0.0025 * jnp.cos(3 * state[0]), 0.45)
    return new.astype(jnp.float32).astype(jnp.float64), jnp.where(there, 100.0, 0.0) - 0.1 * push**2, there


def _as_it_is(state: jax.Array) -> jax.Array:
    return state.astype(jnp.float32)


_FUNCTIONS: Mapping[str, tuple[int, Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "CartPole-v0": (200, _cartpole_start, _cartpole_step, _as_it_is),
    "CartPole-v1": (500, _cartpole_start, _cartpole_step, _as_it_is),
    "Acrobot-v1": (500, _acrobot_start, _acrobot_step, _acrobot_see),
    "Pendulum-v1": (200, _pendulum_start, _pendulum_step, _pendulum_see),
    "MountainCar-v0": (200, _valley_start, _mountaincar_step, _as_it_is),
    "MountainCarContinuous-v0": (999, _valley_start, _continuous_step, _as_it_is),
}
TASKS = tuple(_FUNCTIONS)
"""Gymnasium ids that are functions here."""


def classic_task(id: str) -> FunctionTask:
    """One of `TASKS`."""
    limit, start, step, see = _FUNCTIONS[id]
    fleet = make_classic(id, 1)
    seeded = partial(gymnasium_start, id)
    return FunctionTask(id, fleet.observation_space, fleet.action_space, limit, start, step, see, seeded)


def gymnasium_start(id: str, seed: int) -> np.ndarray:
    """The state in which Gymnasium's own environment begins with a seed."""
    fleet = make_classic(id, 1)
    assert isinstance(fleet, ClassicFleet)
    size = 4 if id.startswith(("CartPole", "Acrobot")) else 2
    return np.asarray(fleet.begin(np_random(seed)[0])[:size], np.float64)
