"""A time limit for code of somebody's that runs in this process: drawing, closing, a tracker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Value = TypeVar("Value")

AGAIN = 1.0
"""Seconds after which code that caught the first one is told once more."""


class _Enough(BaseException):
    """Ends what took too long; not an Exception, which that may catch."""


def at_most(seconds: float, what: str, call: Callable[[], Value]) -> Value:
    """What the call gives; TimeoutError once it has taken so many seconds, wherever it sleeps, waits or loops.

    By SIGALRM, so that it stays in its own thread; an alarm that was set before goes on afterwards. Python allows that
    in the main thread only: elsewhere, and inside a C function that never comes back, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    over = False

    def enough(number: int, frame: FrameType | None) -> None:
        if not over:
            raise _Enough

    handler = signal.signal(signal.SIGALRM, enough)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        try:
            return call()
        finally:
            over = True  # from here on it may ring, and nobody is interrupted
    except _Enough:
        raise TimeoutError(f"{what} did not end in {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # None: set by something that is not Python, and cannot be put back from here
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, left, every)
