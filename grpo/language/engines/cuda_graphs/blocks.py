"""Keys and values in blocks of tokens: a prompt's are kept once for all its completions, each completion has its own.

A sequence's block table names its blocks: first those of the prompt, which it only reads, then those it writes. The
prompt's last block may be partly empty; attention skips what is empty there. Block 0 belongs to nobody: padding is
written there. A sequence gets its blocks as it becomes longer, and the memory grows as more are asked for.

All layers' are one piece of memory. Given back and asked for again, so large a piece is found where it was, as far as
nothing else has been left in it: graphs that point there are then still right.
"""

from __future__ import annotations

import math
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
        self.block_size, self.count, self._layers = block_size, count, layers
        self.most_used = 0
        """Blocks that were taken at a time, at most."""
        self.kv_cache = _laid(layers, count, dtype, device, block_size)
        """(blocks, heads, block size, width) keys and values of each layer."""
        self._free = list(range(count, 0, -1))

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies, and how many blocks."""
        return self.kv_cache[0][0].data_ptr(), self.count

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
        """So many in all, with what is kept in those there are."""
        first = self.kv_cache[0][0]
        wider = _laid(self._layers, count, first.dtype, first.device, self.block_size)
        for kept, new in zip(self.kv_cache, wider, strict=True):
            for old, to in zip(kept, new, strict=True):
                to[: len(old)] = old
        self.kv_cache = wider
        self._free = [*range(count, self.count, -1), *self._free]
        self.count = count

    def free(self, blocks: Sequence[int]) -> None:
        """They are free again."""
        self._free += reversed(blocks)


def _laid(
    layers: Sequence[Attention], count: int, dtype: torch.dtype, device: torch.device, block_size: int
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, in one piece of memory."""
    shapes = [(2, count + 1, how.kv_heads, block_size, how.head_dim) for how in layers]
    # Zeros: a block's unwritten part is masked, but NaN times nothing would still be NaN.
    whole = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=device)
    parts = torch.split(whole, [math.prod(shape) for shape in shapes])
    pairs = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [(pair[0], pair[1]) for pair in pairs]


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)


def block_bytes(layers: Sequence[Attention], dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of a block, in all layers."""
    return sum(2 * how.kv_heads * how.head_dim for how in layers) * block_size * dtype.itemsize
