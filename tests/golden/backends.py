"""The three array libraries behind one face: make an array, differentiate a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.golden.vectors import Vector

jax.config.update("jax_enable_x64", True)


def plain(x: Any) -> np.ndarray:
    """Nested lists with null for NaN as a float64 array."""
    return np.asarray(_nan(x), dtype=np.float64)


def _nan(x: Any) -> Any:
    if isinstance(x, list):
        return [_nan(item) for item in x]
    return np.nan if x is None else x


class Numpy:
    name = "numpy"
    differentiates = False

    def runs(self, vector: Vector) -> bool:
        return self.differentiates or not all(name.startswith("grad") for name in vector.outputs)

    def array(self, x: Any) -> Any:
        return plain(x)

    def ints(self, x: Any) -> Any:
        return np.asarray(x, dtype=np.int64)

    def gradients(self, fn: Callable[..., Any], leaves: list[Any]) -> tuple[Any, list[Any]]:
        return fn(*leaves), []


class Torch(Numpy):
    name = "torch"
    differentiates = True

    def array(self, x: Any) -> Any:
        return torch.as_tensor(plain(x))

    def ints(self, x: Any) -> Any:
        return torch.as_tensor(np.asarray(x, dtype=np.int64))

    def gradients(self, fn, leaves):
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        value = fn(*leaves)
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        return value, [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]


class Jax(Numpy):
    name = "jax"
    differentiates = True

    def runs(self, vector: Vector) -> bool:
        return vector.first_of_kind

    def array(self, x: Any) -> Any:
        return jnp.asarray(plain(x))

    def ints(self, x: Any) -> Any:
        return jnp.asarray(np.asarray(x, dtype=np.int64))

    def gradients(self, fn, leaves):
        return jax.value_and_grad(fn, argnums=tuple(range(len(leaves))))(*leaves)


BACKENDS = (Torch(), Numpy(), Jax())
