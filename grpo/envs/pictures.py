"""Pictures as observations: made smaller, stacked, and kept as bytes until a network reads them.

    env: grpo.envs.pictures:drawn                 what an environment draws, instead of what it tells
    env_kwargs: {id: MiniGrid-Empty-5x5-v0, agent_pov: true, tile_size: 8, size: 56}

Each pixel of a smaller picture is the mean of the area that it covers, as OpenCV's INTER_AREA has it, without OpenCV.

Letters: K pixels that a stretch touches, or frames of a stack; S stretches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import EnvError
from grpo.envs.video import frames_of

GREY_RGB = np.array([0.299, 0.587, 0.114], np.float32)
"""How bright the three colours look (ITU-R BT.601)."""


def smaller(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W) or (H, W, C) bytes as (height, width, …) bytes."""
    if picture.shape[:2] == (height, width):
        return picture
    rows = _averaged(picture.astype(np.float32), height)
    columns = _averaged(rows.swapaxes(0, 1), width).swapaxes(0, 1)
    return np.ascontiguousarray(np.rint(columns).astype(np.uint8))


def _averaged(x: np.ndarray, size: int) -> np.ndarray:
    """Means along the first axis, over `size` equal stretches of it."""
    places_KS, weights_KS = _stretches(len(x), size)
    more = (...,) + (None,) * (x.ndim - 1)
    total: np.ndarray = x[places_KS[0]] * weights_KS[0][more]
    for place_S, weight_S in zip(places_KS[1:], weights_KS[1:], strict=True):
        total += x[place_S] * weight_S[more]
    return total


@lru_cache(maxsize=16)
def _stretches(length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels that each stretch touches and its share of them, (K, size) both; a share is 0 where it touches fewer."""
    edge = np.arange(size + 1) * length / size
    first_S, last_S = np.floor(edge[:-1]).astype(int), np.ceil(edge[1:] - 1e-9).astype(int)
    place_KS = first_S + np.arange(int((last_S - first_S).max()))[:, None]
    covered_KS = np.minimum(place_KS + 1, edge[1:]) - np.maximum(place_KS, edge[:-1])
    shares_KS = np.maximum(covered_KS, 0.0) * size / length
    return np.minimum(place_KS, length - 1), shares_KS.astype(np.float32)


def pushed(stack: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """The last frames (K, …), oldest first, one later; a new array, because the old one may have been kept."""
    return np.concatenate([stack[1:], frame[None]])


def drawn(
    id: str,
    size: int = 84,
    stack: int = 1,
    grey: bool = False,
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
    **kwargs: Any,
) -> gym.Env[Any, Any]:
    """The environment of this id with what it draws as its observation; further arguments are its own.

    `stack` pictures, the oldest first, each `size` pixels high and wide; `grey`: without colours. `max_episode_steps`
    takes the place of the time limit that the id is registered with.
    """
    from grpo.envs.make import EnvFactory  # a fleet of these is made there

    if render_mode not in (None, "rgb_array"):
        raise EnvError(f"{id}: its pictures are what is learned from, so it has render_mode='rgb_array' only")
    if size < 1 or stack < 1:
        raise EnvError(f"{id}: size and stack must be at least 1; got {size} and {stack}")
    env = EnvFactory(id, kwargs, max_episode_steps).make(render_mode="rgb_array")
    return PictureObservation(env, size, stack, grey)


class PictureObservation(gym.Wrapper[Any, Any, Any, Any]):
    """Observations are the last pictures: (size, size, 3), with `grey` (K, size, size), else (K, size, size, 3)."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        size: int = 84,
        stack: int = 1,
        grey: bool = False,
        shrink: Callable[[np.ndarray, int, int], np.ndarray] = smaller,
    ) -> None:
        """shrink: from a picture, height and width to that picture so large."""
        super().__init__(env)
        self._size, self._grey, self._shrink = size, grey, shrink
        one = (size, size) if grey else (size, size, 3)
        self._alone = stack == 1 and not grey
        self._frames = np.zeros((stack, *one), np.uint8)
        shape = one if self._alone else self._frames.shape
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)

    def reset(self, **options: Any) -> Any:
        """A stack of the first picture alone."""
        _, info = self.env.reset(**options)
        self._frames = np.repeat(self._drawn()[None], len(self._frames), 0)
        return self._observed(), info

    def step(self, action: Any) -> Any:
        """The environment's, seen."""
        _, reward, terminated, truncated, info = self.env.step(action)
        self._frames = pushed(self._frames, self._drawn())
        return self._observed(), reward, terminated, truncated, info

    def _drawn(self) -> np.ndarray:
        picture = frames_of(self.env)[-1]
        if picture.ndim != 3 or picture.dtype != np.uint8:
            raise EnvError(f"render() gave {picture.dtype} of shape {picture.shape}, not a picture of (H, W, 3) bytes")
        if self._grey:
            picture = np.rint(picture @ GREY_RGB).astype(np.uint8)
        return self._shrink(picture, self._size, self._size)

    def _observed(self) -> np.ndarray:
        return self._frames[0] if self._alone else self._frames
