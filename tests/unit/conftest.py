"""The three array libraries behind one face: make float64 arrays, take gradients, compare with plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

jax.config.update("jax_enable_x64", True)

TOLERANCE = 5e-13
"""Distance allowed from the closed form, absolute or relative: any two kinds are then within 1e-12 of each other."""


@dataclass(frozen=True)
class Kind:
    """One array library."""

    name: str
    from_numpy: Callable[[Any], Any]
    module: Any

    def floats(self, x: Any, dtype: str = "float64") -> Any:
        """Nested lists as a floating-point array."""
        return self.from_numpy(np.asarray(x, dtype=dtype))

    def ints(self, x: Any) -> Any:
        """Nested lists as an int64 array."""
        return self.from_numpy(np.asarray(x, dtype=np.int64))

    def bools(self, x: Any) -> Any:
        """Nested lists of 0 and 1 as a mask."""
        return self.from_numpy(np.asarray(x, dtype=bool))

    def log_softmax(self, x: Any) -> Any:
        """x − log Σ exp x over the last axis, differentiable."""
        xp = self.module
        return x - xp.log(xp.sum(xp.exp(x), axis=-1, keepdims=True))

    def gradient(self, fn: Callable[[Any], Any], x: Any, dtype: str = "float64") -> np.ndarray:
        """Gradient of the scalar fn at x by the library's own differentiation."""
        x = x if hasattr(x, "dtype") else self.floats(x, dtype)
        if self.name == "torch":
            x = x.detach().clone().requires_grad_()
            value = fn(x)
            return plain(torch.autograd.grad(value, x)[0]) if value.requires_grad else np.zeros(tuple(x.shape))
        return plain(jax.jit(jax.grad(fn))(x))

    def close(self, actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
        """Fail unless `actual` is an array of this library within `tolerance` of the plain numbers `expected`."""
        assert isinstance(actual, type(self.floats([0.0])) | np.generic), f"{type(actual)} is no {self.name} array"
        np.testing.assert_allclose(plain(actual), np.asarray(expected, float), rtol=tolerance, atol=tolerance)


def plain(x: Any) -> np.ndarray:
    """Any array as a NumPy float64 one."""
    return np.asarray(x.detach().double() if isinstance(x, torch.Tensor) else x).astype(np.float64)


KINDS = {
    "numpy": Kind("numpy", lambda x: x, np),
    "torch": Kind("torch", lambda x: torch.from_numpy(np.array(x)), torch),
    "jax": Kind("jax", jnp.asarray, jnp),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """NumPy, PyTorch and JAX in turn."""
    return KINDS[request.param]


@pytest.fixture(params=["numpy", "torch"])
def eager(request: pytest.FixtureRequest) -> Kind:
    """The two that compile nothing: for further examples of what one test already shows on all three."""
    return KINDS[request.param]


@pytest.fixture(params=["torch", "jax"])
def autodiff(request: pytest.FixtureRequest) -> Kind:
    """The two that differentiate."""
    return KINDS[request.param]
