"""Tokens that are there already, read in few passes: prompts, and what sequences said before they had to wait.

Letters: P passes' rows, T their tokens, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from grpo.language.engines.cuda_graphs.model_runner import ModelRunner

PREFILL_TOKENS = 32_768
"""In one pass, padding included."""


@dataclass(frozen=True)
class Reading:
    """Tokens whose keys and values are made in one pass."""

    ids: Sequence[int]
    blocks: Sequence[int]
    first: int = 0
    """The token that the first block begins with; those before have their place already."""


R = TypeVar("R", bound=Reading)


def read(runner: ModelRunner, readings: Sequence[Reading]) -> None:
    """Their keys and values into their blocks."""
    whole, parts = [one for one in readings if not one.first], [one for one in readings if one.first]
    for some in [*together(whole), *together(parts)]:
        runner.prefill(*laid(some))


def laid(readings: Sequence[Reading]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and blocks of each, padded on the right; its length, and the token that the first block begins with."""
    lengths, firsts = [len(one.ids) for one in readings], [one.first for one in readings]
    ids_PT = torch.zeros(len(readings), max(lengths), dtype=torch.long)
    table_PB = torch.zeros(len(readings), max(len(one.blocks) for one in readings), dtype=torch.int32)
    for row, one in enumerate(readings):
        ids_PT[row, : len(one.ids)] = torch.tensor(one.ids)
        table_PB[row, : len(one.blocks)] = torch.tensor(one.blocks)
    return ids_PT, table_PB, torch.tensor(lengths, dtype=torch.int32), torch.tensor(firsts)


def together(readings: Sequence[R]) -> Iterator[list[R]]:
    """Those of similar length."""
    new = sorted(readings, key=lambda one: len(one.ids))
    start = 0
    while start < len(new):
        end = start + 1
        while end < len(new) and len(new[end].ids) * (end + 1 - start) <= PREFILL_TOKENS:
            end += 1
        yield new[start:end]
        start = end


@dataclass(frozen=True)
class Going:
    """Tokens that come behind others, in the same blocks."""

    ids: Sequence[int]
    """What is new."""
    blocks: Sequence[int]
    past: int


def read_behind(runner: ModelRunner, goings: Sequence[Going]) -> None:
    """Keys and values of what is new; those of similar length together."""
    new = sorted(goings, key=lambda one: one.past + len(one.ids))
    while new:
        count = 1
        while count < len(new) and (new[count].past + len(new[count].ids)) * (count + 1) <= PREFILL_TOKENS:
            count += 1
        some, new = new[:count], new[count:]
        ids_PT, table_PB, length_P, _ = laid([Reading(one.ids, one.blocks) for one in some])
        past_P = torch.tensor([one.past for one in some])
        runner.prefill_behind(ids_PT, table_PB, length_P, past_P)
