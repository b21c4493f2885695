"""How well held-out prompts are answered: accuracy, pass@k and each reward's mean, with confidence intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo.agreement import attempted
from grpo.config import ConfigError
from grpo.language.data.prompts import Prompts
from grpo.language.engines import Sampling
from grpo.language.rewards import MOST_WORKERS
from grpo.language.rewards.maths import agrees, extract
from grpo.language.samples import Prompt, Sample, rewards_of
from grpo.language.travel import pack, unpack
from grpo.processors import processors
from grpo.protocols import Slots, State
from grpo.statistics import bootstrap, wilson
from grpo.workers import Pool

if TYPE_CHECKING:
    from grpo.language.source import LanguageSource

EVALUATION = 1
"""The stream of randomness; training has another."""
WORTH = 8
"""Comparisons that are worth the start of one more process."""


@dataclass(frozen=True)
class Evaluation(Mapping[str, float]):
    """P held-out prompts with S samples each; as a mapping, what TRL's `evaluate` returns of them."""

    right_PS: np.ndarray
    """Whether each answer is right; NaN: nobody can tell."""
    rewards: dict[str, np.ndarray]
    """By function, (P, S); NaN: no opinion."""
    length_PS: np.ndarray
    failed: int = 0
    why: str = ""
    samples: tuple[Sample, ...] = ()
    seconds: float = 0.0
    named: Mapping[str, Evaluation] = field(default_factory=dict)
    """Of several sets of held-out rows, each by its name; the arrays are then empty."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """In TRL's words: eval_reward, eval_rewards/NAME/mean, eval_loss, …"""

    def __getitem__(self, name: str) -> float:
        return self.logs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.logs)

    def __len__(self) -> int:
        return len(self.logs)

    def quantities(self) -> dict[str, np.ndarray]:
        """One value a prompt of everything that is told, by name."""
        found: dict[str, np.ndarray] = {}
        if not np.isnan(self.right_PS).all():
            found["accuracy"] = _mean(self.right_PS)
            for k in _powers(self.right_PS.shape[1]):
                found[f"pass@{k}"] = pass_at(self.right_PS, k)
        found |= {f"rewards/{name}": _mean(value_PS) for name, value_PS in self.rewards.items()}
        return found | {"length": self.length_PS.mean(1)}

    def metrics(self) -> dict[str, float | None]:
        """Means, for a run's metrics."""
        if self.named:
            each = {name: made.metrics() for name, made in self.named.items()}
            return {f"{name}/{key}": value for name, some in each.items() for key, value in some.items()}
        found: dict[str, float | None] = {
            name: float(np.nanmean(v)) for name, v in self.quantities().items() if not np.isnan(v).all()
        }
        return found | ({"failed": float(self.failed)} if self.failed else {})

    def table(self) -> list[dict[str, Any]]:
        """A row a quantity: mean, 95 % interval of the mean over prompts, spread, extremes."""
        if self.named:
            return [
                row | {"quantity": f"{name}/{row['quantity']}"}
                for name, made in self.named.items()
                for row in made.table()
            ]
        rows = []
        for name, value_P in self.quantities().items():
            known = value_P[~np.isnan(value_P)]
            if len(known):
                share = is_share(known) and name != "length"  # answers of one token each are no proportion
                low, high = wilson(known) if share else bootstrap(known)
                told = {"mean": known.mean(), "low": low, "high": high, "std": known.std()}
                told |= {"min": known.min(), "max": known.max()}
                by = "wilson" if share else "bootstrap"
                rows.append({"quantity": name, **{key: float(value) for key, value in told.items()}, "interval": by})
        return rows


def evaluate(source: LanguageSource, prompts: Prompts, samples: int, limit: int | None) -> Evaluation:
    """The policy's answers to the first `limit` prompts, judged. One sample: the likeliest tokens."""
    began = time.perf_counter()
    chosen = prompts.first(limit)
    sampling = replace(source.config.sampling, temperature=0.0) if samples == 1 else source.config.sampling
    made, right_N = answered(source, chosen, samples, sampling)
    shape = (len(chosen), samples)
    given_NK = rewards_of(made, source.rewards.names)
    rewards = {name: given_NK[:, k].reshape(shape) for k, name in enumerate(source.rewards.names)}
    own = [np.nan if sample.reward is None else sample.reward for sample in made]
    rewards |= {"environment": np.array(own).reshape(shape)} if not np.isnan(own).all() else {}
    failed = [sample.error for sample in made if sample.error is not None]
    return Evaluation(
        right_PS=right_N.reshape(shape),
        rewards=rewards,
        length_PS=np.array([sample.length for sample in made], dtype=float).reshape(shape),
        failed=len(failed),
        why=failed[0] if failed else "",
        samples=tuple(made),
        seconds=time.perf_counter() - began,
    )


def of_several(named: Mapping[str, Evaluation]) -> Evaluation:
    """The evaluations of several sets of rows as one."""
    none = np.zeros((0, 1))
    failed, why = sum(one.failed for one in named.values()), next((one.why for one in named.values() if one.why), "")
    return Evaluation(none, {}, none, failed, why, seconds=sum(one.seconds for one in named.values()), named=named)


def answered(
    source: LanguageSource, prompts: Sequence[Prompt], count: int, sampling: Sampling
) -> tuple[list[Sample], np.ndarray]:
    """Judged samples of all prompts and whether each is right, every rank's share found by it."""
    ranks, config = source.ranks, source.config
    known = all(prompt.columns.get("answer") is not None for prompt in prompts)
    made: list[Sample] = []

    def mine() -> State:
        own = Slots(ranks.rank, ranks.size).of(len(prompts))
        if own:
            made.extend(
                source.judged(prompts, count, sampling, EVALUATION, (0, 0), own=own)[0]
            )  # at every step the same draws
        by, timeout, grader = config.eval_by, config.reward_timeout, source.rewards.grader
        found = right(made, by, timeout, known, grader) if made else np.zeros(0)
        packed = pack(made) if ranks.size > 1 else State({}, {})
        return State(packed.values, {**packed.arrays, "right": found})

    told = attempted(ranks, "evaluating", mine)
    right_N = np.concatenate([np.asarray(some.arrays["right"]) for some in told])
    if ranks.size == 1:
        return made, right_N
    return unpack(told, prompts, count), right_N


def right(
    samples: list[Sample], by: str | None, timeout: float, known: bool | None = None, grader: str | None = None
) -> np.ndarray:
    """1 for a right answer, 0 for a wrong one, NaN where nobody can tell.

    by: the reward whose positive value means right; None: the lenient comparison of the last answer in the text with
    the row's own, so that a gain in format does not count; where rows have no answer, all go by their first reward.
    known: whether every row has one, where these are a part of the rows. grader: a reward that has made that very
    comparison already; where it failed, it is made here.
    """
    first = next(iter(samples[0].rewards), None)
    if by is not None and by not in samples[0].rewards:
        raise ConfigError(f"eval_by={by} is none of the rewards: {', '.join(samples[0].rewards)}")
    if known is None:
        known = all(sample.prompt.columns.get("answer") is not None for sample in samples)
    by = first if by is None and not known else by
    if by is not None:
        given = [sample.rewards[by] for sample in samples]
        return np.array([np.nan if value is None else float(value > 0) for value in given])
    pairs = [(sample.text, str(sample.prompt.columns["answer"])) for sample in samples]
    found = np.full(len(pairs), np.nan)
    hard = []
    for row, pair in enumerate(pairs):
        if grader is not None and (value := samples[row].rewards[grader]) is not None:  # None: it failed
            found[row] = float(value > 0)
        elif simple(pair):
            found[row] = agrees(pair)
        else:
            hard.append(row)
    if hard:  # algebra may hang: elsewhere, with a time limit
        workers = min(-(-len(hard) // WORTH), processors(), MOST_WORKERS)
        with Pool(agrees, workers=workers, timeout=timeout) as pool:
            for row, outcome in zip(hard, pool.map([pairs[row] for row in hard]), strict=True):
                found[row] = float(outcome.value) if outcome.ok else 0.0
    return found


def simple(pair: tuple[str, str]) -> bool:
    """Whether both sides are plain numbers or words, which are compared without algebra."""
    answer = extract(pair[0]) or ""
    return not any(mark in answer + pair[1] for mark in "\\^{}()*") and len(answer) < 100


def pass_at(right_PS: np.ndarray, k: int) -> np.ndarray:
    """Chance that at least one of k answers, drawn from the S there are, is right: 1 − C(S−c, k) / C(S, k)."""
    count = right_PS.shape[1]
    total = math.comb(count, k)
    return np.array([1 - math.comb(count - int(c), k) / total for c in np.nansum(right_PS, axis=1)])


def is_share(value_P: np.ndarray) -> bool:
    """Whether these are yes and no."""
    return bool(np.isin(value_P, (0.0, 1.0)).all())


def _mean(value_PS: np.ndarray) -> np.ndarray:
    """Over samples, of those with an opinion; NaN where none has one."""
    known = ~np.isnan(value_PS)
    total = np.where(known, value_PS, 0.0).sum(1)
    return np.where(known.any(1), total / np.maximum(known.sum(1), 1), np.nan)


def _powers(count: int) -> list[int]:
    """2, 4, 8, … up to the number of samples, and that number."""
    found = [2**n for n in range(1, count.bit_length()) if 2**n < count]
    return [*found, count] if count > 1 else []
