"""One process a run folder: an flock on its `lock` file, which the kernel releases however the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo.run.inside import FolderError, descriptor_inside, expect_no_links

_held: set[int] = set()


class Busy(FolderError):
    """Another process is writing to this run folder."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the folder, in which nothing that is written is a link; `Busy` names the process that has it."""
    try:
        expect_no_links(path)
        descriptor = descriptor_inside(path, "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise FolderError(f"cannot write to {path} ({error.strerror}); choose a folder you may write to") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
            raise Busy(f"{path} is in use by process {owner}; stop that one, or choose another folder") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _let_go() -> None:
    """A forked child keeps no hold on its parent's folder, so that the lock ends with the parent."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
