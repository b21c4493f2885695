"""transformers' own `generate`, for models that our loop cannot run: recurrent states, caches of their own kind.

It draws from one generator for all rows, so a completion depends on its seed and on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteriaList

from grpo.config import ConfigError
from grpo.language.engines import Completion, Engine, Groups, Sampling, Stop, Tokens, in_groups
from grpo.language.engines.inline import bare, check, context_of, evaluating
from grpo.language.engines.reading import left_padded
from grpo.language.engines.sampling import StopTexts
from grpo.language.pictures import features
from grpo.seeding import mixed


class HFEngine(Engine):
    """Samples with `model.generate`; the policy scores the completions again."""

    name = "transformers"
    exact = False
    row_seeds = False

    def __init__(self, model: nn.Module, tokens: Tokens, *, rows_at_a_time: int | None = None) -> None:
        if not hasattr(model, "generate"):
            raise ConfigError(f"{type(model).__name__} has no generate; give a causal language model of transformers")
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(f"{type(bare(model)).__name__} has an encoder; give a causal language model")
        self.model, self.tokens, self.rows_at_a_time = model, tokens, rows_at_a_time
        self.context = context_of(model)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """`count` completions of each prompt, those of a prompt together.

        The same seeds and prompts in the same order give the same completions; a row alone may give another one.
        """
        made = dict(self.stream(prompts, count, sampling, seeds))
        return [completion for i in range(len(prompts)) for completion in made[i]]

    def stream(self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]) -> Groups:
        """The same, a prompt at a time; those of a batch end together."""
        room = check(self.model, prompts, count, sampling, seeds)
        for batch in self._batches(prompts, room, count, sampling):
            mine = [seeds[i * count + j] for i in batch for j in range(count)]
            with torch.no_grad(), evaluating(self.model), _plain_settings(self.model):
                rows = self._batch([prompts[i] for i in batch], room[batch[0]], count, sampling, mine)
            yield from ((batch[k], group) for k, group in in_groups(rows, count))

    def _batches(
        self, prompts: Sequence[Sequence[int]], room: Sequence[int], count: int, sampling: Sampling
    ) -> Iterator[list[int]]:
        """Prompts that go together: as many new tokens at most, and equally long where padding would be seen."""
        seen = sampling.repetition_penalty != 1.0 or getattr(bare(self.model), "_is_stateful", False)
        together: dict[tuple[int, int], list[int]] = {}
        for i, prompt in enumerate(prompts):
            together.setdefault((room[i], len(prompt) if seen else 0), []).append(i)
        step = max((self.rows_at_a_time or len(prompts) * count) // count, 1)
        for alike in together.values():
            yield from (alike[start : start + step] for start in range(0, len(alike), step))

    def _batch(
        self, prompts: Sequence[Sequence[int]], room: int, count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        model: Any = self.model
        device = next(model.parameters()).device
        # Not num_return_sequences, which generate refuses when greedy; it repeats the prompts all the same.
        every = [prompt for prompt in prompts for _ in range(count)]
        ids_NT, mask_NT = left_padded(every, self.tokens.pad, device)
        beside = features.arguments(bare(model), every, ids_NT)
        start, stopped_at = ids_NT.shape[1], [0] * len(seeds)
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=room,
            eos_token_id=sorted(self.tokens.eos) or None,
            pad_token_id=self.tokens.pad,
            repetition_penalty=float(sampling.repetition_penalty),
            suppress_tokens=sorted(self.tokens.unsaid) or None,
            **_drawing(sampling),
        )
        with _seeded(seeds, device):
            ids_NT = model.generate(
                input_ids=ids_NT,
                attention_mask=mask_NT,
                generation_config=settings,
                stopping_criteria=self._stops(sampling, start, stopped_at),
                synced_gpus=False,  # ranks that divide a model keep in step by themselves
                **beside,
            )
        return [self._completion(ids, n) for ids, n in zip(ids_NT[:, start:].cpu(), stopped_at, strict=True)]

    def _completion(self, ids_T: Tensor, stopped_at: int) -> Completion:
        """Without what follows its end, where `generate` pads."""
        reason: Stop = "stop" if stopped_at else "length"
        length = stopped_at or len(ids_T)
        eos = torch.isin(ids_T[:length], torch.tensor(sorted(self.tokens.eos), dtype=torch.long)).nonzero()
        if len(eos):
            reason, length = "eos", int(eos[0]) + 1
        return Completion(ids_T[:length].clone(), None, reason)

    def _stops(self, sampling: Sampling, start: int, stopped_at: list[int]) -> Any:
        """A criterion that ends rows at their stop text and writes down where (0: not yet)."""
        if not sampling.stop:
            return None
        stops = StopTexts(self.tokens.tokenizer, sampling.stop)

        def reached(ids_NT: Tensor, scores: Any, **_: Any) -> Tensor:
            length = ids_NT.shape[1] - start
            now = stops.reached(ids_NT[:, max(start, ids_NT.shape[1] - stops.tail) :].tolist())
            for row, stop in enumerate(now):
                if stop and not stopped_at[row]:
                    stopped_at[row] = length
            return torch.tensor(now, device=ids_NT.device)

        return StoppingCriteriaList([reached])


def _drawing(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0.0:
        return {"do_sample": False}
    given = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return given | ({"min_p": sampling.min_p} if sampling.min_p else {})


@contextmanager
def _plain_settings(model: nn.Module) -> Iterator[None]:
    """Without the generation settings that came with the model: what is not asked for would be taken from them."""
    owners: list[Any] = [model, bare(model)]
    former = [owner.generation_config for owner in owners]
    try:
        for owner in owners:
            owner.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        yield
    finally:
        for owner, settings in zip(owners, former, strict=True):
            owner.generation_config = settings


@contextmanager
def _seeded(seeds: Sequence[int], device: torch.device) -> Iterator[None]:
    """Torch's generator of the device seeded from all of the rows' seeds, and afterwards as it was."""
    seed = mixed(*seeds)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        torch.default_generator.manual_seed(seed)
        yield
