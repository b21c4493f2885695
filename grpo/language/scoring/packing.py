"""Samples as what the module reads, and where in its output each sampled token was predicted.

    padded   a row a sample, padding on the right: causal attention never looks at what comes later
    packed   all samples one behind the other, with positions that begin anew
    shared   a row a prompt, once, and behind it all its completions, which do not see each other
    segments all prompts, then all completions, in one row without padding; needs the attention of `segments`

All give the same numbers; `shared` and `segments` compute a prompt once instead of once a completion.

Letters: M sampled tokens in all, B rows of what the module reads, L their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.language.pictures.ids import PicturedIds
from grpo.language.samples import Sample
from grpo.language.scoring.segments import Segments


@dataclass(frozen=True)
class PackedBatch:
    """What the module reads, and where in its output each sampled token was predicted."""

    input_ids: Tensor
    position_ids: Tensor
    at_M: Tensor
    """Where in the flat output the prediction of each sampled token stands."""
    target_M: Tensor
    """The tokens themselves."""
    cell_M: Tensor
    """Where in a flat (N, T) array their log-probs belong."""
    sees: Tensor | None = None
    """(B, L, L): which positions each may attend to, where that is not simply what came before."""
    segments: Segments | None = None
    """Of the one row, where its attention is told by ranges."""
    asked: Sequence[Sequence[int]] = ()
    """The rows' prompts, where some of them have images; the module then places tokens by itself."""
    real_NL: Tensor | None = None
    """With them: which tokens are no padding."""


def pack(samples: Sequence[Sample], steps: int, how: str, pad: int, device: torch.device) -> PackedBatch:
    """Prompt and completion of each row; `steps` is T."""
    if how == "shared":
        return _shared(samples, steps, pad, device)
    if how == "segments":
        return _segments(samples, steps, device)
    packed = how == "packed"
    rows = [torch.cat([torch.as_tensor(s.prompt.ids, dtype=torch.int64), s.ids]) for s in samples]
    width = max(len(row) for row in rows)
    at, target, cell, begin = [], [], [], 0
    for number, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        made_M = sample.made.nonzero()[:, 0]
        first = begin if packed else number * width
        at.append(first + len(sample.prompt.ids) - 1 + made_M)
        target.append(sample.ids[made_M])
        cell.append(number * steps + made_M)
        begin += len(row)
    if packed:
        ids_NL = torch.cat(rows)[None]
        position_NL = torch.cat([torch.arange(len(row)) for row in rows])[None]
    else:
        ids_NL = pad_sequence(rows, batch_first=True, padding_value=pad)
        position_NL = torch.arange(width).expand(len(rows), width)
    batch = _on(device, ids_NL, position_NL, at, target, cell)
    if not pictured(samples):
        return batch
    real_NL = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return replace(batch, asked=[sample.prompt.ids for sample in samples], real_NL=real_NL.long().to(device))


def pictured(samples: Sequence[Sample]) -> bool:
    """Whether some prompts have images."""
    return any(isinstance(sample.prompt.ids, PicturedIds) for sample in samples)


def _shared(samples: Sequence[Sample], steps: int, pad: int, device: torch.device) -> PackedBatch:
    """A row a prompt; segment 0 is the prompt, k its k-th completion, −1 padding."""
    blocks = list(by_prompt(samples).values())
    ids, positions, segments = [], [], []
    at, target, cell = [], [], []
    width = max(_length(samples, block) for block in blocks)
    for number, block in enumerate(blocks):
        prompt_L = torch.as_tensor(samples[block[0]].prompt.ids, dtype=torch.int64)
        begin = len(prompt_L)
        parts, places, marks = [prompt_L], [torch.arange(begin)], [torch.zeros(begin, dtype=torch.int64)]
        first = begin
        for k, row in enumerate(block, 1):
            sample = samples[row]
            made_M = sample.made.nonzero()[:, 0]
            parts.append(sample.ids)
            places.append(begin + torch.arange(sample.length))
            marks.append(torch.full((sample.length,), k))
            # A token is predicted where the one before it stands: the first at the prompt's end.
            at.append(number * width + torch.where(made_M == 0, begin - 1, first + made_M - 1))
            target.append(sample.ids[made_M])
            cell.append(row * steps + made_M)
            first += sample.length
        ids.append(torch.cat(parts))
        positions.append(torch.cat(places))
        segments.append(torch.cat(marks))
    segment_BL = pad_sequence(segments, batch_first=True, padding_value=-1)
    same = segment_BL[:, :, None] == segment_BL[:, None, :]
    before = torch.ones(width, width, dtype=torch.bool).tril()
    sees = (same | ((segment_BL == 0)[:, None, :] & (segment_BL >= 0)[:, :, None])) & before
    ids_BL, position_BL = pad_sequence(ids, True, pad), pad_sequence(positions, True)
    return replace(_on(device, ids_BL, position_BL, at, target, cell), sees=sees.to(device))


def _segments(samples: Sequence[Sample], steps: int, device: torch.device) -> PackedBatch:
    """All prompts, then their completions in the same order."""
    blocks = list(by_prompt(samples).values())
    prompts = [torch.as_tensor(samples[block[0]].prompt.ids, dtype=torch.int64) for block in blocks]
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    rows = [row for block in blocks for row in block]
    positions, at, target, cell = [torch.arange(len(prompt)) for prompt in prompts], [], [], []
    first = int(ends[-1]) + 1
    for end, prompt, block in zip(ends.tolist(), prompts, blocks, strict=True):
        for row in block:
            sample = samples[row]
            made_M = sample.made.nonzero()[:, 0]
            positions.append(len(prompt) + torch.arange(sample.length))
            # A token is predicted where the one before it stands: the first at the prompt's end.
            at.append(torch.where(made_M == 0, end, first + made_M - 1))
            target.append(sample.ids[made_M])
            cell.append(row * steps + made_M)
            first += sample.length
    ids_1L, position_1L = torch.cat([*prompts, *(samples[row].ids for row in rows)])[None], torch.cat(positions)[None]
    lengths = [[samples[row].length for row in block] for block in blocks]
    segments = Segments.of([len(prompt) for prompt in prompts], lengths, device)
    return replace(_on(device, ids_1L, position_1L, at, target, cell), segments=segments)


def _on(
    device: torch.device,
    ids_BL: Tensor,
    position_BL: Tensor,
    at: Sequence[Tensor],
    target: Sequence[Tensor],
    cell: Sequence[Tensor],
) -> PackedBatch:
    return PackedBatch(
        ids_BL.to(device),
        position_BL.to(device),
        torch.cat(list(at)).to(device),
        torch.cat(list(target)).to(device),
        torch.cat(list(cell)).to(device),
    )


def by_prompt(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """Row numbers of the samples of each prompt; equal texts from different rows stay apart."""
    found: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        found.setdefault(id(sample.prompt), []).append(row)
    return found


def _length(samples: Sequence[Sample], block: Sequence[int]) -> int:
    return len(samples[block[0]].prompt.ids) + sum(samples[row].length for row in block)


def fill(samples: Sequence[Sample], budget: int, how: str) -> list[Sequence[int]]:
    """Row numbers in parts of at most `budget` tokens, padding included; rows of like length together.

    A part holds at least one row; completions that share their prompt stay together as far as the budget allows.
    """
    blocks = [[row] for row in range(len(samples))]
    if how in ("shared", "segments"):
        blocks = [part for block in by_prompt(samples).values() for part in _cut(samples, block, budget)]
    cost_of = {id(block): _length(samples, block) for block in blocks}
    parts: list[list[int]] = []
    spent, longest = 0, 0
    for block in sorted(blocks, key=lambda block: cost_of[id(block)], reverse=True):
        # Where there is padding, the first of a part is the longest.
        more = cost_of[id(block)] if how in ("packed", "segments") or not parts else longest
        if not parts or spent + more > budget:
            parts.append([])
            spent, more = 0, cost_of[id(block)]
            longest = more
        parts[-1] += block
        spent += more
    return [sorted(part) for part in parts]


def _cut(samples: Sequence[Sample], block: Sequence[int], budget: int) -> list[list[int]]:
    """The rows of one prompt in parts that fit."""
    parts: list[list[int]] = [[]]
    for row in block:
        if parts[-1] and _length(samples, [*parts[-1], row]) > budget:
            parts.append([])
        parts[-1].append(row)
    return parts
