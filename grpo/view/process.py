"""The process behind a run, seen from outside: the lock is looked at, never taken, which could turn a run away."""

from __future__ import annotations

import os
from pathlib import Path

from grpo.run.folder import FolderError
from grpo.run.inside import open_inside


def holder(root: Path, lock: str) -> int | None:
    """The process that holds a lock file, as the kernel lists it; None: none that can be seen from here."""
    try:
        with open_inside(root, lock) as file:
            inode, owner = os.fstat(file.fileno()).st_ino, file.read(20)
    except FolderError:
        return None
    pid = int(owner) if owner.strip().isdigit() else 0
    held = _flocks()
    return pid if pid and ((inode, pid) in held if held is not None else _alive(pid)) else None


def resident_gib(pid: int) -> float | None:
    """Memory that a process holds; None where the system does not say."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (OSError, ValueError, IndexError):
        return None


def _flocks() -> set[tuple[int, int]] | None:
    """(inode, process) of every flock that this machine's kernel lists; None where it does not say."""
    try:
        with open("/proc/locks", encoding="ascii") as file:
            fields = [line.split() for line in file]
        return {(int(f[5].rpartition(":")[2]), int(f[4])) for f in fields if len(f) > 5 and f[1] == "FLOCK"}
    except (OSError, ValueError):
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
