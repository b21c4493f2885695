"""Several courses of conversations at once, one engine: while some wait for answers, others are sampled."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeAlias

from grpo.language.engines import Engine, Sampling
from grpo.language.turns.hosts import Reply

LOOK = 1.0
"""Seconds after which it is looked whether there is still somebody to wait for."""
HELD_UP = "no answer in time: it, or another one, has held up the event loop; await what takes long"


class Keeper(Protocol):
    """Who gives answers later."""

    patience: float
    """Seconds after which nothing more is to be expected."""

    def give_up(self) -> None:
        """Somebody holds up all others: go on without."""
        ...


@dataclass(frozen=True)
class Draw:
    """What a course wants sampled: `count` completions of each prompt."""

    prompts: Sequence[Sequence[int]]
    count: int
    sampling: Sampling
    seeds: Sequence[int]


Course: TypeAlias = Generator[Any, Any, Any]
"""Yields a `Draw` and is sent the completions, or a list of futures and is sent their results."""


@dataclass(eq=False)
class _Waiting:
    """A course that waits for answers."""

    course: Course
    answers: Sequence[Future[Any]]
    since: float = field(default_factory=time.monotonic)

    def results(self) -> list[Any]:
        """What came; a problem in place of what did not."""
        found = []
        for answer in self.answers:
            late = not answer.done() or answer.cancelled()
            found.append(Reply(problem=HELD_UP) if late else answer.result())
        return found


def drive(engine: Engine, courses: Sequence[Course], apart: bool, keeper: Keeper | None) -> Iterator[None]:
    """Play all of them to their end; yields whenever one has gone on.

    apart: what a course draws is drawn by itself, so that it does not depend on when others are ready.
    """
    ready: deque[tuple[Course, Any]] = deque((course, None) for course in courses)
    draws: deque[tuple[Course, Draw]] = deque()
    answered: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
    waiting: set[_Waiting] = set()
    while ready or draws or waiting:
        while ready:
            course, value = ready.popleft()
            try:
                wanted = course.send(value)
            except StopIteration:
                yield
                continue
            if isinstance(wanted, Draw):
                draws.append((course, wanted))
            else:
                waiting.add(_await(course, wanted, answered))
        for one in _answered(answered, waiting, block=not draws, keeper=keeper):
            waiting.discard(one)
            ready.append((one.course, one.results()))
        if draws and (apart or not ready):  # what is ready may want to be drawn, too
            some = [draws.popleft()] if apart else [draws.popleft() for _ in range(len(draws))]
            with engine.conversing(courses.index(some[0][0]), len(courses)) if apart else nullcontext():
                ready += _drawn(engine, some)


def _await(course: Course, answers: Sequence[Future[Any]], answered: queue.SimpleQueue[_Waiting]) -> _Waiting:
    """Told to the queue once all are there."""
    one = _Waiting(course, answers)
    if not answers:
        answered.put(one)

    def count(_: object) -> None:
        if all(answer.done() for answer in answers):
            answered.put(one)

    for answer in answers:
        answer.add_done_callback(count)
    return one


def _answered(
    answered: queue.SimpleQueue[_Waiting], waiting: set[_Waiting], block: bool, keeper: Keeper | None
) -> list[_Waiting]:
    """Those that go on; where there is nothing else to do, wait for one, but not for ever."""
    found: dict[_Waiting, None] = {}
    while waiting:
        try:
            one = answered.get(block and not found, LOOK)
            if one in waiting:
                found[one] = None
        except queue.Empty:
            if found or not block:
                break
            if keeper is not None and any(time.monotonic() - one.since > keeper.patience for one in waiting):
                keeper.give_up()
                return list(waiting)
    return list(found)


def _drawn(engine: Engine, wanted: Sequence[tuple[Course, Draw]]) -> list[tuple[Course, Any]]:
    """One call of the engine, and everybody's part of it."""
    if len(wanted) == 1:
        ((course, draw),) = wanted
        return [(course, engine.generate(draw.prompts, draw.count, draw.sampling, draw.seeds))]
    prompts = [prompt for _, draw in wanted for prompt in draw.prompts for _ in range(draw.count)]
    most = max((draw.sampling for _, draw in wanted), key=lambda sampling: sampling.max_new_tokens)
    seeds = [seed for _, draw in wanted for seed in draw.seeds]
    made = iter(engine.generate(prompts, 1, most, seeds))
    return [(course, list(islice(made, len(draw.seeds)))) for course, draw in wanted]
