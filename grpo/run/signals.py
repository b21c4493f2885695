"""Ctrl-C, SIGTERM and SIGHUP as a polite request: the step in flight is finished, a checkpoint published, the run ends.

SIGHUP is a terminal that was closed or an ssh that was lost.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from types import FrameType
from typing import Any

INTERRUPTED, PREEMPTED = "interrupted", "preempted"


class LeaveAtOnce(KeyboardInterrupt):
    """A second Ctrl-C."""


class StopSignals:
    """While entered, the first SIGINT, SIGTERM or SIGHUP is noted in `reason`; a further Ctrl-C leaves at once.

    A further SIGTERM changes nothing: schedulers send several. Handlers found on entry are put back, for notebooks.
    Under nohup SIGHUP is ignored, and stays so. Python allows handlers in the main thread only; elsewhere this does
    nothing.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: set by something that is not Python, and cannot be put back from here
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise LeaveAtOnce
        self.reason = self.reason or (INTERRUPTED if number == signal.SIGINT else PREEMPTED)


def from_a_person(error: BaseException) -> bool:
    """Whether this is somebody's Ctrl-C, not a KeyboardInterrupt that a reward or an environment raised.

    Workers lead sessions of their own, which no Ctrl-C reaches; while a run listens, only the run itself raises one.
    """
    if not isinstance(error, KeyboardInterrupt) or multiprocessing.parent_process() is not None:
        return False
    listener = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return isinstance(error, LeaveAtOnce) or not isinstance(listener, StopSignals)
