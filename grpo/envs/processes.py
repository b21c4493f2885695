"""Copies of one environment in other processes: they run side by side, and can be killed.

A worker is a process with a `SerialFleet` of its members. A call goes to all
workers it concerns before any answer is awaited, and pictures do not travel with it (`grpo.envs.shared_memory`). One
that stays in one call of an environment for longer than `timeout`, or that dies, is replaced; its members, the innocent
too, have lost their episodes and say so until they are reset. The other workers' answers count.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection, util
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from grpo.envs.fleet import Begun, EnvError, Stepped
from grpo.envs.serial import MAKING, NOBODY, Make, SerialFleet, Watch, when
from grpo.envs.shared_memory import SharedObservations, share
from grpo.envs.spread import Parted, SpreadFleet, calls, name_of_factory
from grpo.errors import line
from grpo.processors import processors
from grpo.run import output
from grpo.run.guard import again, unguarded_script
from grpo.workers import START_TIMEOUT, CannotStart, Outcome, Worker, close_all, finished


class ProcessFleet(SpreadFleet):
    """`size` members in `workers` processes (one a processor, unless told); the factory must be sendable.

    `timeout` is for one call of one environment, so that a long replay is not taken for a hang. Making one may take
    as long as a process may take to start.
    """

    def __init__(self, make: Make, size: int, workers: int | None = None, timeout: float = 30.0) -> None:
        count = min(size, processors()) if workers is None else min(size, workers)
        super().__init__(name_of_factory(make), size, count)
        if count < 1 or timeout <= 0:
            raise EnvError(f"{self.name}: size, workers and timeout must be above 0; got {size}, {workers}, {timeout}")
        if script := unguarded_script():
            raise CannotStart(again(script))
        try:
            ForkingPickler.dumps(make)
        except Exception as error:  # each kind of object fails to be sent in its own way
            raise CannotStart(f"{line(error)}; define it at the top of a module") from error
        self._workers: list[EnvWorker] = []
        self._busy: dict[Worker, int] = {}
        """Workers that were told something and have not been heard yet."""
        # Before multiprocessing's own exit handler, which would wait for ever for a worker that ignores SIGTERM.
        self._at_exit = util.Finalize(self, close_all, (self._workers,), exitpriority=100)
        try:
            self._workers += [EnvWorker(_Crew(make, self.name, size, timeout)) for _ in range(count)]
            self._workers[0].wait_ready()
            about = self._ask({0: ("describe", ())})[0]
            if about is None:
                raise EnvError(self._lost[0])
        except BaseException:
            self._at_exit()
            raise
        self._described(about)
        self._shared = share(self.observation_space, size)

    def close(self) -> None:
        """Close every environment and leave no process behind."""
        if self._workers:
            try:
                idle = [w for w, worker in enumerate(self._workers) if worker.has_begun and worker not in self._busy]
                self._busy.clear()
                self._ask(dict.fromkeys(idle, ("close", ())))
            finally:
                self._at_exit()
                if self._shared is not None:
                    self._shared.close()

    def send(self, members: Sequence[int] | np.ndarray, actions: Any) -> Callable[[], Stepped]:
        """Begin a step; what is returned waits for it. Nothing else can be asked of the fleet before."""
        parted = self._parted_step(members, actions)
        begun = self._tell(parted.calls)
        return lambda: self._stepped(parted, self._hear(begun))

    def _parted_step(self, members: Sequence[int] | np.ndarray, actions: Any) -> Parted:
        self._abandon()  # who was lost must be known before anybody is asked
        return super()._parted_step(members, actions)

    def _ask(self, calls: Mapping[int, tuple[str, Any]]) -> dict[int, Any]:
        """What each worker answers; None from one that was lost over it."""
        return self._hear(self._tell(calls))

    def _tell(self, calls: Mapping[int, tuple[str, Any]]) -> dict[int, Outcome]:
        """Begin calls, which are under way from then on; outcomes there are already of workers that did not start."""
        if not self._workers:
            raise EnvError(f"{self.name}: the fleet is closed")
        self._abandon()  # somebody was interrupted before the answers of the last call were heard
        outcomes: dict[int, Outcome] = {}
        try:
            for w, call in calls.items():
                begun = self._workers[w].ask((*call, None if self._shared is None else self._shared.name), "")
                if begun is None:
                    self._busy[self._workers[w]] = w
                else:
                    outcomes[w] = begun
        except BaseException:
            self._abandon()
            raise
        return outcomes

    def _hear(self, outcomes: dict[int, Outcome]) -> dict[int, Any]:
        """The answers to what is under way."""
        busy = self._busy
        try:
            while busy:
                for one in list(busy):  # all are needed, so in turn: watching everybody at once takes longer
                    for worker, outcome in finished([one]):
                        outcomes[busy.pop(worker)] = outcome
        except BaseException:
            self._abandon()
            raise
        for w, outcome in outcomes.items():
            if outcome.error is not None:
                self._lose(w, outcome.error)
        answers = {w: outcome.value or (None, None) for w, outcome in outcomes.items()}
        for _, problem in answers.values():
            if problem is not None:
                raise EnvError(problem)
        return {w: answer for w, (answer, _) in answers.items()}

    def _abandon(self) -> None:
        """Start those again that are under way: their answers would be taken for those of the next call."""
        while self._busy:
            worker, w = self._busy.popitem()
            worker.restart()
            self._lose(w, "interrupted; started again")

    def _lose(self, w: int, what: str) -> None:
        """Tell all members of a worker why they need a reset."""
        culprit, step = self._workers[w].last
        cause = f"member {culprit} (worker {w}), {when(step)}: {what}"
        for number in range(w, self.size, self._count):
            text = cause if number == culprit else f"member {number} was lost with its worker ({cause})"
            self._lost[number] = f"{self.name} " + (
                f"member {number} (worker {w}): {what}" if culprit == NOBODY else text
            )


class EnvWorker(Worker):
    """A process with a fleet. It keeps a diary of whom it calls, so that a hang is noticed and has a name."""

    def __init__(self, crew: _Crew) -> None:
        context = multiprocessing.get_context("spawn")
        self._diary = context.RawArray("d", 3)
        super().__init__(crew, crew.timeout, context, partial(_serve, self._diary))

    def ask(self, item: Any, seed: str) -> Outcome | None:
        """Begin a call."""
        self._diary[:] = NOBODY, 0, 0
        return super().ask(item, seed)

    def answer(self) -> Outcome:
        """The outcome, when there is one or the process has died."""
        outcome = super().answer()
        assert outcome is not None  # processes are not asked again
        if self._ready or outcome.ok:
            return outcome
        return Outcome(reason=f"{outcome.reason}; started again")

    def seconds_left(self) -> float:
        """Until the call of one environment is too slow."""
        return max(self._deadline, self._diary[2]) - time.monotonic()

    def give_up(self) -> Outcome:
        """Kill it."""
        limit = allowed_for(self.last[1], self._timeout)
        self.restart()
        return Outcome(reason=f"hung for {limit:g} s; killed and started again")

    @property
    def last(self) -> tuple[int, int]:
        """The member that was called last, and its step."""
        return int(self._diary[0]), int(self._diary[1])

    @property
    def has_begun(self) -> bool:
        """Whether there may be environments over there."""
        return self._ready


def allowed_for(step: int, timeout: float) -> float:
    """Seconds that one call of an environment may take."""
    return max(START_TIMEOUT, timeout) if step == MAKING else timeout


# --- in the worker --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Crew:
    """Makes the fleet of a worker."""

    make: Make
    name: str
    size: int
    timeout: float

    def __call__(self, watch: Watch) -> SerialFleet:
        return SerialFleet(self.make, self.size, watch)


class Alarm:
    """Ends a process that is stuck after its parent has gone: a thread of the interpreter's own, which needs no GIL."""

    def __init__(self, grace: float, file: Any) -> None:
        self._grace, self._file, self._until = grace, file, 0.0

    def __call__(self, limit: float) -> None:
        """Stand for between one and two times so many seconds: moving it costs a thread, so not at every call."""
        now = time.monotonic()
        if not now + limit <= self._until <= now + 2 * limit:
            self._until = now + 2 * limit
            faulthandler.dump_traceback_later(2 * limit + self._grace, exit=True, file=self._file)

    def off(self) -> None:
        """Nothing is under way."""
        self._until = 0.0
        faulthandler.cancel_dump_traceback_later()


def _serve(diary: Any, pipe: connection.Connection, crew: _Crew, limit: float) -> None:
    """Answer calls until the parent closes its end."""
    os.setsid()  # Ctrl-C is the parent's affair, and a kill reaches what an environment starts
    output.install()  # what an environment prints is nobody's failure
    output.plain_warnings()
    pipe.send(None)
    fleet: SerialFleet | None = None
    written: SharedObservations | None = None
    grace = limit - crew.timeout
    with open(os.devnull, "w") as nowhere:
        alarm = Alarm(grace, nowhere)

        def watch(member: int, step: int) -> None:
            allowed = allowed_for(step, crew.timeout)
            diary[:] = member, step, time.monotonic() + allowed
            alarm(allowed)

        while True:
            try:
                if not pipe.poll(grace / 2):  # the alarm rings later than that; a busy worker leaves it on
                    alarm.off()
                (name, arguments, shared), _ = pipe.recv()
            except (EOFError, OSError):
                return
            answer, problem = None, None
            try:
                fleet = fleet or crew(watch)
                answer = calls(fleet)[name](*arguments)
                if shared is not None and isinstance(answer, Begun | Stepped):
                    written = written or SharedObservations(fleet.observation_space, fleet.size, shared)
                    written.write(arguments[0], answer.observation)
                    answer = replace(answer, observation=None)
            except EnvError as error:
                problem = str(error)
            except BaseException as error:  # also sys.exit: an environment has no say in when training ends
                problem = f"{crew.name}: {line(error)}"
            # One that could not be made is no mistake of the caller's, except for whoever is the first to try it.
            unmade = problem if fleet is None and name != "describe" else None
            try:
                pipe.send(((answer, problem), None) if unmade is None else (None, unmade))
            except OSError:
                return
            except Exception as error:  # a space that cannot be sent
                pipe.send(((None, f"{crew.name}: its answer cannot be sent ({line(error)})"), None))
