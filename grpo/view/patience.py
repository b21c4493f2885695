"""Long readings are cut into pieces: a question is answered in part and asked again."""

from __future__ import annotations

import time

AT_ONCE = 0.3
"""Seconds that one question may read on."""


class Patience:
    """How long one question may read on. The first piece is always read, so that every question gets further."""

    def __init__(self) -> None:
        self._until, self._began = time.monotonic() + AT_ONCE, False

    def more(self) -> bool:
        """Whether another piece may be read."""
        if self._began and time.monotonic() > self._until:
            return False
        self._began = True
        return True
