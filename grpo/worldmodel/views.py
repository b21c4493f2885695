"""What of an observation the world model sees: one vector of all numbers, and pictures brought to one size.

Pictures smaller than the smallest that convolutions can halve four times (a board of cells, say) are read as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch.nn import functional as F

from grpo.envs.fleet import EnvError, Tree
from grpo.envs.make import EnvFactory
from grpo.envs.pictures import PictureObservation
from grpo.envs.spaces import Layout, Numbers, Picture, flatten, layout, leaf
from grpo.worldmodel.model.networks import DOWN

VECTOR, IMAGE = "vector", "image"


class View:
    """From observations of M members to the model's dict of arrays."""

    def __init__(self, space: gym.Space[Any], side: int) -> None:
        found = layout(space)
        small = [part for part in found.pictures if min(part.size[1:]) < DOWN]
        numbers = (*found.numbers, *(Numbers(part.path, _shape(part)) for part in small))
        self._numbers = Layout(numbers, ())
        self._pictures = {_name(part): part for part in found.pictures if part not in small}
        self._side = side
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of each observation, as the world model wants to know them."""
        if self._numbers.size:
            self.shapes[VECTOR] = (self._numbers.size,)
        for name, part in self._pictures.items():
            self.shapes[name] = (side, side, part.size[0])

    def __call__(self, tree: Tree) -> dict[str, np.ndarray]:
        """Vectors in float32, pictures in bytes."""
        seen = {VECTOR: flatten(tree, self._numbers)} if self._numbers.size else {}
        return seen | {name: self._resized(leaf(tree, part.path), part) for name, part in self._pictures.items()}

    def _resized(self, pixels: np.ndarray, part: Picture) -> np.ndarray:
        """(M, side, side, C), frames of a stack as channels."""
        stack, *shape = part.frames
        x = torch.from_numpy(np.ascontiguousarray(pixels)).reshape(len(pixels), stack, *shape)
        x = x.permute(0, 1, 4, 2, 3) if part.channels_last else x
        x = x.flatten(1, 2).float() * (255.0 / part.high)
        if x.shape[-2:] != (self._side, self._side):
            x = F.interpolate(x, (self._side, self._side), mode="area")
        return x.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def _shape(part: Picture) -> tuple[int, ...]:
    stack, *rest = part.frames
    return tuple(rest) if stack == 1 else part.frames


def _name(part: Picture) -> str:
    return ".".join(part.path) or IMAGE


def pooled(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W, C) bytes as (height, width, C) bytes: each pixel the mean of all that it touches, as in `View`."""
    frame = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None].float()
    small = F.interpolate(frame, (height, width), mode="area")[0]
    return np.ascontiguousarray(small.round().to(torch.uint8).permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class DrawnFactory:
    """How to make an environment whose observation is its own drawing, (side, side, 3).

    It can be sent to other processes if its parts can.
    """

    env: Any
    side: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    horizon: int | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return EnvFactory(self.env).name

    def __call__(self, render_mode: str | None = None) -> gym.Env[Any, Any]:
        """One more; whoever asks for another render mode than a picture cannot have it."""
        if render_mode not in (None, "rgb_array"):
            raise EnvError(f"pixels=true draws into memory; {render_mode} is not possible beside it")
        env = EnvFactory(self.env, self.kwargs, self.horizon).make(render_mode="rgb_array")
        return PictureObservation(env, self.side, shrink=pooled)
