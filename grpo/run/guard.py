"""Whether new processes would run the program again: they load its main file."""

from __future__ import annotations

import os
import sys
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
