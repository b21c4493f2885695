"""Freed memory stays with the process.

The C library gives large blocks back to the system as soon as they are freed and asks for them again at the next
operation; the system then clears them page by page. With pictures that is half the time of an update.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""What glibc's malloc.h calls them."""


def keep_freed() -> bool:
    """Let later operations of this process have what earlier ones freed; whether the C library can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
