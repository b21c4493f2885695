"""Compiled functions as JAX's cache has them, without what they were traced from: arrays in, arrays out, by position.

JAX itself reads the same files with the same calls, once it has traced and lowered a function to find out which. These
calls are not part of its public interface: whoever asks has to be content with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

ABSENT = ("scale", "baseline_NT")
"""What a step may lack."""


def expect_solvers() -> None:
    """Have LAPACK at hand, as lowering a function does that has equations to solve: before it is first called."""
    import_module("jaxlib.cpu._lapack").initialize()


class Loaded:
    """One function, on the first CPU."""

    def __init__(self, data: bytes, outs: Sequence[str]) -> None:
        """outs: what it gives, named as in a tree."""
        from jax._src import compilation_cache as cache
        from jaxlib.xla_client import DeviceList

        self._device, self._outs = jax.local_devices(backend="cpu")[0], outs
        data, _ = cache.extract_executable_and_time(cache.decompress_executable(data))
        devices = DeviceList((self._device,))
        self._run = self._device.client.deserialize_executable(data, executable_devices=devices)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """What it gives, laid out like the tree that it was."""
        placed = [jax.device_put(x, self._device) for x in leaves]
        found = self._run.execute_sharded(placed).disassemble_into_single_device_arrays()
        return _tree({name: np.asarray(x) for name, (x,) in zip(self._outs, found, strict=True)})


def _tree(leaves: dict[str, np.ndarray]) -> Any:
    """`.adam.flat_W` as found.adam.flat_W; of a tuple's leaves, `[0]`, a list."""
    if not any(name.startswith(".") for name in leaves):
        return [*leaves.values()]
    made: dict[str, Any] = dict.fromkeys(ABSENT)
    inner: dict[str, dict[str, np.ndarray]] = {}
    for name, x in leaves.items():
        *within, last = name.removeprefix(".").split(".")
        (inner.setdefault(within[0], {}) if within else made)[last] = x
    return SimpleNamespace(**made | {name: SimpleNamespace(**own) for name, own in inner.items()})
