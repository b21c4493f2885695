"""Keys and values in blocks of tokens: a prompt's are kept once for all its completions, each completion has its own.

A sequence's block table names its blocks: first those of the prompt, which it only reads, then those it writes. The
prompt's last block may be partly empty; attention skips what is empty there. Block 0 belongs to nobody: padding is
written there. A sequence gets its blocks as it becomes longer, and the memory grows as more are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.language.engines.cuda_graphs.kernels import Attention

BLOCK_SIZE = 32
"""Tokens."""


class BlockManager:
    """The memory of all layers, and which of its blocks are free."""

    def __init__(
        self,
        layers: Sequence[Attention],
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.block_size, self.count = block_size, count
        self.most_used = 0
        """Blocks that were taken at a time, at most."""
        self.kv_cache: list[tuple[Tensor, Tensor]] = []
        """(blocks, heads, block size, width) keys and values of each layer."""
        for how in layers:
            shape = (count + 1, how.kv_heads, block_size, how.head_dim)
            # Zeros: a block's unwritten part is masked, but NaN times nothing would still be NaN.
            self.kv_cache.append(
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            )
        self._free = list(range(count, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """So many blocks; there must be."""
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self.most_used = max(self.most_used, self.count - len(self._free))
        return taken

    def grow(self, count: int) -> None:
        """So many in all, with what is kept in those there are; one layer after the other, so that two never are."""
        for number, kept in enumerate(self.kv_cache):
            wider = []
            for old in kept:
                new = old.new_zeros(count + 1, *old.shape[1:])
                new[: len(old)] = old
                wider.append(new)
            self.kv_cache[number] = wider[0], wider[1]
        self._free = [*range(count, self.count, -1), *self._free]
        self.count = count

    def free(self, blocks: Sequence[int]) -> None:
        """They are free again."""
        self._free += reversed(blocks)


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)


def block_bytes(layers: Sequence[Attention], dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of a block, in all layers."""
    return sum(2 * how.kv_heads * how.head_dim for how in layers) * block_size * dtype.itemsize
