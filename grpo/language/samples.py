"""The records that travel through the room: a prompt, and a completion of it that is scored, judged and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Message = dict[str, Any]
"""{"role": …, "content": …}, as chat templates take it."""

LONGEST_ANSWER = 20_000
"""Characters of a row's answer that are kept beside each completion."""


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, ready for the model."""

    row: int
    """Its number in the data set."""
    ids: Sequence[int]
    """As the model reads it, template and all."""
    text: str
    """The same as text."""
    messages: Sequence[Message] | None
    """The conversation so far; None: the prompt is bare text."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the row (without the prompt's own), for the reward functions; `answer` where there is one."""
    truncated: bool = False

    @property
    def shown(self) -> Any:
        """What a reward function gets as `prompt`: the messages, or the text where there are none."""
        return self.text if self.messages is None else list(self.messages)


@dataclass(frozen=True)
class Sample:
    """A completion of a prompt. With several turns its ids hold the answers of tools and environment too."""

    prompt: Prompt
    ids: Tensor
    """(T,) int64: what was sampled, as sampled, and what others said in between."""
    made: Tensor
    """(T,) bool: tokens that the policy chose."""
    logp: Tensor | None
    """(T,) float32, as recorded when sampled; 0 where the policy had no say."""
    stop: str
    """eos, stop or length."""
    text: str
    """What the policy said, special tokens left out; several turns: the last answer."""
    messages: Sequence[Message] = ()
    """The same as messages: one from the assistant, or the whole conversation after the prompt."""
    reward: float | None = None
    """What an environment gave, in sum; None: there is none, or it did not say."""
    error: str | None = None
    """Why it failed: an environment or tool that broke, an engine that gave up."""
    trace: str | None = None
    """Where a reward function broke."""
    calls: int = 0
    """Tool calls made."""
    failed_calls: int = 0
    """Of those, calls that were refused or raised."""
    kept: float | None = None
    """See `Completion.kept`."""
    version: Tensor | None = None
    """See `Completion.version`."""
    attempt: int = 0
    """Times that its prompt had been sampled in this step before."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """What each reward function gave, once judged; None: no opinion."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What reward functions wanted shown beside it."""
    environment: Any = None
    """An environment that reward functions may ask, in the process that made it."""

    @property
    def length(self) -> int:
        """Tokens of the completion."""
        return int(self.ids.shape[0])

    def told(self) -> dict[str, Any]:
        """Prompt, completion and verdict, with the row's answer where it has one, as a run's samples keep them."""
        answer = self.prompt.columns.get("answer")
        optional = {
            "answer": None if answer is None else str(answer)[:LONGEST_ANSWER],
            "extras": dict(self.extras) or None,
            "messages": list(self.messages) if len(self.messages) > 1 else None,
            "attempt": self.attempt or None,
            "error": self.error,
            "traceback": self.trace,
        }
        return {
            "data_row": self.prompt.row,
            "prompt": self.prompt.text,
            "completion": self.text,
            "stop": self.stop,
            "rewards": dict(self.rewards),
            **{name: value for name, value in optional.items() if value is not None},
        }


def laid(rows: Sequence[Tensor], steps: int) -> Tensor:
    """Rows of different lengths as (N, T), 0 behind their end."""
    found = pad_sequence(list(rows), batch_first=True)
    return torch.nn.functional.pad(found, (0, steps - found.shape[1]))


def rewards_of(samples: Sequence[Sample], names: Sequence[str]) -> np.ndarray:
    """(N, K): what each function gave each sample; NaN: no opinion."""
    given = [[np.nan if (value := sample.rewards[name]) is None else value for name in names] for sample in samples]
    return np.array(given, dtype=np.float64).reshape(len(samples), len(names))


def lengths_of(samples: Sequence[Sample], chosen: bool = False) -> dict[str, float | None]:
    """How long completions are, for a run's metrics; those that ended by themselves apart.

    chosen: only what the model said counts, not what tools and environments answered.
    """
    length_N = np.array([int(s.made.sum()) if chosen else s.length for s in samples], dtype=float)
    ended_N = np.array([sample.stop != "length" for sample in samples])
    metrics: dict[str, float | None] = {
        "completions/mean_length": float(length_N.mean()),
        "completions/min_length": float(length_N.min()),
        "completions/max_length": float(length_N.max()),
        "completions/clipped_ratio": float((~ended_N).mean()),
    }
    for name in ("mean", "min", "max"):
        value = float(getattr(np, name)(length_N[ended_N])) if ended_N.any() else None
        metrics[f"completions/{name}_terminated_length"] = value
    return metrics
