"""What the members of a fleet see, in memory that its processes share: pictures are written once and never sent.

Row i is member i's; its worker writes it before it answers, and the parent copies it out before it asks again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from multiprocessing import util
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import Tree
from grpo.envs.spaces import each, leaves, put, take, zeros

WORTH_IT = 4096
"""Bytes of an observation from which on a pipe is slower."""


def share(space: gym.Space[Any], size: int) -> SharedObservations | None:
    """Room for so many members; None where little is seen, or the machine shares too little memory."""
    if sum(x.nbytes for x in leaves(zeros(space, 1))) < WORTH_IT:
        return None
    with contextlib.suppress(OSError):
        return SharedObservations(space, size)
    return None


class SharedObservations:
    """One row a member; with a name it is somebody else's."""

    def __init__(self, space: gym.Space[Any], size: int, name: str | None = None) -> None:
        self._rows: Tree = None  # before the memory, so that they are let go of before it, too
        one = zeros(space, 1)
        whole = size * sum(x.nbytes for x in leaves(one))
        self._memory = SharedMemory(name, create=name is None, size=whole)
        self.name = self._memory.name
        self._end = util.Finalize(self, _let_go, (self._memory, name is None), exitpriority=50)
        if name is None:
            _claim(self.name, whole)
        at = 0

        def placed(x: np.ndarray) -> np.ndarray:
            nonlocal at
            view: np.ndarray = np.ndarray((size, *x.shape[1:]), x.dtype, self._memory.buf, at)
            at += view.nbytes
            return view

        # The widest numbers first, so that every array begins where its own may.
        order = sorted(range(len(leaves(one))), key=lambda i: -leaves(one)[i].itemsize)
        views = {i: placed(leaves(one)[i]) for i in order}
        numbers = iter(range(len(views)))
        self._rows = each(one, lambda x: views[next(numbers)])

    def write(self, members: Sequence[int], seen: Tree) -> None:
        """What these members see now."""
        put(self._rows, members, seen)

    def read(self, members: Sequence[int]) -> Tree:
        """A copy of it."""
        return take(self._rows, np.asarray(members, np.intp))

    def close(self) -> None:
        """Let go; whoever made it takes it away."""
        self._rows = None
        self._end()


def _claim(name: str, size: int) -> None:
    """OSError where there is less memory to share than was promised (Docker gives 64 MB): writing there would kill."""
    path = Path("/dev/shm", name)
    if path.exists():  # Linux, where memory is given only once it is written to
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)


def _let_go(memory: SharedMemory, own: bool) -> None:
    with contextlib.suppress(BufferError):  # the rows are about to go, and the memory with them
        memory.close()
    if own:
        memory.unlink()
