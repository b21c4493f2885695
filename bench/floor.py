"""The least time a rollout can take on a device: what must be read, and what must be computed, at measured ceilings.

A step of decoding reads the weights once and the keys and values of all live positions (a prompt's once for its group,
a completion's once for its row), and computes two operations a weight for every row, and the attention. It takes at
least the longer of both. Reading the prompts is not counted, nor is anything that is not decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What of a model counts here."""

    weights: int
    """That a step multiplies with: all but an embedding table of its own, from which rows are only looked up."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes_each: int = 2
    """Of a weight, a key, a value."""

    @property
    def bytes_a_position(self) -> int:
        """Of keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_each

    @property
    def flops_a_position(self) -> int:
        """Of one row's attention to it: a product with its key and one with its value."""
        return 4 * self.layers * self.heads * self.head_dim


def decode_floor(
    shape: Shape,
    prompts: Sequence[int],
    completions: Sequence[Sequence[int]],
    bytes_per_second: float,
    flops_per_second: float,
) -> float:
    """Seconds that the steps of a rollout take at least.

    prompts: the length of each. completions: those of each prompt's completions, all begun in the first step; a row
    that has ended is no longer computed, a prompt whose rows have all ended no longer read.
    """
    seconds = 0.0
    for step in range(max(length for group in completions for length in group)):
        live = [sum(length > step for length in group) for group in completions]
        rows, written = sum(live), step + 1  # the token that is being read included
        read = sum(prompt for prompt, count in zip(prompts, live, strict=True) if count) + rows * written
        seen = sum(count * (prompt + written) for prompt, count in zip(prompts, live, strict=True))
        moved = shape.weights * shape.bytes_each + read * shape.bytes_a_position
        computed = 2 * shape.weights * rows + seen * shape.flops_a_position
        seconds += max(moved / bytes_per_second, computed / flops_per_second)
    return seconds
