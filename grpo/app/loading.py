"""Libraries are there for good: a command looks for no garbage among them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Imports of PyTorch and what is around it, and nothing else: what is alive after the first stays out of searches.

    They make some 400,000 objects, which the collector would look at again and again, and a last time at the end.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
