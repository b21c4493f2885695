"""Where environments live that take their time: all conversations are asked at once, and answer when they can.

    Here    `async def` environments, on an event loop of their own in this process
    Actors  any environment, in actors of a Ray cluster (`workers=ray`)

A question carries the whole of what was said, so that an environment which is gone (its actor died, its machine went
away) is made again elsewhere and played up to the same point: no conversation is lost. What it says while it is played
again is compared with what it said before. Every answer has a time limit, and whatever goes wrong is data.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import hashlib
import inspect
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

from grpo.capabilities import Closes
from grpo.cluster import Died, Handle, Home, awaited, begun, counted, hire, join, leave, sendable
from grpo.errors import ConfigError, line
from grpo.language.turns.loops import GRACE, Loop, asynchronous
from grpo.workers import CannotStart

AT_ONCE = 10_000
"""Conversations of one actor, at most."""
STARTING = 32
"""Actors whose start is waited for at a time."""


@dataclass(frozen=True)
class Question:
    """What an environment is asked: to begin with a row, or to hear what was said."""

    key: int
    """The conversation's."""
    row: Mapping[str, Any]
    said: tuple[str, ...] = ()
    """By the model, so far; the last has not been heard yet."""
    heard: tuple[str, ...] = ()
    """Digests of what the environment answered before: to beginning, and to all but the last."""


@dataclass(frozen=True)
class Reply:
    """What an environment gave, as it gave it, or what went wrong."""

    value: Any = None
    problem: str | None = None
    stuck: bool = False
    """It is still at it, and nobody else gets a turn."""


class Host(Protocol):
    """Has the environments of conversations."""

    patience: float
    """Seconds after which no answer is to be expected any more."""

    def ask(self, question: Question) -> Future[Reply]:
        """The answer, later."""
        ...

    def end(self, keys: Sequence[int]) -> dict[int, str]:
        """Close these environments; what went wrong with it, by key."""
        ...

    def give_up(self) -> None:
        """Somebody holds up all others: go on without."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def digest(value: Any) -> str:
    """Of an answer, to compare another one with."""
    return hashlib.blake2b(repr(value).encode(errors="replace"), digest_size=12).hexdigest()


class Room:
    """Environments by conversation, made when they are first asked. Runs on an event loop."""

    def __init__(self, make: Callable[[], Any], timeout: float, threaded: bool = False) -> None:
        """threaded: plain methods run in a thread of their own, one after the other, so that the loop goes on."""
        self._make, self._timeout = make, timeout
        self._thread = ThreadPoolExecutor(1, "environments") if threaded else None
        self._turn = asyncio.Lock()
        self._there: dict[int, tuple[Any, int]] = {}
        """By key: an environment, and how many answers of the model it has heard."""

    async def answer(self, question: Question) -> Reply:
        """What the environment says, after it was brought to where it should be."""
        try:
            return Reply(await self._answer(question))
        except _TooSlow as error:
            return Reply(problem=str(error), stuck=error.stuck)
        except BaseException as error:  # also sys.exit: an environment has no say in when training ends
            return Reply(problem=line(error))

    async def _answer(self, question: Question) -> Any:
        environment, known = self._there.get(question.key, (None, -1))
        if known < 0:
            environment = await self._called(self._make)
        value: Any = None
        for at in range(known + 1, len(question.said) + 1):
            self._there.pop(question.key, None)  # until it has answered, nobody knows where it is
            if at == 0:
                value = await self._called(environment.reset, dict(question.row))
            else:
                value = await self._called(environment.step, question.said[at - 1])
            if at < len(question.heard) and digest(value) != question.heard[at]:
                raise _OtherwiseError("its host was lost; played again, it answered otherwise, so it cannot go on")
            self._there[question.key] = environment, at
        return value

    async def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """One call with its time limit, awaited if need be."""
        plain = self._thread is not None and not asynchronous(function)
        try:
            if plain:
                async with self._turn:  # who waits for others is not slow
                    loop = asyncio.get_running_loop()
                    given = loop.run_in_executor(self._thread, partial(function, *arguments))
                    return await asyncio.wait_for(given, self._timeout)
            given = function(*arguments)
            return await asyncio.wait_for(given, self._timeout) if inspect.isawaitable(given) else given
        except TimeoutError:
            raise _TooSlow(f"no answer in {self._timeout:g} s", plain) from None

    async def end(self, keys: Sequence[int]) -> dict[int, str]:
        """Close these; what went wrong with it."""
        problems = {}
        for key in keys:
            environment, _ = self._there.pop(key, (None, 0))
            if isinstance(environment, Closes):
                try:
                    await self._called(environment.close)
                except BaseException as error:  # anyone's code
                    problems[key] = line(error)
        return problems


class _TooSlow(Exception):
    def __init__(self, text: str, stuck: bool) -> None:
        super().__init__(text)
        self.stuck = stuck


class _OtherwiseError(Exception):
    """An environment does not repeat itself."""


class Here(Host):
    """`async def` environments in this process."""

    def __init__(self, make: Callable[[], Any], timeout: float) -> None:
        self._make, self.timeout, self.patience = make, timeout, 2 * timeout + GRACE  # it is made, and begins
        self._loop, self._room = Loop("environments"), Room(make, timeout)

    def ask(self, question: Question) -> Future[Reply]:
        """The answer, later."""
        return self._loop.begin(self._room.answer(question))

    def end(self, keys: Sequence[int]) -> dict[int, str]:
        """Close these environments."""
        try:
            found: dict[int, str] = self._loop.begin(self._room.end(keys)).result(self.timeout + GRACE)
            return found
        except TimeoutError:
            self.give_up()
            return {}

    def give_up(self) -> None:
        """One of them holds the loop: all that are on it have lost their environments."""
        self._loop.renew()
        self._room = Room(self._make, self.timeout)

    def close(self) -> None:
        """Let go of the thread."""
        self._loop.close()


class _Host:
    """The actor."""

    def __init__(self, home: Home, make: Callable[[], Any], timeout: float, grace: float) -> None:
        home.enter()
        self._made, self._limit = (make, timeout), timeout + grace
        self._room: Room | None = None

    async def ready(self) -> None:
        """It is there."""

    async def answer(self, question: Question) -> Reply:
        """Of one of its environments."""
        if self._room is None:
            self._room = Room(*self._made, threaded=True)
            self._pulse = asyncio.create_task(self._beat())
        return await self._room.answer(question)

    async def _beat(self) -> NoReturn:
        """End the process once an `async def` has held the loop for too long: nobody could say so, or be heard."""
        nowhere = open(os.devnull, "w")  # noqa: SIM115  # open for as long as the process
        while True:
            faulthandler.dump_traceback_later(self._limit, exit=True, file=nowhere)
            await asyncio.sleep(self._limit / 8)

    async def end(self, keys: Sequence[int]) -> dict[int, str]:
        """Close these."""
        return {} if self._room is None else await self._room.end(keys)


class Actors(Host):
    """Environments in the actors of a Ray cluster, conversation i in actor i mod their number.

    An actor that dies is replaced, and its conversations are asked again: all together, and those that see it die a
    second time one by one, each in an actor of its own. One that takes that down, too, has failed.
    """

    def __init__(self, make: Callable[[], Any], where: str, timeout: float) -> None:
        self.timeout, self.patience, self._made = timeout, math.inf, (make, timeout, GRACE)
        self._ray = join()
        self._lock, self._deaths = threading.RLock(), Counter[int]()
        self._nurse, self._alone = ThreadPoolExecutor(1, "environments"), ThreadPoolExecutor(1, "environments")
        self._starting = ThreadPoolExecutor(STARTING, "environments")
        self._closed = False
        self._broken = ""
        """Why the cluster has no room for an actor in place of one that died."""
        try:
            sendable(self._ray, make, "the environment")
            self._count = counted(where)
            self._actors = [self._hired() for _ in range(self._count)]
            for actor in self._actors:  # one that has no room would be waited for without end
                begun(self._ray, actor)
        except CannotStart as error:
            for actor in vars(self).get("_actors", ()):
                self._ray.kill(actor)
            leave()
            raise ConfigError(f"workers={where}: {error}") from error

    def _hired(self) -> Handle:
        return hire(self._ray, _Host, self._count, *self._made, at_once=AT_ONCE)

    def ask(self, question: Question) -> Future[Reply]:
        """The answer, later; RuntimeError where there is nobody left to give one."""
        if self._broken:
            raise RuntimeError(f"an actor of the environments died, and no other can be started: {self._broken}")
        reply: Future[Reply] = Future()
        try:
            self._send(question, reply)
        except Exception as error:  # what a row holds may not be sendable
            reply.set_result(Reply(problem=f"its question cannot be sent ({line(error)})"))
        return reply

    def _send(self, question: Question, reply: Future[Reply]) -> None:
        with self._lock:
            actor = self._actors[question.key % self._count]
        asked = actor.answer.remote(question).future()
        asked.add_done_callback(partial(self._heard, question, reply, actor))

    def _heard(self, question: Question, reply: Future[Reply], actor: Handle, asked: Future[Reply]) -> None:
        """In a thread of Ray's, which must not be kept: what takes longer is left to others."""
        error = asked.exception()
        if error is None and not asked.result().stuck:
            reply.set_result(asked.result())
        elif not self._closed:
            self._nurse.submit(self._looked_after, question, reply, actor, asked)

    def _looked_after(self, question: Question, reply: Future[Reply], actor: Handle, asked: Future[Reply]) -> None:
        """Ask again where that may help; whatever happens, there is a reply."""
        try:
            self._look_after(question, reply, actor, asked)
        except Exception as error:  # of Ray's, which may be on its way out
            reply.set_result(Reply(problem=line(error)))

    def _look_after(self, question: Question, reply: Future[Reply], actor: Handle, asked: Future[Reply]) -> None:
        error = asked.exception()
        if error is None:  # stuck: the others of its actor are played again
            self._renew(question.key % self._count, actor)
            reply.set_result(asked.result())
        elif not isinstance(error, self._ray.exceptions.RayActorError):
            reply.set_result(Reply(problem=f"its answer cannot be sent ({line(error)})"))
        elif self._broken:
            reply.set_result(Reply(problem=self._broken))
        else:
            self._renew(question.key % self._count, actor)
            self._deaths[question.key] += 1
            if self._deaths[question.key] == 1:
                self._send(question, reply)
            else:
                self._alone.submit(self._apart, question, reply)

    def _apart(self, question: Question, reply: Future[Reply]) -> None:
        """Ask in an actor of its own; whoever takes that down has failed."""
        actor = None
        try:
            actor = self._hired()
            limit = (len(question.said) + 2) * self.timeout + GRACE
            begun(self._ray, actor)
            reply.set_result(awaited(self._ray, actor.answer.remote(question), limit))
        except (Died, TimeoutError, CannotStart) as error:
            reply.set_result(Reply(problem=f"its process died ({error})"))
        except Exception as error:  # of Ray's: an answer that cannot be sent, a cluster that has gone
            reply.set_result(Reply(problem=line(error)))
        finally:
            if actor is not None:
                self._ray.kill(actor)

    def _renew(self, w: int, dead: Handle) -> None:
        with self._lock:
            if self._actors[w] is dead and not self._closed:
                self._ray.kill(dead)
                self._actors[w] = self._hired()
                self._starting.submit(self._started, self._actors[w])

    def _started(self, actor: Handle) -> None:
        """Whoever waits for one that finds no room in the cluster hears of it."""
        try:
            begun(self._ray, actor)
        except CannotStart as error:
            if self._ray.is_initialized() and not self._closed:
                self._broken = str(error)
                self._ray.kill(actor)

    def end(self, keys: Sequence[int]) -> dict[int, str]:
        """Close these environments; one whose actor has died is closed already."""
        problems: dict[int, str] = {}
        asked = [
            self._actors[w].end.remote([key for key in keys if key % self._count == w]) for w in range(self._count)
        ]
        for one in asked:
            with contextlib.suppress(Died, TimeoutError):
                problems |= awaited(self._ray, one, self.timeout + GRACE)
        self._deaths.clear()
        return problems

    def give_up(self) -> None:
        """Nothing holds up others here: an actor that is stuck says so, or dies."""

    def close(self) -> None:
        """Leave no actor behind."""
        if not self._closed:
            self._closed = True
            for thread in (self._nurse, self._alone, self._starting):
                thread.shutdown(wait=False, cancel_futures=True)
            for actor in self._actors:
                self._ray.kill(actor)
            leave()
