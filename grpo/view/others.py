"""Who else is on this machine: the loopback address is theirs, too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PEOPLE = 501 if sys.platform == "darwin" else 1000
"""Accounts of people begin here; those below are the system's."""
PASSING = range(61184, 65536)
"""Accounts that services get for as long as they run, and nobody."""
NO_SHELLS = ("nologin", "false", "sync", "shutdown", "halt")


def present(processes: Path = Path("/proc"), accounts: Path = Path("/etc/passwd")) -> list[str]:
    """Other people who run something here now; on machines whose accounts come from a directory, anybody might."""
    if os.name != "posix":
        return []
    owners = {_owner(path) for path in processes.glob("[0-9]*")} - {os.getuid(), None}
    names = {_name(uid) for uid in owners if uid is not None and _is_a_person(uid)} - {None}
    own = _name(os.getuid())
    shared = own is not None and accounts.exists() and own not in _listed(accounts)
    return sorted(str(name) for name in names) + (["the accounts of your network"] if shared else [])


def allowed() -> list[str]:
    """Other people who could log in here."""
    if os.name != "posix":
        return []
    import pwd

    return sorted(
        entry.pw_name
        for entry in pwd.getpwall()
        if _is_a_person(entry.pw_uid) and entry.pw_uid != os.getuid() and not entry.pw_shell.endswith(NO_SHELLS)
    )


def _is_a_person(uid: int) -> bool:
    return uid >= PEOPLE and uid not in PASSING


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:  # it has ended meanwhile
        return None


def _name(uid: int) -> str | None:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's
        return None


def _listed(accounts: Path) -> set[str]:
    return {line.partition(":")[0] for line in accounts.read_text(encoding="utf-8", errors="replace").splitlines()}
