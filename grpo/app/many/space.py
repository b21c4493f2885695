"""What a search goes over: `learning_rate=1e-4..1e-2`, `group_size=8,16,32`.

A range whose ends are a factor of ten or more apart is gone through by powers, `0.9..0.99` evenly; a setting that is
a whole number stays one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.config import ConfigError
from grpo.errors import install

WIDE = 10.0
"""Ends of a range this many times apart are gone through by powers."""
EXAMPLE = "--over learning_rate=1e-4..1e-2 group_size=8,16,32"


@dataclass(frozen=True)
class Range:
    """From one number to another."""

    low: float
    high: float
    whole: bool

    @property
    def by_powers(self) -> bool:
        """Whether small values are as likely as large ones."""
        return self.low > 0 and self.high / self.low >= WIDE

    def ends(self) -> list[str]:
        """The words that must be possible."""
        return [self.word(self.low), self.word(self.high)]

    def word(self, value: float) -> str:
        """A value as a command line says it; four digits of it are enough to try."""
        return str(round(value)) if self.whole else f"{value:.4g}"


@dataclass(frozen=True)
class Choice:
    """One of these words."""

    words: tuple[str, ...]

    def ends(self) -> list[str]:
        """The words that must be possible."""
        return list(self.words)


Space = Mapping[str, Range | Choice]


def space_of(items: Sequence[str], expect: Callable[[str, str], Any]) -> dict[str, Range | Choice]:
    """What was asked for, every end of it tried; `expect(key, word)`: the setting's value, or an error."""
    found: dict[str, Range | Choice] = {}
    for item in items:
        key, (_, equals, words) = first_word(item)[0], item.partition("=")
        if not equals or not key or not words:
            raise ConfigError(f"--over {item}: expected SETTING=LOW..HIGH or SETTING=A,B,C, e.g. {EXAMPLE}")
        if key in found:
            raise ConfigError(f"--over {key} is given twice; put its values into one list")
        if key.rpartition(".")[2] in ("seed", "logdir"):
            raise ConfigError(f"--over {key}: each run has its own; for several seeds a trial give --seeds")
        low, dots, high = words.partition("..")
        values = [expect(key, word) for word in ((low, high) if dots else words.split(","))]
        found[key] = _range(item, low, high, values) if dots else Choice(tuple(words.split(",")))
    return found


def first_word(item: str) -> tuple[str, str]:
    """The setting of an item, in one spelling, and the first of its values."""
    key, _, words = item.partition("=")
    return key.removeprefix("--").replace("-", "_"), words.partition("..")[0].partition(",")[0]


def grid(space: Space) -> list[dict[str, str]]:
    """Every combination; a range has too many."""
    for key, one in space.items():
        if isinstance(one, Range):
            raise ConfigError(f"--over {key} is a range: say how many trials to make of it with --trials, e.g. 40")
    lists = [one.ends() for one in space.values()]
    return [dict(zip(space, words, strict=True)) for words in itertools.product(*lists)]


class Study:
    """Optuna's: asks for settings that promise the most after what was told. Trials that were made go in first."""

    def __init__(self, space: Space, seed: int) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            raise ConfigError(
                f"--trials lets Optuna choose what to try: {install('sweep')}; lists alone, without --trials, "
                "are gone through one by one and need nothing"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space, self._optuna = space, optuna
        self._asked: dict[int, Any] = {}
        self._study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        )

    def ask(self, number: int) -> dict[str, str]:
        """Settings for the trial of this number, as words."""
        trial = self._study.ask(self._distributions())
        self._asked[number] = trial
        return {key: self._word(key, value) for key, value in trial.params.items()}

    def tell(self, number: int, words: Mapping[str, str], score: float | None) -> None:
        """What became of it; one that was asked for in an earlier process is known by its words."""
        states = self._optuna.trial.TrialState
        state = states.FAIL if score is None else states.COMPLETE
        if number in self._asked:
            self._study.tell(self._asked.pop(number), score, state=state)
            return
        params = {key: self._value(key, word) for key, word in words.items()}
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=params, distributions=self._distributions(), value=score, state=state
            )
        )

    def _distributions(self) -> dict[str, Any]:
        made, kinds = {}, self._optuna.distributions
        for key, one in self._space.items():
            if isinstance(one, Choice):
                made[key] = kinds.CategoricalDistribution(one.words)
            elif one.whole:
                made[key] = kinds.IntDistribution(round(one.low), round(one.high), log=one.by_powers)
            else:
                made[key] = kinds.FloatDistribution(one.low, one.high, log=one.by_powers)
        return made

    def _word(self, key: str, value: Any) -> str:
        one = self._space[key]
        return str(value) if isinstance(one, Choice) else one.word(value)

    def _value(self, key: str, word: str) -> Any:
        one = self._space[key]
        if isinstance(one, Choice):
            return word
        return round(float(word)) if one.whole else min(max(float(word), one.low), one.high)


def _range(item: str, low: str, high: str, values: Sequence[Any]) -> Range:
    try:
        ends = float(low), float(high)
    except ValueError:
        raise ConfigError(f"--over {item}: the ends of a range are numbers; others are a list: a,b,c") from None
    if not ends[0] < ends[1] < float("inf"):
        raise ConfigError(f"--over {item}: a range goes from the lower to the higher number")
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        raise ConfigError(f"--over {item}: this setting is no number; give a list: a,b,c")
    whole = all(isinstance(value, int) for value in values)
    return Range(*ends, whole)


def told(words: Mapping[str, str]) -> str:
    """Settings for people."""
    return " ".join(f"{key}={word}" for key, word in words.items())


def flags(words: Mapping[str, str]) -> Iterator[str]:
    """Settings as a command line has them; one word each, so that a minus is no flag."""
    return (f"--{key}={word}" for key, word in words.items())
