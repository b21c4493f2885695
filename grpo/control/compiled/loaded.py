"""Compiled functions as JAX's cache has them, without what they were traced from and without JAX: arrays in and out.

JAX itself reads the same files with the same calls of jaxlib, once it has traced and lowered a function to find out
which. These calls are not part of its public interface: whoever asks has to be content with an error.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as JAX has it: nothing is said of devices

from jaxlib import xla_client

ABSENT = ("scale", "baseline_NT")
"""What a step may lack."""
TIME = 4
"""Bytes in front of a program that say how long it took to compile."""
ZSTANDARD = "compression.zstd" if sys.version_info >= (3, 14) else "zstandard"
"""What packs JAX's files, where it is installed."""


def expect_solvers() -> None:
    """Have LAPACK at hand, as lowering a function does that has equations to solve: before it is read."""
    with suppress(Exception):  # else SciPy as a whole is imported
        for name in ("scipy.linalg.cython_blas", "scipy.linalg.cython_lapack"):
            _import_alone(name)
    lapack = import_module("jaxlib.cpu._lapack")
    lapack.initialize()
    for name, function in lapack.registrations().items():
        xla_client.register_custom_call_target(name, function, "cpu", api_version=int(name.endswith("_ffi")))


def _import_alone(name: str) -> None:
    """A module without the package around it, which takes many times as long to import."""
    if name in sys.modules:
        return
    package, *within = name.split(".")[:-1]
    around = find_spec(package)
    assert around is not None
    spec = PathFinder.find_spec(name, ["/".join([place, *within]) for place in around.submodule_search_locations or ()])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module


@cache
def _client() -> Any:
    """XLA's CPU of this process."""
    return xla_client.make_cpu_client()


class _Here(xla_client.SingleDeviceSharding):  # type: ignore[misc]
    """The one device, with what JAX's own class knows besides and jaxlib asks for."""

    memory_kind = None

    def _to_xla_hlo_sharding(self, axes: int) -> Any:
        return xla_client.HloSharding.replicate()


class Loaded:
    """One function, on the first CPU."""

    def __init__(self, data: bytes, outs: Sequence[str]) -> None:
        """outs: what it gives, named as in a tree."""
        client = _client()
        self._device, self._outs = client.local_devices()[0], outs
        self._here = _Here(self._device)
        devices = xla_client.DeviceList((self._device,))
        self._run = client.deserialize_executable(_unpacked(data)[TIME:], executable_devices=devices)
        self._result = xla_client.array_result_handler(_told(np.zeros(())), self._here, True, True)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """What it gives, laid out like the tree that it was."""
        found = self._run.execute_sharded([self._placed(np.asarray(x)) for x in leaves])
        results = found.consume_with_handlers([self._result] * len(self._outs))
        # What a buffer says of itself is asked for: its array has been told nothing, and would import JAX.
        return _tree({name: np.asarray(memoryview(x)) for name, x in zip(self._outs, results, strict=True)})

    def _placed(self, x: np.ndarray) -> Any:
        return xla_client.batched_device_put(_told(x), self._here, [x], [self._device], enable_x64=True)


def _told(x: np.ndarray) -> Any:
    """What jaxlib asks of an array's type."""
    return SimpleNamespace(shape=x.shape, dtype=x.dtype, weak_type=False)


def _unpacked(data: bytes) -> bytes:
    """A file of JAX's cache."""
    try:
        return zlib.decompress(data)
    except zlib.error:
        return bytes(import_module(ZSTANDARD).decompress(data))


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
