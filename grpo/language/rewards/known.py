"""The rewards that TRL's scripts import from `trl.rewards`, by their names there, of a batch's completions.

Answers are compared by `maths` here, which needs no further package, where TRL uses math_verify: what an answer says
counts wherever it says it, not only in a LaTeX box.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.errors import ConfigError
from grpo.language.rewards.form import SoftOverlong
from grpo.language.rewards.maths import Correctness

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_judge = Correctness()


def _text(completion: Any) -> str:
    """Of a completion, which may be a list of messages: the first of them, as TRL reads it."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **columns: Any) -> list[float | None]:
    """1 for a completion whose answer is the solution's, 0 for any other; None where there is no solution."""
    return [_judge(_text(one), right) for one, right in zip(completions, solution, strict=True)]


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] = ("</think>",),
    **columns: Any,
) -> list[float | None]:
    """The same of what stands behind the reasoning; 0 for reasoning that does not end."""
    found: list[float | None] = []
    for text, right in zip(map(_text, completions), solution, strict=True):
        mark = next((mark for mark in reasoning_delimiters if mark in text), None)
        found.append(0.0 if mark is None else _judge(text.rpartition(mark)[2], right))
    return found


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for a completion that begins with one <think>…</think>, else 0."""
    return [float(_THINK.match(_text(one)) is not None) for one in completions]


@dataclass(frozen=True)
class CosineScaled:
    """What a right or wrong answer is worth by its length: along a cosine from one end to the other."""

    max_len: int
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0
    __name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """All samples of a batch; a wrong answer loses less the longer it is, a right one more."""
        right = accuracy_reward(completions, solution)
        return [
            None if was is None else self._worth(was, len(ids)) for was, ids in zip(right, completion_ids, strict=True)
        ]

    def _worth(self, was_right: float, length: int) -> float:
        low, high = self.min_value_correct, self.max_value_correct
        if not was_right:
            low, high = self.max_value_wrong, self.min_value_wrong
        return low + 0.5 * (high - low) * (1.0 + math.cos(min(length / self.max_len, 1.0) * math.pi))


@dataclass(frozen=True)
class RepeatedTokens:
    """`max_penalty` times the share of n-grams of tokens that have occurred before."""

    ngram_size: int = 3
    max_penalty: float = -1.0
    __name__ = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        if self.max_penalty > 0:
            raise ConfigError(f"max_penalty is {self.max_penalty}; a penalty is 0 or below")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """All samples of a batch."""
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        grams = list(zip(*(ids[at:] for at in range(self.ngram_size)), strict=False))
        return (1 - len(set(grams)) / len(grams)) * self.max_penalty + 0.0 if grams else 0.0


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """DAPO's penalty for coming near the length limit."""

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """All samples of a batch."""
        judge = SoftOverlong(self.max_completion_len, self.soft_punish_cache)
        return [judge("", ids) + 0.0 for ids in completion_ids]


def get_cosine_scaled_reward(max_len: int, **values: float) -> Callable[..., list[float | None]]:
    """The reward that scales what an answer is worth by its length."""
    return CosineScaled(max_len, **values)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """The penalty for tokens that repeat."""
    return RepeatedTokens(ngram_size, max_penalty)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """The penalty for completions near the limit."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)
