"""GGUF files as plain arrays, read once a model.

The package gguf makes a view of its memory map for every word of a vocabulary, some hundred thousand, which costs more
than dequantising a small model; and transformers has the file read twice, for sizes and for weights, and a table of the
names of weights made for each module of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np


@contextmanager
def read_once(reads: bool = True) -> Iterator[None]:
    """Until its end gguf's reader hands out plain arrays, and what was read or made stays; `reads`: that is wanted."""
    if not reads:
        yield
        return
    import gguf

    class Plain(gguf.GGUFReader):
        """The same reader, whose file is an array instead of a memory map's view."""

        @property
        def data(self) -> Any:
            """What the map maps: nothing of the file is read before it is looked at."""
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    names = ("GGUFReader", "get_tensor_name_map")
    before = {name: vars(gguf)[name] for name in names}
    once: dict[str, Any] = {names[0]: cache(Plain), names[1]: cache(before[names[1]])}
    vars(gguf).update(once)
    try:
        yield
    finally:
        vars(gguf).update(before)
