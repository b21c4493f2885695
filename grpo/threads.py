"""How many threads work at once on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 4_000_000
"""Multiplications of a product that one thread has done before a second one has woken up."""


@contextmanager
def few_threads(multiplications: int, device: torch.device) -> Iterator[None]:
    """One thread, where products are so small that several wait for each other longer than they work.

    On a busy machine they wait a hundred times as long: a thread that has its turn spins for one that has not.
    """
    before = torch.get_num_threads()
    alone = before > 1 and device.type == "cpu" and multiplications < SMALL
    if alone:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if alone:
            torch.set_num_threads(before)
