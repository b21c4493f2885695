"""Completions of a prompt's last visit as drafts of the next one's (`speculate`).

The numbers that tokens are drawn with follow from the prompt and from which 1 + speculate passes over the data this is
one of, so that the visits within them draw with the same numbers. Where the policy is as it was, it then says what it
said; a draft is right up to the first token at which the change of the policy shows. The engine looks for that place in
one pass and goes on from there. A draft is a guess: what is sampled would be the same without it, up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo.config import ConfigError
from grpo.language.data.prompts import Prompts
from grpo.language.samples import Prompt, Sample
from grpo.seeding import mixed

STREAM = 3
"""Of randomness; see `source`."""
MOST = 16_000_000
"""Tokens that are remembered; the oldest completions are forgotten first."""


class Speculation:
    """What was sampled for prompts that will be visited again with the same numbers."""

    def __init__(self, again: int, seed: int, prompts: Prompts, size: int, most: int = MOST) -> None:
        """again: visits after the first one with the same numbers. size: prompts of a step."""
        try:
            self._epoch = len(prompts)
        except TypeError:
            raise ConfigError("speculate needs data that is passed over again; a stream is not: leave it out") from None
        self._again, self._seed, self._size, self._most = again, seed, size, most
        self._drafts: dict[int, np.ndarray[Any, Any]] = {}
        """What was drawn with a seed, oldest first."""
        self._tokens = 0
        self._wanted: set[int] = set()
        """Seeds of this step that will be used again."""

    def seeds(self, step: int, prompts: Sequence[Prompt], count: int) -> list[int]:
        """For `count` completions of each of a step's prompts."""
        met: Counter[tuple[int, int]] = Counter()
        found = []
        self._wanted = set()
        for place, prompt in enumerate(prompts, step * self._size):
            passes, visit = divmod(place // self._epoch, 1 + self._again)
            one = prompt.row, passes
            # A prompt that comes twice in a step is not to be answered twice in the same words.
            found += [mixed(self._seed, STREAM, *one, met[one], member) for member in range(count)]
            met[one] += 1
            if visit < self._again:
                self._wanted |= {*found[-count:]}
        return found

    def drafts(self, seeds: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """What is remembered of these."""
        return {seed: self._drafts[seed].tolist() for seed in seeds if seed in self._drafts}

    def keep(self, seeds: Sequence[int], samples: Sequence[Sample]) -> None:
        """Remember what was drawn in this step with numbers that will be drawn with again."""
        for seed, sample in zip(seeds, samples, strict=True):
            self._forget(seed)
            if seed in self._wanted:
                self._remember(seed, sample.ids.numpy().astype(np.int32))

    def _remember(self, seed: int, ids: np.ndarray[Any, Any]) -> None:
        self._drafts[seed] = ids
        self._tokens += len(ids)
        while self._tokens > self._most:
            self._forget(next(iter(self._drafts)))

    def _forget(self, seed: int) -> None:
        gone = self._drafts.pop(seed, None)
        self._tokens -= 0 if gone is None else len(gone)

    def state(self) -> dict[str, Any]:
        """All of it as arrays."""
        ids = list(self._drafts.values())
        return {
            "speculation/seeds": np.array([*self._drafts], dtype=np.int64),
            "speculation/lengths": np.array([len(one) for one in ids], dtype=np.int64),
            "speculation/ids": np.concatenate([np.zeros(0, np.int32), *ids]),
        }

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """As it was; a run that did not speculate before has nothing to remember."""
        self._drafts, self._tokens = {}, 0
        if "speculation/seeds" not in arrays:
            return
        seeds, lengths, ids = (np.asarray(arrays[f"speculation/{name}"]) for name in ("seeds", "lengths", "ids"))
        for seed, mine in zip(seeds.tolist(), np.split(ids, lengths.cumsum())[:-1], strict=True):
            self._remember(seed, mine.astype(np.int32))
