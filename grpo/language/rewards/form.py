"""Rewards for how an answer is written, whatever it says: tags, patterns, length, repetition.

Each is a small frozen object that can be sent to a worker process. `completion_ids` are the tokens as sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property

from grpo.errors import ConfigError

TAG_SETS = (("<think>", "</think>", "<answer>", "</answer>"), ("<reasoning>", "</reasoning>", "<answer>", "</answer>"))
TRAILING_COST = 0.008
"""Share of one tag's value that each character after the last tag costs: 0.001 for the usual 0.125."""


@dataclass(frozen=True)
class Xml:
    """`value` for each of <think> </think> <answer> </answer> that stands exactly once and in this order; <reasoning>
    does as well as <think>. Text after </answer> costs 0.8 % of `value` a character, two tags' worth at most.

    A completion of the right form is worth 4 × value, one with nothing of it 0: credit on the way there.
    """

    value: float = 0.125
    __name__ = "xml"

    def __call__(self, completion: str) -> float:
        """One sample."""
        return max(self._score(completion, tags) for tags in TAG_SETS)

    def _score(self, completion: str, tags: tuple[str, ...]) -> float:
        placed, reached = 0, -1
        for tag in tags:
            at = completion.find(tag)
            if at > reached and completion.count(tag) == 1:
                placed, reached = placed + 1, at
        _, closed, after = completion.rpartition(tags[-1])
        trailing = min(2.0, TRAILING_COST * len(after.strip())) if closed else 0.0
        return self.value * (placed - trailing)


@dataclass(frozen=True)
class Think:
    """1 for exactly <think>…</think><answer>…</answer>, both filled, each tag once, nothing around them; else 0."""

    __name__ = "think"

    def __call__(self, completion: str) -> float:
        """One sample."""
        if any(completion.count(tag) != 1 for tag in TAG_SETS[0]):
            return 0.0
        form = r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*"
        match = re.fullmatch(form, completion, re.DOTALL)
        return float(match is not None and all(part.strip() for part in match.groups()))


@dataclass(frozen=True)
class Regex:
    """1 where the pattern is found in the completion (`re.search`; `.` also matches line breaks), else 0."""

    pattern: str
    __name__ = "regex"

    def __post_init__(self) -> None:
        try:
            self._compiled  # noqa: B018 - found out now, not at the first completion
        except re.error as error:
            raise ConfigError(f"regex:{self.pattern}: {error}") from None

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL)

    def __call__(self, completion: str) -> float:
        """One sample."""
        return float(self._compiled.search(completion) is not None)


@dataclass(frozen=True)
class Length:
    """0 for a completion of `target` tokens, or of at most `limit`; less the further away, −1 at twice that at last."""

    target: int | None = None
    limit: int | None = None
    __name__ = "length"

    def __post_init__(self) -> None:
        given = [number for number in (self.target, self.limit) if number is not None]
        if len(given) != 1 or given[0] < 1:
            raise ConfigError(
                f"length takes target or limit, one of them, at least 1; got target={self.target}, limit={self.limit}"
            )

    def __call__(self, completion: str, completion_ids: Sized) -> float:
        """One sample."""
        if self.target is not None:
            return -min(1.0, abs(len(completion_ids) - self.target) / self.target)
        assert self.limit is not None
        return -min(1.0, max(0, len(completion_ids) - self.limit) / self.limit)


@dataclass(frozen=True)
class Repetition:
    """Minus the share of n-grams of words that have occurred before: 0 for none, towards −1 for a stuck record."""

    n: int = 3
    __name__ = "repetition"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"repetition:{self.n}: n-grams need n ≥ 1")

    def __call__(self, completion: str) -> float:
        """One sample."""
        words = completion.casefold().split()
        grams = list(zip(*(words[at:] for at in range(self.n)), strict=False))
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


@dataclass(frozen=True)
class SoftOverlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to limit − buffer tokens, then falling
    linearly to −1 at the limit."""

    limit: int
    buffer: int
    __name__ = "overlong"

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise ConfigError(f"overlong needs 0 < buffer ≤ limit, got {self.buffer} and {self.limit}")

    def __call__(self, completion: str, completion_ids: Sized) -> float:
        """One sample."""
        return -min(1.0, max(0, len(completion_ids) - (self.limit - self.buffer)) / self.buffer)


xml = Xml()
think = Think()


def regex(pattern: str) -> Regex:
    """The reward for completions in which a pattern is found."""
    return Regex(pattern)


def length(target: int | None = None, limit: int | None = None) -> Length:
    """The penalty for being off a length, or over one."""
    return Length(target, limit)


def repetition(n: int = 3) -> Repetition:
    """The penalty for saying things again."""
    return Repetition(n)


def soft_overlong(limit: int, buffer: int) -> SoftOverlong:
    """DAPO's penalty for coming near the length limit."""
    return SoftOverlong(limit, buffer)
