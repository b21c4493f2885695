"""What the ranks of the pool carry out; every function gets its ranks first."""

from __future__ import annotations

import numpy as np
import torch

from grpo.protocols import State


def calls(ranks):
    """All three calls once, with arrays of every kind and lengths that differ."""
    mine = State(
        {"rank": ranks.rank, "nan": float("nan"), "text": "ä"},
        {
            "ids": torch.arange(ranks.rank, dtype=torch.int32),
            "half": torch.full((2, ranks.rank + 1), ranks.rank, dtype=torch.bfloat16),
            "mask": np.array([[True, False]]),
            "number": torch.tensor(3.5, dtype=torch.float64),
        },
    )
    gathered = ranks.gather(mine, "a test")
    told = ranks.broadcast(State({"chief": ranks.rank}, {"x": torch.arange(5)}) if ranks.chief else None, "a test")
    summed = [torch.full((3,), ranks.rank + 1.0, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bfloat16)]
    ranks.sum(summed, "a test")
    return gathered, told, summed
