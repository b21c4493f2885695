"""Bars of another library, which would run through the line that tells of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any


@contextmanager
def without_bars(gguf: bool = False) -> Iterator[None]:
    """No bar of transformers over weights that are read or written; what the hub sends is still seen to come.

    gguf: whole weights are made of quantised ones, under a bar that asks no hook.
    """
    from transformers.utils import logging

    with ExitStack() as until:
        hook = getattr(logging, "set_tqdm_hook", None)
        if hook is not None:  # the first versions 5 have none, and their bars stay
            before = hook(lambda make, given, named: make(*given, **named | {"disable": True}))
            until.callback(hook, before)
        if gguf:
            from transformers import modeling_gguf_pytorch_utils as unpacking

            bar: Any = vars(unpacking).get("tqdm")
            if bar is not None:
                vars(unpacking)["tqdm"] = partial(bar, disable=True)
                until.callback(vars(unpacking).update, tqdm=bar)
        yield
