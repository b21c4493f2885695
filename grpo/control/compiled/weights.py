"""A policy's weights as one flat vector, in the order of its parameters.

Letters: W all weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.core.arrays import Array, is_torch


@dataclass(frozen=True)
class Weights:
    """Where each parameter lies in the flat vector."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @staticmethod
    def of(parameters: Mapping[str, Array]) -> Weights:
        """As a policy has them."""
        return Weights(tuple((name, tuple(p.shape)) for name, p in parameters.items()))

    @property
    def size(self) -> int:
        """W."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    def apart(self, flat_W: Any) -> dict[str, Any]:
        """By name; of NumPy or JAX arrays, views where they can be."""
        found, at = {}, 0
        for name, shape in self.shapes:
            found[name] = flat_W[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        return found


def flat(arrays: Mapping[str, Array]) -> np.ndarray:
    """Arrays or tensors one after the other, in float32."""
    found = [x.detach().cpu().numpy() if is_torch(x) else x for x in arrays.values()]
    return np.concatenate([x.ravel() for x in found]).astype(np.float32)
