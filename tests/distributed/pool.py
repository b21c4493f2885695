"""Processes that stay: a test sends a case by name, every rank carries it out, and what each returned comes back."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from pathlib import Path

MOST = 3
"""Ranks of the pool."""
PATIENCE = 300.0
"""Seconds: a case that hangs ends here."""


def serve(rank: int, meeting: str, pipe) -> None:
    """One rank's life: groups of 1, 2 and 3 of them, then case after case."""
    import torch
    import torch.distributed as dist

    from grpo.distributed.group import Group
    from grpo.protocols import Alone

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=MOST)
    pair = dist.new_group([0, 1], backend="gloo")
    groups = {1: Alone(), 3: Group(dist.group.WORLD, dist.group.WORLD)} | ({2: Group(pair, pair)} if rank < 2 else {})
    while (asked := pipe.recv()) is not None:
        module, name, size, given = asked
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(groups[size], **given)))
        except BaseException as error:
            pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Pool:
    """`pool.run(cases.name, 2, setting=…)`: what ranks 0 and 1 returned."""

    def __init__(self) -> None:
        start = multiprocessing.get_context("forkserver")
        start.set_forkserver_preload(["torch", "tests.distributed.cases"])
        self._meeting = Path(tempfile.mkdtemp()) / "meeting"
        self._members = []
        for rank in range(MOST):
            here, there = start.Pipe()
            process = start.Process(target=serve, args=(rank, str(self._meeting), there), daemon=True)
            process.start()
            self._members.append((process, here))

    def run(self, case, size: int, **given):
        """The case on so many ranks; the first failure is raised."""
        members = self._members[:size]
        for _, pipe in members:
            pipe.send((case.__module__, case.__name__, size, given))
        found = []
        for process, pipe in members:
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"{case.__name__} on {size} ranks: no answer from {process.name}")
            found.append(pipe.recv())
        for sound, value in found:
            assert sound, value
        return [value for _, value in found]

    def close(self) -> None:
        """End them."""
        for process, pipe in self._members:
            pipe.send(None)
            process.join(5)
            if process.is_alive():
                process.kill()
