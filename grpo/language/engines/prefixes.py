"""Keys and values of conversations that may go on: a turn reads what is new in it, and not all that was said before.

Rows of a batch that end together are kept together, as they lie: copies of a row are made once, when it goes on. The
oldest are let go of where there are too many; who is not found is read anew. They are the present weights' and last for
a rollout at most.

Letters: N rows, C tokens that are kept of one, T columns of a batch, P prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

KEPT_BYTES = 2**30
"""Of keys and values, at most."""


@dataclass(eq=False)
class Rows:
    """Rows that ended together."""

    layers: Sequence[tuple[Tensor, Tensor]]
    """(N, heads, T, width) keys and values."""
    mask_NT: Tensor | None
    """1 where there is a token; None: everywhere."""
    left: int
    """Rows that may still be asked for."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(states.numel() * states.element_size() for layer in self.layers for states in layer)

    def columns(self, row: int) -> Tensor:
        """Where a row's tokens are."""
        if self.mask_NT is None:
            return torch.arange(self.layers[0][0].shape[-2], device=self.layers[0][0].device)
        return self.mask_NT[row].nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class Kept:
    """What is kept of one conversation."""

    length: int
    """Tokens."""
    rows: Rows
    row: int


Item = TypeVar("Item")


class Remembered(Generic[Item]):
    """What is kept of conversations, by all tokens that it is of; oldest first."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Sequence[int], Item]] = {}
        """By a hash of the tokens."""
        self._lengths: dict[int, int] = {}
        """How many are kept of each length."""
        self.asked = self.found = 0
        """Tokens of prompts, and those of them that were kept."""

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, ids: Sequence[int], item: Item) -> bool:
        """Whether it is kept: not where the same is already."""
        key = _hashes(ids)[-1]
        if key in self._kept:
            return False
        self._kept[key] = ids, item
        self._lengths[len(ids)] = self._lengths.get(len(ids), 0) + 1
        return True

    def take(self, prompt: Sequence[int]) -> tuple[int, Item] | None:
        """How many tokens of a prompt the longest holds that it goes on from, and it; it is no longer kept."""
        self.asked += len(prompt)
        found = None
        for length, key in enumerate(_hashes(prompt)[:-1], 1):  # its last token must be read: what follows it is wanted
            if length in self._lengths and key in self._kept:
                found = key
        if found is None or list(prompt[: len(self._kept[found][0])]) != list(self._kept[found][0]):
            return None
        ids, item = self._kept[found]
        self._gone(found)
        self.found += len(ids)
        return len(ids), item

    def oldest(self) -> Item:
        """It is no longer kept."""
        key = next(iter(self._kept))
        item = self._kept[key][1]
        self._gone(key)
        return item

    def _gone(self, key: int) -> None:
        length = len(self._kept.pop(key)[0])
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]


class Prefixes:
    """Conversations' keys and values as transformers' cache has them."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most, self._size = most, 0
        self.kept: Remembered[Kept] = Remembered()

    def put(
        self, ids_N: Sequence[Sequence[int]], layers: Sequence[tuple[Tensor, Tensor]], mask_NT: Tensor | None
    ) -> None:
        """Rows that have ended, with all tokens that keys and values are of."""
        rows = Rows(layers, mask_NT, 0)
        rows.left = sum(self.kept.put(ids, Kept(len(ids), rows, row)) for row, ids in enumerate(ids_N))
        self._size += rows.size if rows.left else 0
        while self._size > self._most and len(self.kept):
            self._let_go(self.kept.oldest())

    def take(self, prompt: Sequence[int]) -> Kept | None:
        """The longest that a prompt goes on from; it is no longer kept. None: there is none."""
        found = self.kept.take(prompt)
        return None if found is None else self._let_go(found[1])

    def forget(self) -> None:
        """All of them: the weights have changed, or nobody goes on."""
        while len(self.kept):
            self._let_go(self.kept.oldest())

    def _let_go(self, one: Kept) -> Kept:
        one.rows.left -= 1
        if not one.rows.left:
            self._size -= one.rows.size
        return one


def _hashes(ids: Sequence[int]) -> list[int]:
    """Of every beginning."""
    found, so_far = [], 0
    for token in ids:
        so_far = hash((so_far, token))
        found.append(so_far)
    return found


def can_keep(model: Any, config: Any) -> bool:
    """Whether a model may be shown tokens with gaps between their columns: positions alone tell where they are."""
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    return plain and not getattr(config, "alibi", False) and config._attn_implementation in ("sdpa", "eager")


def laid(kept: Sequence[Kept], cache: Any) -> Tensor:
    """Their keys and values side by side into an empty cache, padded on the left; (P, C) 1 where there is a token."""
    size, device = max(one.length for one in kept), kept[0].rows.layers[0][0].device
    parts, order = [], []
    for rows, numbers in _together(kept):
        column_PC = torch.zeros(len(numbers), size, dtype=torch.long, device=device)
        for at, number in enumerate(numbers):
            own = rows.columns(kept[number].row)
            column_PC[at, size - len(own) :] = own
        row_P = torch.tensor([kept[number].row for number in numbers], device=device)
        parts.append((rows.layers, row_P, column_PC))
        order += numbers
    back_P = torch.tensor(order, device=device).argsort()
    for number in range(len(kept[0].rows.layers)):
        states = [
            torch.cat([_picked(layers[number][which], *where) for layers, *where in parts])[back_P] for which in (0, 1)
        ]
        cache.update(*states, number)
    length_P = torch.tensor([one.length for one in kept], device=device)
    return (torch.arange(size, device=device)[None] >= size - length_P[:, None]).long()


def _together(kept: Sequence[Kept]) -> Iterator[tuple[Rows, list[int]]]:
    """Those that lie in the same rows."""
    found: dict[int, list[int]] = {}
    for number, one in enumerate(kept):
        found.setdefault(id(one.rows), []).append(number)
    yield from ((kept[numbers[0]].rows, numbers) for numbers in found.values())


def _picked(states: Tensor, row_P: Tensor, column_PC: Tensor) -> Tensor:
    mine = states[row_P]
    at = column_PC[:, None, :, None].expand(-1, mine.shape[1], -1, mine.shape[3])
    return mine.gather(2, at)
