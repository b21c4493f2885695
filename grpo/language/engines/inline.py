"""Our own sampling loop over the very module that is trained: no copy of the weights, nothing to keep in step.

A prompt is read once and its keys and values are shared out to its completions; rows that have ended leave the batch,
so that the cost follows the rows that are still written. Log-probs are recorded as the tokens are drawn.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo.config import ConfigError
from grpo.language.engines import Completion, Sampling, Stop, Tokens
from grpo.language.engines.attention import folded_heads, give_room
from grpo.language.engines.sampling import StopTexts, draw, uniforms

TOKENS_AT_A_TIME = 16_384
"""Of prompts in one pass: enough to keep a GPU busy, and little memory."""


class InlineEngine:
    """Samples with the module itself, on the CPU or a GPU."""

    name = "inline"
    exact = True
    row_seeds = True
    """A completion depends on its own seed alone, not on what else is in the batch."""

    def __init__(self, model: nn.Module, tokens: Tokens, *, rows_at_a_time: int | None = None) -> None:
        reason = self.supports(model)
        if reason:
            raise ConfigError(f"engine=inline cannot run this model: {reason}; use engine=transformers")
        self.model, self.tokens, self.rows_at_a_time = model, tokens, rows_at_a_time
        known = inspect.signature(bare(model).forward).parameters
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in known}

    @staticmethod
    def supports(model: nn.Module) -> str | None:
        """Why this loop cannot run a model, in a few words; None: it can."""
        config: Any = getattr(model, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            return f"{type(model).__name__} is not a transformers model"
        if getattr(config, "is_encoder_decoder", False):
            return "it has an encoder"
        adapter = getattr(model, "active_peft_config", None)
        if adapter is not None and adapter.is_prompt_learning:
            return f"its adapter ({adapter.peft_type.value}) puts learned tokens before the prompt"
        if getattr(bare(model), "_is_stateful", False):
            return "it carries a recurrent state, which padding would change"
        takes = inspect.signature(bare(model).forward).parameters
        if not {"past_key_values", "use_cache", "attention_mask"} <= takes.keys():
            return "its forward takes no cache"
        if getattr(config.get_text_config(decoder=True), "attention_chunk_size", None):
            return "its attention works in chunks, which padding would shift"
        odd = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
        odd -= {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
        return f"it needs a cache of its own kind ({', '.join(sorted(odd))})" if odd else None

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """`count` completions of each prompt, those of a prompt together; a seed for every completion."""
        room = check(self.model, prompts, count, sampling, seeds)
        # Prompts of similar length go together: less padding.
        rows = sorted(range(len(seeds)), key=lambda i: len(prompts[i // count]))
        step = self.rows_at_a_time or max(len(rows), 1)
        made: list[Completion | None] = [None] * len(rows)
        with torch.no_grad(), evaluating(self.model), folded_heads():
            for start in range(0, len(rows), step):
                batch = rows[start : start + step]
                asked = [prompts[i // count] for i in batch]
                limits = [room[i // count] for i in batch]
                completions = self._batch(asked, limits, sampling, [seeds[i] for i in batch])
                for i, completion in zip(batch, completions, strict=True):
                    made[i] = completion
        return [completion for completion in made if completion is not None]

    def refresh(self) -> None:
        """Nothing to fetch: these are the policy's weights."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _batch(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        device, steps = next(self.model.parameters()).device, max(limits)
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        source_N = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=device)
        logits_PV, cache = self._read(list(distinct), device)
        logits_NV = logits_PV[source_N]  # the group shares what was read
        cache.batch_select_indices(source_N)
        give_room(cache)
        _, mask_NT = left_padded(prompts, self.tokens.pad, device)
        padded = not bool(mask_NT.all())
        seen_NV = None
        if sampling.repetition_penalty != 1.0:
            seen_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
            for row_V, prompt in zip(seen_NV, prompts, strict=True):
                row_V[list(prompt)] = True

        rows = len(prompts)
        live_N = torch.arange(rows, device=device)
        length_N = torch.tensor([len(prompt) for prompt in prompts], device=device)
        limit_N = torch.tensor(limits, device=device)
        eos = torch.tensor(sorted(self.tokens.eos), dtype=torch.long, device=device)
        stops = StopTexts(self.tokens.tokenizer, sampling.stop) if sampling.stop else None
        uniform_NT = uniforms(seeds, steps).to(device)
        made_NT = torch.full((rows, steps), self.tokens.pad, device=device)
        logp_NT = torch.zeros(rows, steps, device=device)
        kept_NT = torch.ones(rows, steps, device=device)
        ended: list[tuple[Stop, int]] = [("length", limit) for limit in limits]

        for t in range(steps):
            drawn = draw(logits_NV, sampling, uniform_NT[live_N, t], seen_NV)
            made_NT[live_N, t], logp_NT[live_N, t] = drawn.token_N, drawn.logp_N
            if drawn.kept_N is not None:
                kept_NT[live_N, t] = drawn.kept_N
            eos_N = torch.isin(drawn.token_N, eos)
            stop_N = torch.zeros_like(eos_N)
            if stops is not None:
                texts = stops.reached(made_NT[live_N, max(0, t + 1 - stops.tail) : t + 1].tolist())
                stop_N = torch.tensor(texts, device=device) & ~eos_N
            over_N = eos_N | stop_N | (limit_N[live_N] <= t + 1)
            if bool(over_N.any()):
                for reason, which_N in (("eos", eos_N), ("stop", stop_N)):
                    for row in live_N[which_N].tolist():
                        ended[row] = (reason, t + 1)  # type: ignore[assignment]
                going = (~over_N).nonzero()[:, 0]
                if not len(going):
                    break
                live_N, mask_NT, token_N = live_N[going], mask_NT[going], drawn.token_N[going]
                seen_NV = None if seen_NV is None else seen_NV[going]
                cache.batch_select_indices(going)
            else:
                token_N = drawn.token_N
            if seen_NV is not None:
                seen_NV.scatter_(1, token_N[:, None], True)
            if padded:
                mask_NT = nn.functional.pad(mask_NT, (0, 1), value=1)
            position_N1 = length_N[live_N, None] + t
            logits_NV = self._forward(token_N[:, None], position_N1, mask_NT if padded else None, cache)

        if not bool(logp_NT.isfinite().all()):
            raise FloatingPointError("the model's logits are not finite: its weights hold NaN or infinity, or overflow")
        made, logp, kept = made_NT.cpu(), logp_NT.cpu(), kept_NT.cpu()
        greedy = sampling.temperature == 0.0
        return [
            Completion(made[i, :n].clone(), logp[i, :n].clone(), reason, None if greedy else float(kept[i, :n].mean()))
            for i, (reason, n) in enumerate(ended)
        ]

    def _read(self, prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Any]:
        """Logits behind every prompt, and the cache that holds them, padded on the left.

        `prompts` come shortest first; those of similar length are read together.
        """
        config: Any = self.model.config
        parts, start = [], 0
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and _together(len(prompts[start]), len(prompts[end]), end + 1 - start):
                end += 1
            parts.append(prompts[start:end])
            start = end
        logits, caches = [], []
        for part in parts:
            ids_PT, mask_PT = left_padded(part, self.tokens.pad, device)
            caches.append(DynamicCache(config=config))
            position_PT = (mask_PT.cumsum(-1) - 1).clamp(min=0)
            mask = None if bool(mask_PT.all()) else mask_PT
            logits.append(self._forward(ids_PT, position_PT, mask, caches[-1]))
        return torch.cat(logits), _merged(caches)

    def _forward(self, ids_NT: Tensor, position_NT: Tensor, mask_NT: Tensor | None, cache: Any) -> Tensor:
        """Logits behind the last token. Without a mask, attention takes its faster paths."""
        further: dict[str, Any] = {"position_ids": position_NT, "logits_to_keep": 1}
        further = {name: value for name, value in further.items() if name in self._takes}
        out = self.model(input_ids=ids_NT, attention_mask=mask_NT, past_key_values=cache, use_cache=True, **further)
        logits_NV: Tensor = out.logits[:, -1]
        return logits_NV


def _together(shortest: int, longest: int, count: int) -> bool:
    """Whether so many prompts are read in one pass: at most a third of padding, and a bounded number of tokens."""
    return 2 * longest <= 3 * shortest and longest * count <= TOKENS_AT_A_TIME


def _merged(caches: Sequence[Any]) -> Any:
    """One cache of all rows, in the last one's place, which is the longest: the others are padded on the left."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("keys", "values"):
            states = [getattr(layer, name) for layer in layers]
            size = states[-1].shape[-2]
            padded = [nn.functional.pad(state, (0, 0, size - state.shape[-2], 0)) for state in states]
            setattr(layers[-1], name, torch.cat(padded))
    return caches[-1]


def bare(model: nn.Module) -> nn.Module:
    """The model under an adapter's wrapper."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return inner


def check(
    model: nn.Module, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
) -> list[int]:
    """Refuse what cannot be sampled; the most new tokens that fit behind each prompt."""
    if len(seeds) != len(prompts) * count:
        raise ValueError(f"{len(prompts)} prompts × {count} completions need as many seeds, not {len(seeds)}")
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {sampling.max_new_tokens}; ask for at least 1")
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    context, vocabulary = getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None)
    room = []
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(f"prompt {i} is empty: the model needs at least one token to go on from")
        if vocabulary is not None and not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ConfigError(
                f"prompt {i} holds a token outside the model's vocabulary of {vocabulary}; is this its tokenizer?"
            )
        if context is not None and len(prompt) >= context:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens and the model's context {context}; lower max_prompt_length"
            )
        room.append(sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(prompt)))
    return room


def left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(P, T) ids and their mask, 1 where there is a token; all prompts end in the last column."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """eval(), and afterwards every submodule in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
