"""What an environment answers, read one value at a time and checked before it is believed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from grpo.envs.fleet import Tree
from grpo.envs.spaces import bounds, numeric
from grpo.rollouts import LARGEST_REWARD


class Wrong(Exception):
    """What an environment must not do, in words that need no class before them."""


def reader(space: gym.Space[Any], label: str = "observation") -> Callable[[Any], Tree]:
    """Reads single observations of a space: checked, in its dtype, without what is not numbers."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        named: list[tuple[Any, gym.Space[Any]]] = (
            list(space.spaces.items()) if isinstance(space, spaces.Dict) else list(enumerate(space.spaces))
        )
        parts = [(key, reader(part, f"{label}[{key!r}]")) for key, part in named if numeric(part) is not None]
        wanted, kind = (dict, "dict") if isinstance(space, spaces.Dict) else (tuple | list, "tuple")

        def read_parts(value: Any) -> Tree:
            if not isinstance(value, wanted):
                raise Wrong(f"{label} is {kind_of(value)}, not a {kind}")
            try:
                return {str(key): read(value[key]) for key, read in parts}
            except (KeyError, IndexError) as error:
                raise Wrong(f"{label} has no part {error}, its space does") from None

        return read_parts

    shape, dtype = tuple(space.shape or ()), np.dtype(space.dtype)
    low, high = (None, None) if isinstance(space, spaces.Box) else bounds(space)

    def read(value: Any) -> Tree:
        array = np.asarray(value)
        if array.shape != shape:
            raise Wrong(f"{label} has shape {array.shape}, its space {shape}")
        if array.dtype != dtype:
            with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is found below
                cast = array.astype(dtype) if array.dtype.kind in "biuf" else None
            if cast is None or (dtype.kind != "f" and not np.array_equal(cast, array)):
                raise Wrong(f"{label} is {array.dtype}, its space {dtype}")
            array = cast
        if dtype.kind == "f" and not np.isfinite(array).all():
            raise Wrong(f"{label} is not finite: {np.ravel(array)[~np.isfinite(array).ravel()][0]}")
        if low is not None and not ((array >= low) & (array <= high)).all():
            raise Wrong(f"{label} {array} is not in {space}")
        return array

    return read


def reward_of(value: Any) -> float:
    """A number that others can be compared with."""
    try:
        reward = math.nan if getattr(value, "ndim", 0) else float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise Wrong(f"reward is {_shown(value)}, not a finite number")
    if abs(reward) > LARGEST_REWARD:
        raise Wrong(f"reward is {reward:g}, which float32 cannot hold; scale it")
    return reward


def flag_of(value: Any, name: str) -> bool:
    """True or False, Python's or NumPy's."""
    if isinstance(value, bool | np.bool_) or (getattr(value, "dtype", None) == np.bool_ and not np.ndim(value)):
        return bool(value)
    raise Wrong(f"{name} is {value!r:.80}, not True or False")


def success_of(info: Any) -> float:
    """1, 0, or NaN where the environment does not tell."""
    if not isinstance(info, dict):
        raise Wrong(f"info is {kind_of(info)}, not a dict")
    value = info.get("is_success", info.get("success"))
    return math.nan if value is None or np.ndim(value) else float(bool(value))


def _shown(value: Any) -> str:
    """For messages: a value; of a whole number of thousands of digits, which Python does not spell out, its kind."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return kind_of(value)


def kind_of(value: Any) -> str:
    """For messages: what something is."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__qualname__}"
