"""Prompts into keys and values: whole, those of similar length together, or behind what is kept of a conversation.

Letters: P prompts, T their tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo.language.engines.prefixes import Kept, Prefixes, laid
from grpo.language.pictures import features

TOKENS_AT_A_TIME = 16_384
"""Of prompts in one pass: enough to keep a GPU busy, and little memory."""


class Reader:
    """Reads prompts with a model."""

    def __init__(self, model: nn.Module, pad: int, takes: Any) -> None:
        """takes: the names of what the model's forward takes."""
        self._model, self._pad = model, pad
        self._bare: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self.takes = {name for name in ("position_ids", "logits_to_keep") if name in takes}

    def read(
        self, prompts: Sequence[Sequence[int]], device: torch.device, kept: Prefixes | None
    ) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Logits behind every prompt, the cache that holds them, (P, T) 1 where there is a token, and the position of
        what comes next."""
        known: dict[int, Kept] = {}
        if kept is not None:
            found = ((number, kept.take(prompt)) for number, prompt in enumerate(prompts))
            known = {number: one for number, one in found if one is not None}
        fresh = [number for number in range(len(prompts)) if number not in known]
        parts = []
        if fresh:
            parts.append(self._whole([prompts[number] for number in fresh], device))
        for some in _passes(list(known), [len(prompts[number]) for number in known]):
            parts.append(self._behind([prompts[number] for number in some], [known[number] for number in some], device))
        if len(parts) == 1:
            return parts[0]
        logits, caches, masks, next_P = zip(*parts, strict=True)
        size = max(mask.shape[1] for mask in masks)
        mask_PT = torch.cat([nn.functional.pad(mask, (size - mask.shape[1], 0)) for mask in masks])
        back_P = torch.tensor([*fresh, *known], device=device).argsort()
        cache = _merged(caches)
        cache.batch_select_indices(back_P)
        return torch.cat(logits)[back_P], cache, mask_PT[back_P], torch.cat(next_P)[back_P]

    def _behind(
        self, prompts: Sequence[Sequence[int]], kept: Sequence[Kept], device: torch.device
    ) -> tuple[Tensor, Any, Tensor, Tensor]:
        """The same of prompts that go on from what is kept: only what is new in them is read."""
        config: Any = self._model.config
        cache = DynamicCache(config=config)
        old_PT = laid(kept, cache)
        new = [prompt[one.length :] for prompt, one in zip(prompts, kept, strict=True)]
        ids_PT, new_PT = left_padded(new, self._pad, device)
        position_PT = old_PT.sum(-1, keepdim=True) + (new_PT.cumsum(-1) - 1).clamp(min=0)
        mask_PT = torch.cat([old_PT, new_PT], 1)
        return self.forward(ids_PT, position_PT, mask_PT, cache), cache, mask_PT, mask_PT.sum(-1)

    def _whole(self, prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Any, Tensor, Tensor]:
        """The same of prompts that are read from their beginning, padded on the left.

        `prompts` come shortest first; those of similar length are read together.
        """
        config: Any = self._model.config
        parts, start = [], 0
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and _together(len(prompts[start]), len(prompts[end]), end + 1 - start):
                end += 1
            parts.append(prompts[start:end])
            start = end
        logits, caches, following = [], [], []
        for part in parts:
            ids_PT, mask_PT = left_padded(part, self._pad, device)
            caches.append(DynamicCache(config=config))
            beside = features.arguments(self._bare, part, ids_PT)
            position_PT = features.positions(self._bare, ids_PT, mask_PT, beside)
            mask = None if bool(mask_PT.all()) else mask_PT
            logits.append(self.forward(ids_PT, position_PT, mask, caches[-1], beside))
            last_P = position_PT[..., -1]
            following.append((position_PT.amax(-1).amax(0) if last_P.ndim > 1 else last_P) + 1)
        return torch.cat(logits), _merged(caches), left_padded(prompts, self._pad, device)[1], torch.cat(following)

    def forward(
        self,
        ids_NT: Tensor,
        position_NT: Tensor,
        mask_NT: Tensor | None,
        cache: Any,
        beside: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Logits behind the last token. Without a mask, attention takes its faster paths. beside: of images."""
        further: dict[str, Any] = {"position_ids": position_NT, "logits_to_keep": 1}
        further = {name: value for name, value in further.items() if name in self.takes} | dict(beside or {})
        out = self._model(input_ids=ids_NT, attention_mask=mask_NT, past_key_values=cache, use_cache=True, **further)
        logits_NV: Tensor = out.logits[:, -1]
        return logits_NV


def _passes(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Those that are read in one pass, shortest first: a bounded number of tokens, what is kept of them counted too."""
    some: list[int] = []
    for number, length in zip(numbers, lengths, strict=True):
        if some and length * (len(some) + 1) > TOKENS_AT_A_TIME:
            yield some
            some = []
        some.append(number)
    if some:
        yield some


def _together(shortest: int, longest: int, count: int) -> bool:
    """Whether so many prompts are read in one pass: at most a third of padding, and a bounded number of tokens."""
    return 2 * longest <= 3 * shortest and longest * count <= TOKENS_AT_A_TIME


def _merged(caches: Sequence[Any]) -> Any:
    """One cache of all rows, in the last one's place; those shorter than the longest are padded on the left."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("keys", "values"):
            states = [getattr(layer, name) for layer in layers]
            size = max(state.shape[-2] for state in states)
            padded = [nn.functional.pad(state, (0, 0, size - state.shape[-2], 0)) for state in states]
            setattr(layers[-1], name, torch.cat(padded))
    return caches[-1]


def left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(P, T) ids and their mask, 1 where there is a token; all prompts end in the last column."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
