"""What a pass of layers by hand may take of a GPU: how many tokens at once, and what each layer keeps of them."""

from __future__ import annotations

from typing import Protocol

import torch

from grpo.language.scoring.decoder_layout import KEEP

TILE_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Size of the float32 logits of one tile. On a CPU above the size from which memory goes back to the system at once."""
LEAST, MOST = 8192, 131_072
"""Tokens of a pass where memory decides: products are no faster with more, and not much slower with the least."""


class Costs(Protocol):
    """Layers that say what they take, in bytes a token."""

    def kept_bytes(self, keep: str) -> int:
        """Until the backward pass has come by."""
        ...

    def passing_bytes(self) -> int:
        """While one layer's backward pass is computed."""
        ...


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken, those included that torch holds and nobody uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def tokens_that_fit(layers: Costs, device: torch.device) -> int:
    """Tokens of a pass for which the memory that is free now allows not to compute anything twice."""
    each = layers.kept_bytes("everything") + layers.passing_bytes()
    return int(min(max(0.6 * free_memory(device) / each, LEAST), MOST))


def most_to_keep(layers: Costs, tokens: int, device: torch.device) -> str:
    """As much of a pass as there is memory for; see `decoder_layout.KEEP`."""
    free = 0.9 * free_memory(device) - tokens * layers.passing_bytes() - 2 * TILE_BYTES["cuda"]
    return next((keep for keep in KEEP[:-1] if tokens * layers.kept_bytes(keep) < free), KEEP[-1])
