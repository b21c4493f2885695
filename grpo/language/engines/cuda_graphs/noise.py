"""The numbers that draws are made with, on the device as far ahead as they will soon be used.

Letters: R sequences as rows of the outputs, W numbers of a row that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo.language.engines.cuda_graphs import sequence
from grpo.language.engines.sampling import Numbers

HALF = 512
"""Numbers of a row that are drawn at a time; there is room for two such parts, in turns."""


class Noise:
    """Every row's own numbers, from its seed."""

    def __init__(
        self, seeds: Sequence[int], longest: int, uniform_RW: Tensor, sent: Callable[[Tensor], Tensor]
    ) -> None:
        """longest: steps that a row may have. sent: brings a tensor to the device."""
        self._seeds, self._count, self._sent = seeds, min(HALF, longest), sent
        self._parts = uniform_RW.view(len(uniform_RW), 2, HALF)
        self._numbers: dict[int, Numbers] = {}
        self._known = [0] * len(seeds)
        """Of each row, how many have been drawn."""

    def begin(self, number: int, step: int) -> None:
        """A row will be gone on with at this step, wherever it was."""
        first = step // HALF * HALF
        self._numbers[number], self._known[number] = Numbers(self._seeds[number], first), first

    def ahead(self, row: sequence.Sequence) -> int:
        """Steps for which a row's numbers are there."""
        return self._known[row.number] - row.steps

    def provide(self, rows: Sequence[sequence.Sequence]) -> None:
        """The next part of these rows' numbers; what they replace has been used, or will be before they are there."""
        if not rows:
            return
        at, sides = [row.number for row in rows], []
        for number in at:
            if number not in self._numbers:
                self.begin(number, 0)
            sides.append(self._known[number] // HALF % 2)
            self._known[number] += HALF
        drawn = torch.from_numpy(np.stack([self._numbers[number].next(self._count) for number in at]))
        row_N, side_N = (self._sent(torch.tensor(values)) for values in (at, sides))
        self._parts[row_N, side_N, : self._count] = self._sent(drawn)
