"""A function in other processes: timed, killable, its failures data. For rewards, environments, graders.

    Pool(function, workers=4, timeout=30).map(items)  →  [Outcome, …] in the order of the items

A call that raises, exits, hangs (also in C, also ignoring SIGTERM) or takes its process down costs that one item:
the worker is killed and replaced. What a call does to its working directory, environment, global generators or
arguments stays in its process and ends with the call; one that patches Python's own modules has its process replaced.

Parent and worker talk through an anonymous pipe that no other process can open. Each message is what the standard
library's `multiprocessing` makes of plain values; nothing is kept on disk.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, util
from multiprocessing.reduction import ForkingPickler
from operator import is_
from typing import Any, TypeAlias

from grpo.errors import line, warn
from grpo.run import output
from grpo.run.guard import Unguarded, expect_guarded
from grpo.run.signals import from_a_person

START_TIMEOUT = 120.0
"""Seconds a new process may take to load what the function needs."""
ORPHAN_GRACE = 5.0
"""Seconds over the limit after which a worker whose parent is gone ends itself."""


@dataclass(frozen=True)
class Outcome:
    """What became of one call."""

    value: Any = None
    reason: str | None = None
    """What went wrong, in one line; None: it worked."""
    of: str = ""
    """The function's name."""
    changed: str = ""
    """What the call changed of Python's own modules: its worker has been replaced."""

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return self.reason is None

    @property
    def error(self) -> str | None:
        """The reason with the function's name before it."""
        return f"{self.of}: {self.reason}" if self.of and self.reason is not None else self.reason


class CannotStart(RuntimeError):
    """A worker process that could not load the function."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason
        """Without what it was that could not start."""


class Worker:
    """One process that runs one function, one call at a time; replaced after a kill.

    `serve` is what the process does with the function; without it, every call leaves the process as it found it.
    """

    def __init__(
        self, function: Callable[..., Any], timeout: float, context: Any, serve: Callable[..., None] | None = None
    ) -> None:
        self._function, self._timeout, self._context = function, timeout, context
        self._serve = serve or _serve
        self._deadline = 0.0
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = self._context.Pipe()
        _limit(self.pipe, self._timeout)
        self._process = self._context.Process(
            target=self._serve,
            args=(theirs, self._function, self._timeout + ORPHAN_GRACE),
            daemon=True,
            name=f"worker {name_of(self._function)}",
        )
        self._process.start()
        theirs.close()
        self._ready = False

    def wait_ready(self) -> None:
        """Return once the function is loaded over there."""
        if self._ready:
            return
        try:
            if not self.pipe.poll(START_TIMEOUT):
                raise CannotStart(f"no sign of life in {START_TIMEOUT:g} s")
            problem = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            problem = (
                f"the new process ended with code {self._process.exitcode}; a script that starts workers needs "
                "`if __name__ == '__main__':` around its own work"
            )
        if problem is not None:
            raise CannotStart(str(problem))
        self._ready = True

    def ask(self, item: Any, seed: str) -> Outcome | None:
        """Begin a call. An outcome at once means that it could not begin."""
        try:
            message = bytes(ForkingPickler.dumps((item, seed)))
        except Exception as error:  # anything a user's class may raise
            return Outcome(reason=f"its argument cannot be sent ({line(error)})", of=name_of(self._function))
        try:
            self.wait_ready()
        except CannotStart as error:
            self.restart()
            return Outcome(reason=str(error), of=name_of(self._function))
        self._deadline = time.monotonic() + self._timeout
        try:
            self.pipe.send_bytes(message)
        except BlockingIOError:  # frozen: it does not even read
            return self.give_up()
        except OSError:  # already dead: `answer` finds out
            pass
        return None

    def answer(self) -> Outcome | None:
        """The outcome, when `pipe` has one or has closed; None: the call has been begun again."""
        try:
            outcome = Outcome(*self.pipe.recv())
            if outcome.changed:
                self.restart()
            return outcome
        except BlockingIOError:  # frozen amid its answer
            return self.give_up()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.restart()
            return Outcome(reason=f"its process died (exit code {code})", of=name_of(self._function))
        except Exception as error:  # a value that cannot be made again on this side
            return Outcome(reason=f"its value cannot be read ({line(error)})", of=name_of(self._function))

    def seconds_left(self) -> float:
        """Until the call is too slow."""
        return self._deadline - time.monotonic()

    def give_up(self) -> Outcome:
        """Kill a call that is too slow."""
        self.restart()
        return Outcome(reason=f"no answer in {self._timeout:g} s, killed", of=name_of(self._function))

    def restart(self) -> None:
        """A fresh process."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the process, and what it started, whatever it is doing."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError, TypeError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own group, see `_serve`
        self._process.kill()  # in case it had not got that far
        self._process.join()
        self._process.close()


Hire: TypeAlias = Callable[[Callable[..., Any], float], Worker]
"""A worker for a function, with a time limit for each call."""


class Feed:
    """Items for a pool that come bit by bit: one thread puts them in, the pool's takes them out."""

    def __init__(self) -> None:
        self.items: deque[tuple[Any, str]] = deque()
        self.open, self.dropped, self._closed = True, False, False
        self.bell, self._rope = os.pipe()
        """Readable when there is something new: the pool waits for it as it does for its workers."""
        os.set_blocking(self._rope, False)

    def put(self, item: Any, seed: str) -> None:
        """One more; the global generators are seeded from `seed` before the call."""
        self.items.append((item, seed))
        self._ring()

    def end(self) -> None:
        """That was all."""
        self.open = False
        self._ring()

    def drop(self) -> None:
        """Nobody waits for the answers any more: calls that have begun are killed, the others never begin."""
        self.dropped = True
        self.end()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it has not been heard yet, and will be
            if not self._closed:
                os.write(self._rope, b"!")

    def close(self) -> None:
        """Once neither side uses it any more."""
        if not self._closed:
            self._closed = True
            os.close(self.bell)
            os.close(self._rope)


class Pool:
    """Several workers for one function.

    A function that cannot be sent to another process (a lambda, something defined in a notebook) runs here instead,
    without a time limit, after one warning; with `or_inline=False` it raises CannotStart.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        workers: int = 2,
        timeout: float = 30.0,
        start: str = "spawn",
        or_inline: bool = True,
        hire: Hire | None = None,
    ) -> None:
        """hire: where workers come from, if not from this machine (`grpo.cluster`)."""
        if workers < 1 or timeout <= 0:
            raise ValueError(f"a pool needs workers ≥ 1 and timeout > 0, got {workers} and {timeout}")
        self._function = function
        self._workers: list[Worker] = []
        self._closed = False
        # Before multiprocessing's own exit handler, which would wait for ever for a worker that ignores SIGTERM.
        self._at_exit = util.Finalize(self, close_all, (self._workers,), exitpriority=100)
        try:
            if hire is None:
                expect_guarded()
                ForkingPickler.dumps(function)
                hire = partial(Worker, context=multiprocessing.get_context(start))
            for _ in range(workers):  # one by one, so that those that are there are closed should the next one fail
                self._workers.append(hire(function, timeout))
            self._workers[0].wait_ready()
        except Exception as error:  # each kind of object fails to be sent in its own way
            close_all(self._workers)
            told = f"{name_of(function)} cannot run in another process ({line(error)})"
            if not or_inline:
                raise CannotStart(told, line(error)) from error
            remedy = "" if isinstance(error, Unguarded) else "; define it at the top of a module to change that"
            warn(f"{told}: it runs in this one, without a time limit{remedy}")

    @property
    def inline(self) -> bool:
        """Whether calls run in this process."""
        return not self._workers

    def map(self, items: Iterable[Any], seed: str = "0") -> list[Outcome]:
        """One outcome an item, in their order. Global generators are seeded from (seed, position) before each call."""
        if self.inline and not self._closed:
            return [_call(self._function, item) for item in items]
        with contextlib.closing(Feed()) as feed:
            for at, item in enumerate(items):
                feed.put(item, f"{seed}/{at}")
            feed.end()
            return self.run(feed)

    def run(self, feed: Feed) -> list[Outcome]:
        """The same for items that come bit by bit, each with its seed; returns once the feed has ended."""
        if self._closed:
            raise RuntimeError("the pool is closed")
        found: list[Outcome | None] = []
        idle, busy = list(self._workers), dict[Worker, int]()
        try:
            while ((more := feed.open) or feed.items or busy) and not feed.dropped:
                while feed.items and idle and not feed.dropped:
                    (item, seed), worker = feed.items.popleft(), idle.pop()
                    found.append(worker.ask(item, seed))
                    if found[-1] is None:
                        busy[worker] = len(found) - 1
                    else:
                        idle.append(worker)
                for worker, outcome in finished(list(busy), feed.bell) if busy or more else ():
                    found[busy.pop(worker)] = outcome
                    idle.append(worker)
        finally:
            for worker in busy:  # dropped or interrupted: its answer must not be taken for that of the next call
                worker.restart()
        return [outcome for outcome in found if outcome is not None]

    def close(self) -> None:
        """Leave no process behind."""
        self._closed = True
        self._at_exit()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def finished(busy: Sequence[Worker], bell: int | None = None) -> list[tuple[Worker, Outcome]]:
    """Wait for the first answers, the next deadline, or the bell (a file that becomes readable)."""
    watched: list[Any] = [worker.pipe for worker in busy] + ([] if bell is None else [bell])
    if not watched:
        return []
    limit = max(0.0, min(worker.seconds_left() for worker in busy)) if busy else None
    ready = set(connection.wait(watched, limit))
    if bell in ready:
        os.read(bell, 65536)
    heard = [worker for worker in busy if worker.pipe in ready]
    late = [worker for worker in busy if worker.pipe not in ready and worker.seconds_left() <= 0]
    done = [(worker, outcome) for worker in heard if (outcome := worker.answer()) is not None]
    return done + [(worker, worker.give_up()) for worker in late]


def close_all(workers: list[Worker]) -> None:
    """End them all, and empty the list."""
    while workers:
        workers.pop().close()


def _limit(pipe: connection.Connection, seconds: float) -> None:
    """A frozen process neither reads nor writes on: what waits for it longer than this gets a BlockingIOError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:  # the two are one: what is set here holds there
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


# --- in the worker --------------------------------------------------------------------------------------------------


class Serving:
    """Makes calls of a function, each of which leaves the process as it found it."""

    def __init__(self, function: Callable[[Any], Any], limit: float) -> None:
        """limit: seconds after which a call ends the process, should nobody else do so."""
        self._function, self._limit = function, limit
        self._home, self._environment, self._watch = os.getcwd(), dict(os.environ), _Watch()
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115  # open for as long as the process

    def __call__(self, item: Any, seed: str) -> tuple[Any, str | None, str, str]:
        """The parts of an `Outcome`."""
        _seed(seed)
        # A thread of the interpreter's own, which needs no GIL: ends the process should the parent be gone.
        faulthandler.dump_traceback_later(self._limit, exit=True, file=self._nowhere)
        try:
            outcome = _call(self._function, item)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return outcome.value, outcome.reason, outcome.of, self._watch.changed()

    def tidy(self) -> None:
        """What a call did to the working directory and the environment ends with it."""
        os.chdir(self._home)
        os.environ.clear()
        os.environ.update(self._environment)


def _serve(pipe: connection.Connection, function: Callable[[Any], Any], limit: float) -> None:
    """Answer calls until the parent closes its end."""
    os.setsid()  # Ctrl-C is the parent's affair, and a kill reaches what the function starts
    output.install()  # what the function prints is nobody's failure
    pipe.send(None)
    serving = Serving(function, limit)
    while True:
        try:
            item, seed = pipe.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # an argument that cannot be made again on this side
            pipe.send((None, f"its argument cannot be read ({line(error)})", name_of(function)))
            continue
        answer = serving(item, seed)
        try:
            pipe.send(answer)
        except OSError:
            return
        except Exception as error:  # a value that cannot be sent
            pipe.send((None, f"its value cannot be sent ({line(error)})", name_of(function)))
        serving.tidy()


WATCHED = ("builtins", "math", "random", "re", "json", "numpy", "numpy.random")
_all, _map = all, map  # a call may patch these, too


class _Watch:
    """What Python's own modules held before a call: later calls must not see what one has patched."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {}
        self.changed()

    def changed(self) -> str:
        """The first name that holds something else now, or nothing; a module that is new is watched from here on."""
        for module in WATCHED:
            if module not in sys.modules:
                continue
            now = vars(sys.modules[module])
            if module not in self._kept:
                self._kept[module] = tuple(now), tuple(now.values())
            names, values = self._kept[module]
            if not _all(_map(is_, _map(now.get, names), values)):
                other = (name for name, value in zip(names, values, strict=True) if now.get(name) is not value)
                return f"{module}.{next(other)}"
        return ""


def _call(function: Callable[[Any], Any], item: Any) -> Outcome:
    try:
        return Outcome(function(item))
    except BaseException as error:  # also sys.exit: a reward has no say in when training ends
        if from_a_person(error):  # while running inline
            raise
        return Outcome(reason=line(error), of=name_of(function))


def _seed(seed: str) -> None:
    """The generators that are loaded, so that a value does not depend on which worker made it."""
    random.seed(seed)
    number = random.getrandbits(32)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def name_of(function: Any) -> str:
    """For messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
