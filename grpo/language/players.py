"""Who makes samples of prompts: one answer each; `turns` has conversations."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol

import torch

from grpo.language.engines import Completion, Engine, Sampling, Tokens
from grpo.language.samples import Prompt, Sample

Groups = Generator[tuple[int, list[Sample]], None, None]
"""The number of a prompt and its samples, in the order in which prompts end."""


class Player(Protocol):
    """Makes samples of prompts: one answer each, or a conversation."""

    def __call__(
        self, engine: Engine, prompts: Sequence[Prompt], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Groups:
        """`count` samples of each prompt, handed over as soon as the prompt's last one has ended."""
        ...

    def close(self) -> None:
        """Let go of processes, where there are any."""
        return


class Remembers(Protocol):
    """Something beside the steps that a checkpoint must keep."""

    def state(self) -> Mapping[str, Any]: ...
    def load_state(self, values: Mapping[str, Any]) -> None: ...


class OneAnswer(Player):
    """The usual case: one completion, and that is it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self, engine: Engine, prompts: Sequence[Prompt], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Groups:
        """`count` samples of each prompt, as soon as they have ended."""
        asked = [prompt.ids for prompt in prompts]
        with closing(engine.stream(asked, count, sampling, seeds)) as groups:
            for number, made in groups:
                yield number, self._samples(prompts[number], made)

    def _samples(self, prompt: Prompt, made: Sequence[Completion]) -> list[Sample]:
        texts = self._tokens.tokenizer.batch_decode([c.ids for c in made], skip_special_tokens=True)
        return [
            Sample(
                prompt=prompt,
                ids=completion.ids,
                made=torch.ones(len(completion.ids), dtype=torch.bool),
                logp=completion.logp,
                stop=completion.stop,
                text=text,
                messages=({"role": "assistant", "content": text},),
                kept=completion.kept,
                version=completion.version,
            )
            for completion, text in zip(made, texts, strict=True)
        ]
