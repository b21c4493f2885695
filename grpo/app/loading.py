"""Libraries are there for good: a command looks for no garbage among them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CYCLES = 12
"""Of a processor, as a power of two, for which a thread of NumPy's that has nothing to do waits before it sleeps."""


def resting() -> None:
    """Have NumPy's threads rest between products; said before NumPy is imported, and to processes that are started.

    By itself OpenBLAS has them ask for work for 2^26 cycles (26 ms of a core), once for each library that brings it and
    after each product; where other processes want the core, whoever waits for them loses his own turn.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", str(CYCLES))


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
