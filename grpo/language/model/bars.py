"""Bars of another library, which would run through the line that tells of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_bars() -> Iterator[None]:
    """No bar of transformers over weights that are read or written; what the hub sends is still seen to come."""
    from transformers.utils import logging

    hook = getattr(logging, "set_tqdm_hook", None)
    if hook is None:  # the first versions 5 have no hook, and their bars stay
        yield
        return
    before = hook(lambda make, given, named: make(*given, **named | {"disable": True}))
    try:
        yield
    finally:
        hook(before)
