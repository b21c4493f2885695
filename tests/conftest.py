"""Settings every test shares, and how much memory a worker of the suite holds."""

import ctypes
import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from grpo.run.memory import memory

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are interpreted; read when triton is first imported, by anyone
# A program of JAX runs once here, on a few numbers: compiling it well takes twice as long as compiling it.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", f"{QUICKLY} --xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")  # a test leaves nothing in the user's cache
torch.set_num_threads(1)  # arrays here are tiny; threads only cost
os.environ.setdefault("GRPO_TRACEBACK", "full")  # whoever mends a test wants all of it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # to processes that tests start, too
settings.register_profile("ci", derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

GROWN = 0.3e9
"""Bytes by which a worker may grow before it lets go, after a file, of what its tests left behind."""
MOST = 3.0
"""GiB that a worker may hold: four of them and a browser fit a machine of 16."""
PEAKS = pytest.StashKey[list[float]]()
HELD = pytest.StashKey[float]()


def pytest_configure(config):
    config.stash[PEAKS] = []
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":  # not who only hands out: it runs on
        gc.disable()  # what is imported stays, until tests are collected


@pytest.fixture(autouse=True)
def as_from_the_index(monkeypatch):
    """Advice on what to install names the distribution, wherever this one was installed from."""
    monkeypatch.setattr("grpo.errors.origin", lambda: ("", "anygrpo"))


def pytest_collection_finish(session):
    """A million objects of imported modules stay to the end: looking through them takes the collector a second."""
    gc.enable()
    gc.collect()
    gc.freeze()
    session.config.stash[HELD] = held()


def pytest_runtest_teardown(item, nextitem):
    """JAX keeps a compiled program for each operation and shape, which the next file has other ones of."""
    if nextitem is None or nextitem.path == item.path or held() < item.config.stash[HELD] + GROWN:
        return
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    item.config.stash[HELD] = held()


def held() -> float:
    """Bytes in memory now; 0 where the system does not say."""
    said = Path("/proc/self/statm")
    return int(said.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if said.exists() else 0.0


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    gc.unfreeze()
    peak = memory()["memory/host_gib"]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = peak
    else:
        session.config.stash[PEAKS].append(peak)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    node.config.stash[PEAKS].append(getattr(node, "workeroutput", {}).get("peak", 0.0))


def pytest_terminal_summary(terminalreporter, config):
    if peak := max(config.stash[PEAKS], default=0.0):
        remark = "" if peak < MOST else f": more than {MOST:g}; look for what a test keeps after its end"
        terminalreporter.write_line(f"most memory of one process of the suite: {peak:.2f} GiB{remark}")
