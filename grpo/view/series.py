"""metrics.jsonl and timing.jsonl as columns that grow with their file."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo.run.folder import Row
from grpo.view.files import Tail, finite, shown_all

MOST_NAMES = 2_000
"""Columns that are kept; a hostile file may name more."""
VERY_LONG = "it is very long: of its older rows only some are shown"
MOST_CELLS = 20_000_000
"""Numbers that are kept of a file."""
NAN = float("nan")


class Series:
    """One row a step, as columns. A missing value is NaN inside and null outside."""

    def __init__(self, root: Path, path: str) -> None:
        self._tail = Tail(root, path)
        self.steps = array("d")
        self.columns: dict[str, array[float]] = {}
        self.notes: dict[str, None] = {}
        """What was left out, in words, each once."""

    @property
    def generation(self) -> int:
        """Changes when the file was cut back: fetch everything anew."""
        return self._tail.generation

    @property
    def damaged(self) -> int:
        """Lines that could not be read."""
        return self._tail.damaged

    def __len__(self) -> int:
        return len(self.steps)

    def refresh(self) -> bool:
        """Read what is new; whether there was anything."""
        grown = self._tail.grow(self._add)
        if self._tail.thinned:
            self.notes[VERY_LONG] = None
        if grown is None:
            self.steps, self.columns, self.notes = array("d"), {}, {}
            self._tail.grow(self._add)
            return True
        return grown

    def _add(self, row: Row) -> None:
        step = finite(row.get("step"))
        if step is None:
            return
        if (len(self.steps) + 1) * (len(self.columns) + 1) > MOST_CELLS:
            self.steps = self.steps[::2]
            self.columns = {name: column[::2] for name, column in self.columns.items()}
            self.notes[VERY_LONG] = None
        before = len(self.steps)
        self.steps.append(step)
        for name, value in row.items():
            column = self.columns.get(name)
            if column is None:
                if name == "step":
                    continue
                if len(self.columns) >= MOST_NAMES or (before + 1) * (len(self.columns) + 2) > MOST_CELLS:
                    self.notes["it names very many metrics: not all are shown"] = None
                    continue
                column = self.columns[name] = array("d", [NAN]) * before
            number = finite(value)
            column.append(NAN if number is None else number)
        for column in self.columns.values():
            if len(column) == before:
                column.append(NAN)

    def values(self, name: str, last: int | None = None) -> np.ndarray:
        """A column's finite values, of the last so many rows."""
        if name not in self.columns:
            return np.zeros(0)
        column = np.array(self.columns[name][-last:] if last else self.columns[name])
        return column[np.isfinite(column)]

    def last(self) -> Mapping[str, float]:
        """The last row's finite values."""
        row = {name: column[-1] for name, column in self.columns.items() if column}
        return {name: value for name, value in row.items() if np.isfinite(value)}

    @property
    def step(self) -> int | None:
        """Of the last row."""
        return int(self.steps[-1]) if self.steps else None

    def table(self, after: float | None = None, points: int = 2000, names: Collection[str] | None = None) -> Row:
        """The rows as columns for the page: all in at most `points` buckets, or as they are those after a step."""
        steps = np.array(self.steps)
        chosen = {name: np.array(c) for name, c in self.columns.items() if names is None or name in names}
        if after is not None:
            later = steps > after
            chosen = {name: column[later] for name, column in chosen.items()}
            steps, points = steps[later], max(points, len(steps))
        size = -(-len(steps) // points) if len(steps) > points else 1
        found: dict[str, Any] = {"count": len(self), "generation": self.generation, "bucket": size}
        if size == 1:
            return found | {"step": shown_all(steps), "columns": {n: shown_all(c) for n, c in chosen.items()}}
        ends = np.minimum(np.arange(size, len(steps) + size, size), len(steps)) - 1
        found |= {"step": shown_all(steps[ends]), "columns": {}, "low": {}, "high": {}}
        for name, column in chosen.items():
            low, mean, high = _buckets(column, size)
            found["low"][name], found["columns"][name], found["high"][name] = map(shown_all, (low, mean, high))
        return found

    def spark(self, name: str, points: int = 60) -> list[Any]:
        """A column's shape in few numbers."""
        column = np.array(self.columns.get(name, ()))
        return shown_all(_buckets(column, max(-(-len(column) // points), 1))[1]) if len(column) else []


def _buckets(column: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lowest, mean and highest of each `size` values; NaN where there is none."""
    padded = np.full(-(-len(column) // size) * size, np.nan)
    padded[: len(column)] = column
    cut = padded.reshape(-1, size)
    known = np.isfinite(cut)
    count = known.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, cut, 0.0).sum(1) / count
    low = np.where(known, cut, np.inf).min(1)
    high = np.where(known, cut, -np.inf).max(1)
    return low, mean, high
