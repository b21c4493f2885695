"""How a reward function is called and its answer read: the conventions, and what happens in the worker.

    def correctness(completion, answer): ...       a sample at a time: a parameter `completion`
    def brevity(completions, **columns): ...       many: a parameter `completions`, lists of equal length, whole groups
    async def judge(completion, prompt): ...       either, awaited side by side

Parameters are filled by name: prompt(s), completion(s) (always text), completion_messages, completion_ids, every column
of the data, trainer_state, log_metric, log_extra. `reference`, `reference_answer`, `answer` and `solution` get the
row's answer, unless the data has a column of that very name. Loads neither PyTorch nor transformers, so that workers
start fast.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo.errors import ConfigError, line, nearest
from grpo.rollouts import LARGEST_REWARD
from grpo.run.signals import from_a_person

if TYPE_CHECKING:
    from grpo.language.samples import Sample

ANSWER = ("reference", "reference_answer", "answer", "solution")
"""Parameters that receive the row's answer."""
TOOLS = ("trainer_state", "log_metric", "log_extra")
ENVIRONMENTS = "environments"
"""The parameter that receives the environments of the conversations, as objects."""
SINGULAR = {"prompts": "prompt", "completions": "completion"}
PLURAL = {one: many for many, one in SINGULAR.items()}


class Messages:
    """A reward function that gets each completion as a list of messages, the way TRL passes chats."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __reduce__(self) -> Any:
        """By name where it was used as a decorator: the bare function can no longer be found under its own."""
        name = str(getattr(self, "__qualname__", ""))
        try:
            found = operator.attrgetter(name)(sys.modules[self.__module__])
        except (AttributeError, KeyError):
            found = None
        return name if found is self else (Messages, (self.function,))


def messages(function: Callable[..., Any]) -> Messages:
    """Adapt a function written for TRL's chats, which reads `completion[0]["content"]`; a decorator, too."""
    return Messages(function)


# --- the convention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A reward function and how it wants to be called, read once from its signature."""

    function: Callable[..., Any]
    name: str
    batched: bool
    asynchronous: bool
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    takes_rest: bool
    """It has **kwargs, which get whatever else there is."""
    wants_messages: bool
    """It gets each completion as messages, see `messages`."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Call:
        """Read the signature."""
        try:
            found = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise ConfigError(f"reward {name}: its parameters cannot be read; wrap it in a def") from None
        named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if fixed := [p.name for p in found if p.kind is p.POSITIONAL_ONLY]:
            raise ConfigError(f"reward {name}: parameter {fixed[0]!r} is positional-only, but all are passed by name")
        words = tuple(p.name for p in named)
        rest = any(p.kind is p.VAR_KEYWORD for p in found)
        free = (rest and "completion" not in words) or ENVIRONMENTS in words
        if ("completion" in words) == ("completions" in words) and not free:
            problem = "both completion and completions" if "completion" in words else "neither"
            raise ConfigError(
                f"reward {name}({', '.join(words)}): give it a parameter `completion` (a sample at a time) or "
                f"`completions` (many), it has {problem}; offered besides: prompt or prompts, "
                f"completion_messages, completion_ids, {', '.join(TOOLS)}, {', '.join(ANSWER)} and the data's columns"
            )
        return cls(
            function=function,
            name=name,
            batched="completion" not in words
            and not ("completions" not in words and "prompt" in words and ENVIRONMENTS not in words),
            asynchronous=_is_async(function),
            parameters=words,
            required=tuple(p.name for p in named if p.default is p.empty),
            takes_rest=rest,
            wants_messages=any(isinstance(layer, Messages) for layer in _layers(function)),
        )

    @property
    def asks_environments(self) -> bool:
        """Whether it looks at environments, which are in this process alone."""
        return ENVIRONMENTS in self.parameters

    @property
    def reads_answer(self) -> bool:
        """Whether it asks for the row's answer by name."""
        return any(word in ANSWER for word in self.parameters)

    def check(self, columns: Iterable[str]) -> None:
        """Refuse a function that needs what the data does not have."""
        columns = list(columns)
        offered = self._offered(columns)
        if missing := [word for word in self.required if word not in offered]:
            remedy = " (set answer_column)" if missing[0] in ANSWER else nearest(missing[0], offered)
            raise ConfigError(
                f"reward {self.name} needs {missing[0]!r}, which nothing provides; the data has the columns "
                f"{', '.join(columns) or '(none)'}{remedy}"
            )

    def _offered(self, columns: Sequence[str]) -> list[str]:
        own = ["prompt", "completion", "completion_messages", "completion_ids"]
        own = [PLURAL.get(word, word) for word in own] if self.batched else own
        answer = [word for word in ANSWER if "answer" in columns and word not in columns]
        judging = [ENVIRONMENTS] if ENVIRONMENTS in self.parameters else []
        return list(dict.fromkeys([*own, *TOOLS, *judging, *columns, *answer]))

    def tasks(self, samples: Sequence[Sample], columns: Sequence[str], state: Mapping[str, Any]) -> list[Task]:
        """The calls that judge these samples: one for all, or one each; asynchronous ones travel together."""
        real = {*self._offered(columns)} - ({*ANSWER} - {*columns})
        words = [w for w in self._offered(columns) if w in self.parameters or (self.takes_rest and w in real)]
        lists = {
            word: [self._value(SINGULAR.get(word, word) if self.batched else word, s, columns) for s in samples]
            for word in words
            if word not in TOOLS
        }
        tools = {word: SimpleNamespace(**state) if word == "trainer_state" else None for word in words if word in TOOLS}
        rows = range(len(samples))
        if self.batched:
            return [Task(tuple(rows), ({**lists, **tools},))]
        calls = [{word: values[row] for word, values in lists.items()} | tools for row in rows]
        if self.asynchronous:
            return [Task(tuple(rows), tuple(calls))]
        return [Task((row,), (call,)) for row, call in zip(rows, calls, strict=True)]

    def _value(self, word: str, sample: Sample, columns: Sequence[str]) -> Any:
        if word == "prompt":
            return sample.prompt.shown
        if word == "completion_messages" or (word == "completion" and self.wants_messages):
            return list(sample.messages) or [{"role": "assistant", "content": sample.text}]
        if word == "completion":
            return sample.text
        if word == "completion_ids":
            return sample.ids.tolist()
        if word == ENVIRONMENTS:
            return sample.environment
        return sample.prompt.columns.get(word if word in columns else "answer")


def _layers(function: Any) -> list[Any]:
    """The function and what it wraps."""
    found = [function]
    while (inner := getattr(found[-1], "__wrapped__", None)) is not None:
        found.append(inner)
    return found


def _is_async(function: Any) -> bool:
    inner = _layers(function)[-1]
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


@dataclass(frozen=True)
class Task:
    """One trip to a worker."""

    rows: tuple[int, ...]
    """The samples it is about."""
    calls: tuple[dict[str, Any], ...]
    """Arguments: of the one call, or of several that are awaited together."""


# --- the answer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What one function says of one sample."""

    value: float | None = None
    """None: it does not apply, or failed."""
    error: str | None = None
    trace: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Where it gave several: their values."""


@dataclass(frozen=True)
class Reply:
    """What comes back from a task: a verdict a sample, and what the function logged."""

    verdicts: tuple[Verdict, ...]
    metrics: tuple[tuple[str, float], ...] = ()
    extras: tuple[tuple[str, int, Any], ...] = ()
    """(column, row, value)."""


class Wrong(Exception):
    """An answer that is no reward."""


class Desk:
    """Runs tasks for several functions: what a worker process does."""

    def __init__(self, calls: Sequence[Call], timeout: float) -> None:
        self._calls, self._timeout = tuple(calls), timeout

    def __call__(self, item: tuple[int, Task]) -> Reply:
        which, task = item
        return answer(self._calls[which], task, self._timeout)


def answer(call: Call, task: Task, timeout: float) -> Reply:
    """Make the task's calls; whatever they do becomes verdicts."""
    about = [task.rows] if call.batched else [(row,) for row in task.rows]
    notes = [_Notes(rows, call.batched) for rows in about]
    calls = [note.added_to(named) for note, named in zip(notes, task.calls, strict=True)]
    size = len(task.rows) if call.batched else 1
    if call.asynchronous:
        import asyncio  # here and below: loading it takes as long as all else that a worker needs

        found = asyncio.run(_gather(call, calls, size, timeout))
    else:
        found = [_call(call, named, size) for named in calls]
    return Reply(
        tuple(verdict for verdicts in found for verdict in verdicts),
        tuple(metric for note in notes for metric in note.metrics),
        tuple(extra for note in notes for extra in note.extras),
    )


def _call(call: Call, named: Mapping[str, Any], size: int) -> list[Verdict]:
    try:
        return _read(call, call.function(**named), size)
    except BaseException as error:  # also sys.exit: a reward has no say in when training ends
        if from_a_person(error):  # while running inline
            raise
        return [_failed(error)] * size


async def _gather(call: Call, calls: Sequence[Mapping[str, Any]], size: int, timeout: float) -> list[list[Verdict]]:
    import asyncio

    async def kept(named: Mapping[str, Any]) -> list[Verdict]:
        try:
            return _read(call, await call.function(**named), size)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the loop, and with it the other samples
            if from_a_person(error):
                raise
            return [_failed(error)] * size

    async def timed(named: Mapping[str, Any]) -> list[Verdict]:
        try:
            return await asyncio.wait_for(kept(named), timeout)
        except TimeoutError:
            return [Verdict(error=f"no answer in {timeout:g} s, cancelled")] * size
        except asyncio.CancelledError as error:  # raised by the function itself
            return [_failed(error)] * size

    return list(await asyncio.gather(*(timed(named) for named in calls)))


def _read(call: Call, value: Any, size: int) -> list[Verdict]:
    """A verdict a sample from what a call gave."""
    if not call.batched:
        return [_verdict(value)]
    if value is None or isinstance(value, (str, bytes, Mapping, set, numbers.Number)) or not hasattr(value, "__iter__"):
        raise Wrong(f"gave {_shown(value)} for {size} completions; return a list with a reward for each")
    given = len(value) if hasattr(value, "__len__") else None
    items = list(islice(value.tolist() if hasattr(value, "tolist") else value, size + 1))  # a generator may be endless
    if len(items) != size:
        count = given or (f"more than {size}" if len(items) > size else len(items))
        raise Wrong(f"gave {count} rewards for {size} completions; return one for each, None where it has no opinion")
    return [_verdict(item) for item in items]


def _verdict(value: Any) -> Verdict:
    try:
        if not isinstance(value, Mapping):
            return Verdict(_number(value))
        parts = {str(name): number for name, part in value.items() if (number := _number(part)) is not None}
        return Verdict(_fit(math.fsum(parts.values())) if parts else None, parts=parts)
    except Wrong as error:
        return _failed(error)


def _number(value: Any) -> float | None:
    """A float that rewards can be compared in, or None = no opinion."""
    if isinstance(value, BaseException):  # in place of one reward of a batch
        raise Wrong(line(value))
    if value is None:
        return None
    if hasattr(value, "item"):  # arrays and tensors of any library
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            raise Wrong(f"gave {_shown(value)}, which is not one number") from None
    if not isinstance(value, numbers.Real):
        raise Wrong(f"gave {_shown(value)}, which is not a number")
    try:
        return _fit(float(value))
    except OverflowError:  # a whole number of hundreds of digits
        raise Wrong("gave a number too large for a float; scale it") from None


def _fit(number: float) -> float:
    """The same number, which can be compared with others."""
    if not math.isfinite(number):
        raise Wrong(f"gave {number}; return None where it has no opinion")
    if abs(number) > LARGEST_REWARD:
        raise Wrong(f"gave {number:g}, which float32 cannot hold; scale it")
    return number


def _shown(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})" if isinstance(value, (str, bytes)) else type(value).__name__


def _failed(error: BaseException) -> Verdict:
    """One line with the place in the user's code, and the traceback without ours."""
    if isinstance(error, Wrong):
        return Verdict(error=str(error))
    below = error.__traceback__.tb_next if error.__traceback__ else None
    frames = traceback.extract_tb(below)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return Verdict(error=line(error) + place, trace="".join(traceback.format_exception(type(error), error, below)))


class _Notes:
    """What log_metric and log_extra write into, on the function's side of the pipe."""

    def __init__(self, rows: Sequence[int], batched: bool) -> None:
        self._rows, self._batched = rows, batched
        self.metrics: list[tuple[str, float]] = []
        self.extras: list[tuple[str, int, Any]] = []

    def added_to(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with the two functions where they are wanted."""
        ours = {"log_metric": self._metric, "log_extra": self._extra}
        return {word: ours.get(word, value) for word, value in named.items()}

    def _metric(self, name: str, value: float) -> None:
        if math.isfinite(number := float(value)):  # a mean over nothing says nothing
            self.metrics.append((str(name), number))

    def _extra(self, column: str, values: Any) -> None:
        """Of a batch a value each, of a single sample its value."""
        listed = list(values) if self._batched else [values]
        if len(listed) != len(self._rows):
            raise ValueError(f"log_extra({column!r}) got {len(listed)} values for {len(self._rows)} completions")
        self.extras += [(str(column), row, _plain(value)) for row, value in zip(self._rows, listed, strict=True)]


def _plain(value: Any) -> Any:
    """What JSON can hold, so that nothing of the user's has to be made again on the other side."""
    return value if value is None or type(value) in (str, int, float, bool) else str(value)
