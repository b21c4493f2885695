"""A small network in NumPy. For sixteen rows through two layers, calling torch costs more than the arithmetic.

`numpy_policy(module)` finds the chain of dense layers that a module is, checks that it gives the same numbers, and
returns a `NumpyPolicy` that shares the module's weights: what an optimizer changes in place is seen at once. Anything
else (pictures, memory, dropout, other devices) gives None, and the caller asks torch.

Letters: M observations, D numbers of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from grpo.control.activations import IN_PLACE
from grpo.control.networks import ACTIVATIONS

_TOLERANCE = 1e-5
_SCALES = (0.1, 1.0, 30.0)
"""Of the random inputs on which both must agree: small, usual, and large enough to meet a clamp."""


_ACTIVATIONS = {ACTIVATIONS[name]: activate for name, activate in IN_PLACE.items()}


class NumpyPolicy:
    """A chain of dense layers on (M, D) float32 arrays. Keeps buffers: not for several threads at once."""

    def __init__(self, chain: list[nn.Module]) -> None:
        self._chain, self._room = chain, -1
        self.refresh()

    def refresh(self) -> None:
        """Look the weights up again: only needed where a parameter was replaced instead of changed in place."""
        self._layers: list[tuple[np.ndarray, np.ndarray | None, list[Callable[[np.ndarray], Any]]]] = []
        for layer in self._chain:
            if isinstance(layer, nn.Linear):
                own = {name: tensor.detach().numpy() for name, tensor in layer.named_parameters()}
                self._layers.append((own["weight"].T, own.get("bias"), []))
            else:
                self._layers[-1][2].append(_ACTIVATIONS[type(layer)])

    @property
    def size(self) -> int:
        """D, the numbers of an observation."""
        return self._layers[0][0].shape[0]

    def __call__(self, obs_MD: np.ndarray) -> np.ndarray:
        """(M, F), an array of its own."""
        count = len(obs_MD)
        x = np.asarray(obs_MD, np.float32).reshape(count, self.size)
        if count > self._room:
            self._room = count
            self._buffers = [np.empty((count, weight.shape[1]), np.float32) for weight, _, _ in self._layers]
        for (weight, bias, activations), buffer in zip(self._layers, self._buffers, strict=True):
            x = np.matmul(x, weight, out=buffer[:count])
            if bias is not None:
                x += bias
            for activate in activations:
                activate(x)
        return x.copy()


def numpy_policy(module: nn.Module) -> NumpyPolicy | None:
    """The module in NumPy; None where it is not a plain chain of dense layers on the CPU."""
    chain = _chain(module)
    found = NumpyPolicy(chain) if chain else None
    return found if found and _agrees(found, module) else None


def _chain(module: nn.Module) -> list[nn.Module] | None:
    """Its layers in order, the first of them dense; None: there is more to it."""
    chain = [layer for layer in module.modules() if not list(layer.children()) and type(layer) is not nn.Identity]
    if not chain or type(chain[0]) is not nn.Linear:
        return None
    if any(type(layer) is not nn.Linear and type(layer) not in _ACTIVATIONS for layer in chain):
        return None
    # A parameter or buffer beside the layers would be missed once training moves it, however well it agrees today.
    held = [*module.parameters(), *module.buffers()]
    beside = {id(tensor) for tensor in held} - {id(tensor) for layer in chain for tensor in layer.parameters()}
    plain = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in held)
    return chain if plain and not beside else None


@torch.no_grad()
def _agrees(found: NumpyPolicy, module: nn.Module) -> bool:
    """Whether both give the same on random inputs, learning and not."""
    random, training = np.random.default_rng(0), module.training
    try:
        for mode in (True, False):
            module.train(mode)
            for scale in _SCALES:
                x = (scale * random.standard_normal((16, found.size))).astype(np.float32)
                out, mine = module(torch.from_numpy(x)), found(x)
                if not isinstance(out, torch.Tensor) or out.shape != mine.shape:
                    return False
                if not np.allclose(mine, out.numpy(), rtol=_TOLERANCE, atol=_TOLERANCE):
                    return False
    except Exception:  # whatever a user's forward may raise: then torch is asked, and says it better
        return False
    finally:
        module.train(training)
    return True
