"""The rows of a batch that our own loop samples: those that are still written, and what is written in all of them.

Letters: N rows, T tokens, V the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo.language.engines import Completion, Stop
from grpo.language.engines.sampling import Drawn


@dataclass
class LiveRows:
    """The rows of a batch that are still written, and what of each must shrink together."""

    row_N: Tensor
    """Their numbers in the batch."""
    next_N: Tensor
    """The position of what comes behind the prompt: its length, unless images count otherwise."""
    limit_N: Tensor
    mask_NT: Tensor | None
    """1 where there is a token; None: nothing is padded, and attention takes its faster paths."""
    seen_NV: Tensor | None
    """For the repetition penalty: the tokens of prompt and completion."""
    cache: Any

    def keep(self, going: Tensor) -> None:
        """These of them go on."""
        self.row_N, self.next_N, self.limit_N = self.row_N[going], self.next_N[going], self.limit_N[going]
        self.mask_NT = None if self.mask_NT is None else self.mask_NT[going]
        self.seen_NV = None if self.seen_NV is None else self.seen_NV[going]
        self.cache.batch_select_indices(going)

    def ended(self, over: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """Keys and values of these, and where their tokens are."""
        layers = [(layer.keys[over], layer.values[over]) for layer in self.cache.layers]
        return layers, None if self.mask_NT is None else self.mask_NT[over]

    def append(self, token_N: Tensor) -> None:
        """A token more in each."""
        if self.seen_NV is not None:
            self.seen_NV.scatter_(1, token_N[:, None], True)
        if self.mask_NT is not None:
            self.mask_NT = nn.functional.pad(self.mask_NT, (0, 1), value=1)


@dataclass(frozen=True)
class Written:
    """What is written in all rows of a batch, whether or not they go on."""

    made_NT: Tensor
    logp_NT: Tensor
    kept_NT: Tensor

    @classmethod
    def empty(cls, rows: int, steps: int, pad: int, device: torch.device) -> Written:
        """Nothing yet."""
        shape = (rows, steps)
        made_NT = torch.full(shape, pad, device=device)
        return cls(made_NT, torch.zeros(shape, device=device), torch.ones(shape, device=device))

    def put(self, row_N: Tensor, t: int, drawn: Drawn) -> None:
        """What was drawn in these rows."""
        self.made_NT[row_N, t], self.logp_NT[row_N, t] = drawn.token_N, drawn.logp_N
        if drawn.kept_N is not None:
            self.kept_NT[row_N, t] = drawn.kept_N

    def completion(self, row: int, length: int, stop: Stop, greedy: bool) -> Completion:
        """A row that has ended."""
        logp_T = self.logp_NT[row, :length].cpu()
        if not math.isfinite(float(logp_T.sum())):
            raise FloatingPointError("the model's logits are not finite: its weights hold NaN or infinity, or overflow")
        kept = None if greedy else float(self.kept_NT[row, :length].mean())
        return Completion(self.made_NT[row, :length].cpu(), logp_T, stop, kept)
