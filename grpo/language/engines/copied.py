"""Our own loop over a copy of the model, so that the model itself can learn meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from threading import RLock

import torch
from torch import nn

from grpo.config import ConfigError
from grpo.language.engines import Completion, Engine, Groups, Sampling, Tokens
from grpo.language.engines.inline import InlineEngine


class CopyEngine(Engine):
    """`InlineEngine` with weights of its own, on another device where one is named; one call at a time."""

    name = "inline"
    exact = False
    at_once = 1

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        *,
        sampler_device: str | None = None,
        rows_at_a_time: int | None = None,
        graphs: bool | None = None,
        blocks: int | None = None,
        kept_bytes: int | None = None,
    ) -> None:
        """sampler_device: where the copy is, cuda:1 say; None: beside the model. The others are `InlineEngine`'s."""
        self.model, self._version = model, 0
        device = next(model.parameters()).device if sampler_device is None else torch.device(sampler_device)
        try:
            made = copy.deepcopy(model).requires_grad_(False).eval().to(device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            said = " ".join(str(error).split())[:200]
            raise ConfigError(f"staleness > 0 with engine=inline needs a second copy of the model: {said}") from error
        self._copy = made
        self._inner = InlineEngine(
            made, tokens, rows_at_a_time=rows_at_a_time, graphs=graphs, blocks=blocks, kept_bytes=kept_bytes
        )
        self.context = self._inner.context
        self._turn = RLock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """On a GPU the copy computes beside the model, not in turn with it."""
        self._follow()

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """`count` completions of each prompt, those of a prompt together; a seed for every completion."""
        with self._turn, torch.cuda.stream(self._stream):  # none where there is no GPU
            return [self._dated(made) for made in self._inner.generate(prompts, count, sampling, seeds)]

    def stream(self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]) -> Groups:
        """The same, a prompt's number and its completions at a time, as soon as the last of them has ended."""
        with self._turn, closing(self._inner.stream(prompts, count, sampling, seeds)) as groups:
            while True:
                with torch.cuda.stream(self._stream):  # not while somebody else is at it
                    found = next(groups, None)
                if found is None:
                    return
                yield found[0], [self._dated(made) for made in found[1]]

    def refresh(self, version: int = 0) -> None:
        """Fetch the policy's weights, once what is being sampled has ended."""
        with self._turn, torch.no_grad():
            held = dict(_tensors(self._copy))
            for name, tensor in _tensors(self.model):
                held[name].copy_(tensor)
            self._follow()
            self._version = version
            self._inner.refresh(version)

    def tend(self, version: int) -> None:
        """The same weights under another number."""
        with self._turn:
            self._version = version

    def conversing(self, party: int = 0, of: int = 1) -> AbstractContextManager[None]:
        """Inside, what was made may be gone on from."""
        return self._inner.conversing(party, of)

    def metrics(self) -> Mapping[str, float]:
        """Of the last rollout; they depend on the machine."""
        return self._inner.metrics()

    def close(self) -> None:
        """Let go of memory."""
        self._inner.close()

    def _follow(self) -> None:
        """Nothing is sampled before the weights are there."""
        if self._stream is not None:
            for device in {self._stream.device, next(self.model.parameters()).device}:
                self._stream.wait_stream(torch.cuda.current_stream(device))

    def _dated(self, made: Completion) -> Completion:
        return replace(made, version=torch.full((len(made.ids),), self._version))


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
