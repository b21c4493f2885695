"""Programs that would be run again: new processes load the main file, and `--env file.py:Name` loads that one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def unguarded_script() -> str | None:
    """The program's file, where new processes would run all of it again: it lacks the usual guard."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        return None
    try:
        guarded = "__main__" in Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # <stdin>: not even that can be done
        guarded = False
    return None if guarded else os.path.basename(path)


def again(script: str) -> str:
    """What is wrong with such a program, and what to do."""
    return f"a new process would run all of {script}; put its work under `if __name__ == '__main__':`"


class Unguarded(RuntimeError):
    """No process can start here."""


def expect_guarded() -> None:
    """Refuse to start a process that would run the program again."""
    if script := unguarded_script():
        raise Unguarded(again(script))


class TrainsWhenLoaded(RuntimeError):
    """A file that somebody wants something of trains by itself."""


_LOADED: list[str] = []
"""Files of a user's that are being loaded, the innermost last."""


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """While a file is loaded for something that it holds: no training begins."""
    _LOADED.append(path.name)
    try:
        yield
    finally:
        _LOADED.pop()


def expect_not_loading() -> None:
    """Refuse to train in the middle of that."""
    if _LOADED:
        raise TrainsWhenLoaded(f"{_LOADED[-1]} trains when it is loaded: put that under `if __name__ == '__main__':`")
