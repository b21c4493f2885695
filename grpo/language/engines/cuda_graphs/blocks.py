"""Keys and values in pages: a prompt's are kept once for all its completions, each completion has its own.

A row's table names its pages: first those of the prompt, which it only reads, then those it writes. The prompt's last
page may be partly empty; what is empty there is skipped when the row is read. Page 0 belongs to nobody: padding is
written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.language.engines.cuda_graphs.kernels import Attention

PAGE = 32
"""Tokens."""


class Pages:
    """The memory of all layers, and which of its pages are free."""

    def __init__(
        self, layers: Sequence[Attention], count: int, dtype: torch.dtype, device: torch.device, page: int = PAGE
    ) -> None:
        self.page, self.count = page, count
        self.kept: list[tuple[Tensor, Tensor]] = []
        """(pages, heads, page, width) keys and values of each layer."""
        for how in layers:
            shape = (count + 1, how.kv_heads, page, how.head_dim)
            # Zeros: a page's unwritten part is masked, but NaN times nothing would still be NaN.
            self.kept.append(
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            )
        self._free = list(range(count, 0, -1))

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many pages; there must be."""
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """They are free again."""
        self._free += reversed(pages)


def needed(tokens: int, page: int = PAGE) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page)


def size_of(layers: Sequence[Attention], dtype: torch.dtype, page: int = PAGE) -> int:
    """Bytes of a page, in all layers."""
    return sum(2 * how.kv_heads * how.head_dim for how in layers) * page * dtype.itemsize
