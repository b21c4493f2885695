"""One token from logits, for every row at once: penalty, temperature, truncation and the draw.

The definitions are transformers' (the same tokens survive), the randomness is ours: a row's uniform numbers come from
its own seed, and a number picks its token by the inverse of the cumulative distribution in vocabulary order. So a
completion depends on its seed, not on the device or on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo.language.engines import Sampling

FEW = 256
"""Tokens among which the nucleus is looked for first: sorting a whole vocabulary costs as much as a small model."""
BLOCK = 256
"""Tokens whose weights are summed before the draw looks at single ones."""


@dataclass(frozen=True)
class Drawn:
    """A token for every row."""

    token_N: Tensor
    logp_N: Tensor
    """log softmax(logits / temperature), before penalty and truncation; greedy: at temperature 1."""
    kept_N: Tensor | None
    """Probability (at the same temperature) of the tokens that survived truncation; None: nothing was cut."""


class Numbers:
    """A seed's numbers in [0, 1), some at a time: the same ones whatever the parts they are asked for in."""

    def __init__(self, seed: int, start: int = 0) -> None:
        bits = np.random.PCG64(seed)
        if start:
            bits.advance(start)
        self._random = np.random.Generator(bits)

    def next(self, count: int) -> np.ndarray:
        """So many more."""
        return self._random.random(count)


def uniforms(seeds: Sequence[int], length: int, starts: Sequence[int] = ()) -> Tensor:
    """A row of numbers in [0, 1) for every seed, from a place of its own on; a longer row begins with the shorter."""
    places = zip(seeds, starts or [0] * len(seeds), strict=True)
    return torch.from_numpy(np.stack([Numbers(seed, start).next(length) for seed, start in places]))


def draw(
    logits_NV: Tensor,
    sampling: Sampling,
    uniform_N: Tensor,
    seen_NV: Tensor | None = None,
    never: Tensor | None = None,
) -> Drawn:
    """Choose a token for every row; `seen_NV` marks the tokens that the repetition penalty is about.

    never: tokens that are not drawn, those that stand for images.
    """
    scaled_NV = logits_NV.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled_NV = scaled_NV / sampling.temperature
    chosen_NV = scaled_NV
    if seen_NV is not None:
        chosen_NV = torch.where(seen_NV, penalised(scaled_NV, sampling.repetition_penalty), scaled_NV)
    if never is not None:
        chosen_NV = chosen_NV.index_fill(-1, never, -torch.inf)
    best_N1 = scaled_NV.amax(-1, keepdim=True)
    weight_NV = (scaled_NV - best_N1).exp_()
    total_N = weight_NV.sum(-1)
    kept_N = None
    if sampling.temperature == 0.0:
        token_N = chosen_NV.argmax(-1)
    else:
        keep_NV = survivors(chosen_NV, sampling)
        drawn_NV = weight_NV
        if chosen_NV is not scaled_NV:
            drawn_NV = (chosen_NV - chosen_NV.amax(-1, keepdim=True)).exp_()
        if keep_NV is not None:
            kept_N = (weight_NV * keep_NV).sum(-1) / total_N
            drawn_NV = drawn_NV * keep_NV
        token_N = pick(drawn_NV, uniform_N)
    logp_N = scaled_NV.gather(-1, token_N[:, None])[:, 0] - best_N1[:, 0] - total_N.log()
    return Drawn(token_N, logp_N, kept_N)


def penalised(logits: Tensor, penalty: float) -> Tensor:
    """Logits of tokens that have occurred: divided where positive, multiplied where negative."""
    return torch.where(logits < 0, logits * penalty, logits / penalty)


def survivors(scaled_NV: Tensor, sampling: Sampling) -> Tensor | None:
    """The tokens that top-k, top-p and min-p leave, each applied to what the one before left; None: all."""
    size, keep_NV = scaled_NV.shape[-1], None
    if 0 < sampling.top_k < size:
        least_N1 = scaled_NV.topk(sampling.top_k, sorted=False).values.amin(-1, keepdim=True)
        keep_NV = scaled_NV >= least_N1
        scaled_NV = scaled_NV.masked_fill(~keep_NV, -torch.inf)
    if sampling.top_p < 1.0:
        keep_NV = _nucleus(scaled_NV, sampling.top_p)
        scaled_NV = scaled_NV.masked_fill(~keep_NV, -torch.inf)
    if sampling.min_p > 0.0:
        likely_NV = scaled_NV.softmax(-1)
        likely_NV = likely_NV >= sampling.min_p * likely_NV.amax(-1, keepdim=True)
        keep_NV = likely_NV if keep_NV is None else keep_NV & likely_NV
    return keep_NV


def _nucleus(scaled_NV: Tensor, top_p: float) -> Tensor:
    """Tokens with less than `top_p` of the probability before them, likeliest first; the likeliest always."""
    size, total_N1 = scaled_NV.shape[-1], scaled_NV.logsumexp(-1, keepdim=True)
    for few in (FEW, 16 * FEW, size):
        best_NK, index_NK = scaled_NV.topk(min(few, size))
        share_NK = (best_NK - total_N1).exp()
        before_NK = share_NK.cumsum(-1) - share_NK
        if few >= size or bool((before_NK[:, -1] >= top_p).all()):
            break
    keep_NK = (before_NK < top_p) & (share_NK > 0)
    keep_NK[:, 0] = True
    return torch.zeros_like(scaled_NV, dtype=torch.bool).scatter(-1, index_NK, keep_NK)


def pick(weight_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first token at which the cumulative weight exceeds the row's share of it; never one of weight 0.

    In two steps, the block and then the token in it: a running sum over a whole vocabulary is slow on a CPU.
    """
    rows, size = weight_NV.shape
    if size % BLOCK:
        weight_NV = nn.functional.pad(weight_NV, (0, -size % BLOCK))
    blocks_NBK = weight_NV.view(rows, -1, BLOCK)
    sum_NB = blocks_NBK.sum(-1)
    wide = torch.float32 if weight_NV.device.type == "mps" else torch.float64
    block_N, rest_N = _first_above(sum_NB, uniform_N.to(wide) * sum_NB.sum(-1, dtype=wide))
    within_N, _ = _first_above(blocks_NBK[torch.arange(rows, device=block_N.device), block_N], rest_N)
    return (block_N * BLOCK + within_N).clamp(max=size - 1)


def _first_above(weight_NK: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum first exceeds the target, and how much of the target is left there."""
    running_NK = weight_NK.cumsum(-1, dtype=target_N.dtype)
    # Rounding may put the target at the very end, or behind it.
    last_N = running_NK[:, -1]
    target_N = target_N.minimum(last_N.nextafter(torch.zeros_like(last_N)))
    index_N1 = torch.searchsorted(running_NK, target_N[:, None], right=True).clamp(max=weight_NK.shape[-1] - 1)
    before_N1 = running_NK.gather(-1, index_N1) - weight_NK.gather(-1, index_N1)
    return index_N1[:, 0], (target_N - before_N1[:, 0]).clamp(min=0)


class StopTexts:
    """Sees whether a completion has just ended with one of the stop texts."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        # A token is at least one byte of text; a few more, because decoding may treat the first token differently.
        self.tail = max((len(text.encode()) for text in self.stop), default=0) + 4

    def reached(self, completions: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the last tokens of each contain a stop text."""
        tails = [list(ids[-self.tail :]) for ids in completions]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [any(stop in text for stop in self.stop) for text in texts]
