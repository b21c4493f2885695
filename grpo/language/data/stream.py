"""Prompts of a data set that can only be read in order, with a position that a checkpoint can keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from grpo.errors import ConfigError
from grpo.language.data.rows import Row
from grpo.language.samples import Prompt


@dataclass(frozen=True)
class Position:
    """How far a stream has been read."""

    drawn: int = 0
    """Prompts given out."""
    epoch: int = 0
    raw: int = 0
    """Rows read in this epoch, those left out too."""
    dropped: int = 0
    truncated: int = 0


class Stream:
    """Prompts of a `datasets.IterableDataset`, epoch after epoch; `make` gives None for a row that is left out."""

    def __init__(self, rows: Any, make: Callable[[Row, int], Prompt | None]) -> None:
        self._rows, self._make = rows, make
        self._began = Position()
        self._go(Position())

    def _go(self, position: Position) -> None:
        self.position = position
        self._reading: Iterator[Row] | None = None

    def load(self, position: Position) -> None:
        """Go on from there."""
        self._began = position
        self._go(position)

    def batch(self, begin: int, size: int) -> list[Prompt]:
        """Prompts begin … begin + size, counted from the start of training; the same ones whenever it is asked."""
        if self.position.drawn != begin:
            self._go(self._began if self._began.drawn <= begin else Position())
            while self.position.drawn < begin:
                self._draw()
        self._began = self.position
        return [self._draw() for _ in range(size)]

    def first(self, count: int | None) -> list[Prompt]:
        """The first prompts of the first epoch; None: all of them."""
        position = self.position
        self._go(Position())
        found = list(islice(iter(self._next, None), count))
        self._go(position)
        return found

    def _draw(self) -> Prompt:
        """The next prompt, of the next epoch where this one is over."""
        for _ in range(2):
            if (prompt := self._next()) is not None:
                return prompt
            self._go(replace(self.position, epoch=self.position.epoch + 1, raw=0))
        raise ConfigError(f"the stream gave no prompt in a whole epoch; {self.position.dropped} rows were too long")

    def _next(self) -> Prompt | None:
        """The next prompt of this epoch; None: it is over."""
        if self._reading is None:
            self._rows.set_epoch(self.position.epoch)
            self._reading = islice(iter(self._rows), self.position.raw, None)
        for row in self._reading:
            at = self.position
            prompt = self._make(row, at.raw)
            if prompt is None:
                self.position = replace(at, raw=at.raw + 1, dropped=at.dropped + 1)
                continue
            truncated = at.truncated + prompt.truncated
            self.position = replace(at, drawn=at.drawn + 1, raw=at.raw + 1, truncated=truncated)
            return prompt
        return None
