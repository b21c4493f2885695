"""What actions are drawn with: one generator for whoever is playing, or one for each episode.

With one for all of them a number depends on how many episodes are still live, so that nobody can play some of them
alone. With one each it depends on the episode's place alone, whoever plays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from grpo.seeding import generator

AHEAD = 64
"""Decisions of an episode that numbers are drawn for at a time: calls would cost more than the numbers."""


class EpisodeDraws:
    """Of several episodes, each with a generator from (key, its place): what heads ask NumPy's generator for.

    >>> whole, part = EpisodeDraws((0, 7), range(5)), EpisodeDraws((0, 7), range(2, 4))
    >>> bool((whole.of([2, 3]).random(2) == part.of([0, 1]).random(2)).all())
    True
    """

    def __init__(self, key: Sequence[int], places: range) -> None:
        # NumPy takes numbers for the same that differ by zeros at the end; a place is one more than it is.
        self._each = [generator(*key, place + 1) for place in places]
        self._rows: Sequence[int] | np.ndarray = range(len(places))
        self._drawn: dict[tuple[str, int, np.dtype[Any]], tuple[np.ndarray, np.ndarray]] = {}
        """Of a kind and type of numbers, so many a decision: those drawn ahead, and how many each episode has used."""

    def of(self, rows: Sequence[int] | np.ndarray) -> EpisodeDraws:
        """Whose numbers are asked for next, in this order."""
        self._rows = rows
        return self

    def random(self, count: int) -> np.ndarray:
        """So many uniform numbers, as many for each episode."""
        return self._numbers("random", count, np.float64)

    def standard_normal(self, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
        """Of this shape, whose first axis is the episodes' decisions."""
        return self._numbers("standard_normal", int(np.prod(shape)), dtype).reshape(shape)

    def beta(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Of these parameters, whose first axis is the episodes' decisions."""
        each = len(a) // max(len(self._rows), 1)
        found = [self._each[row].beta(a[i * each : (i + 1) * each], b[i * each : (i + 1) * each])
                 for i, row in enumerate(self._rows)]  # fmt: skip
        return np.concatenate(found) if found else np.zeros_like(a)

    def _numbers(self, kind: str, count: int, dtype: Any) -> np.ndarray:
        rows = np.asarray(self._rows, np.int64)
        each = count // max(len(rows), 1)
        key = kind, each, np.dtype(dtype)
        if key not in self._drawn:
            ahead = np.empty((len(self._each), AHEAD, each), dtype)
            self._drawn[key] = ahead, np.full(len(self._each), AHEAD)
        ahead, used = self._drawn[key]
        for row in rows[used[rows] == AHEAD].tolist():
            ahead[row], used[row] = getattr(self._each[row], kind)((AHEAD, each), dtype=dtype), 0
        found = ahead[rows, used[rows]]
        used[rows] += 1
        return found.reshape(-1)


Random: TypeAlias = np.random.Generator | EpisodeDraws


def drawing(random: Random, rows: Sequence[int] | np.ndarray) -> Random:
    """What these episodes draw with now."""
    return random.of(rows) if isinstance(random, EpisodeDraws) else random
