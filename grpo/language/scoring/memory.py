"""What a pass of layers by hand may take of a GPU: how many tokens at once, and what each layer keeps of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from grpo.language.scoring.decoder_layout import HOSTED, KEEP

TILE_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Size of the float32 logits of one tile. On a CPU above the size from which memory goes back to the system at once."""
LEAST, MOST = 8192, 131_072
"""Tokens of a pass where memory decides: products are no faster with more, and not much slower with the least."""


class Costs(Protocol):
    """What a pass takes of the GPU, in bytes a token; memory on the host (offloaded inputs) does not count.

    Layers say it of themselves, a plan says it of a model that is not loaded: both add up `LayerSizes`, so that what
    is planned is what is taken. Whoever lets a layer keep more, less or elsewhere changes it there.
    """

    def kept_bytes(self, keep: str) -> int:
        """Of all layers together, until the backward pass has come by; `keep` is one of `decoder_layout.KEEP`."""
        ...

    def passing_bytes(self) -> int:
        """While one layer's backward pass is computed: the widest layer's."""
        ...


@dataclass(frozen=True)
class LayerSizes:
    """One layer by its sizes alone: what of each token it keeps, and what passes through it."""

    width: int
    inner: int
    """Of the MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    wide: int
    """Bytes of a number that goes from layer to layer: the weights' own type."""
    low: int
    """Bytes of a number in the type that is computed in."""

    def hosted(self, keep: str) -> int:
        """Bytes a token in the host's memory; on the GPU, as long as the layer or a neighbour of it is computed."""
        found = 4 * self.heads + self.heads * self.head_dim * self.low if keep == "host" else 0
        return self.width * self.wide + found if keep in HOSTED else 0

    def kept(self, keep: str) -> int:
        """Bytes a token until the backward pass has come by."""
        if keep in HOSTED:
            return 0
        total = self.width * self.wide
        if keep != "input":  # what lies between the halves, queries, keys, values, what is found, log-sum-exps
            total += self.width * self.wide + 2 * (self.heads + self.kv_heads) * self.head_dim * self.low
            total += 4 * self.heads
        if keep == "everything":  # gate and up
            total += 2 * self.inner * self.low
        return total

    def passing(self) -> int:
        """Bytes a token while its backward pass is computed."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return (5 * self.inner + 10 * self.width + 2 * qkv) * self.low


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken, those included that torch holds and nobody uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def tokens_that_fit(layers: Costs, device: torch.device) -> int:
    """Tokens of a pass for which the memory that is free now allows not to compute anything twice."""
    each = layers.kept_bytes("everything") + layers.passing_bytes()
    return int(min(max(0.6 * free_memory(device) / each, LEAST), MOST))


def most_to_keep(layers: Costs, tokens: int, device: torch.device) -> str:
    """As much of a pass as there is memory for; see `decoder_layout.KEEP`. Where nothing is: on the host."""
    free = 0.9 * free_memory(device) - tokens * layers.passing_bytes() - 2 * TILE_BYTES["cuda"]
    return next((keep for keep in KEEP if tokens * layers.kept_bytes(keep) < free), HOSTED[0])
