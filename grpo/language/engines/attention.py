"""Decoding without copies of the keys and values, which on a CPU cost as much as the model itself.

transformers makes two. Its cache grows by concatenation: every token copies all that came before; ours writes into
room kept free. And where several query heads share a key head and rows are padded, it repeats keys and values for every
query head: with one new token a row there is no order among queries, so those heads can stand where the query positions
stand. Both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SPARE = 128
"""Tokens that a layer keeps room for."""


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's keys and values at the beginning of larger buffers, which new ones are written into."""

    def __init__(self, layer: DynamicLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert layer.keys is not None and layer.values is not None
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self.keys: Tensor = layer.keys
        self.values: Tensor = layer.values
        self._room = self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new keys and values; all there are."""
        old = self.keys.shape[-2]
        new = old + key_states.shape[-2]
        if new > self._room[0].shape[-2]:
            spare = min(SPARE, new)  # no more than there is: short answers to short prompts need little
            self._room = _with_room(self.keys, new + spare), _with_room(self.values, new + spare)
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., old:new, :] = states
        self.keys, self.values = (room[..., :new, :] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self._room = self.keys, self.values


def _with_room(states: Tensor, length: int) -> Tensor:
    room = states.new_empty(*states.shape[:-2], length, states.shape[-1])
    room[..., : states.shape[-2], :] = states
    return room


def give_room(cache: Cache) -> None:
    """Let the layers that keep every token grow without copies."""
    cache.layers = [RoomyLayer(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]


@contextmanager
def folded_heads() -> Iterator[None]:
    """Inside, models whose attention is `sdpa` decode one token without repeating keys and values."""
    former = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(_attention, former)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = former


def _attention(
    former: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    rows, heads, length, width = query.shape
    shared = heads // key.shape[1]
    if length > 1 or shared == 1 or attention_mask is None or attention_mask.shape[1] > 1 or "position_bias" in further:
        return former(module, query, key, value, attention_mask, scaling=scaling, **further)
    folded = query.reshape(rows, -1, shared, width)
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, -1), None
