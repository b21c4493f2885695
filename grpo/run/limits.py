"""A time limit for code of somebody's that runs in this process: drawing, closing, a tracker."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Value = TypeVar("Value")

AGAIN = 1.0
"""Seconds after which code that caught the first one is told once more."""
AT_ONCE = 1e-6
"""Seconds; 0 would be never."""


class _Enough(BaseException):
    """Ends what took too long; not an Exception, which that may catch."""


def at_most(seconds: float, what: str, call: Callable[[], Value]) -> Value:
    """What the call gives; TimeoutError once it has taken so many seconds, wherever it sleeps, waits or loops.

    By SIGALRM, so that it stays in its own thread; an alarm that was set before goes on afterwards. Python allows that
    in the main thread only: elsewhere, and inside a C function that never comes back, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    over = True  # nobody is interrupted before the call, or after it

    def enough(number: int, frame: FrameType | None) -> None:
        if not over:
            raise _Enough

    # None: set by something that is not Python, and cannot be put back from here
    handler = signal.getsignal(signal.SIGALRM) or signal.SIG_DFL
    began = time.monotonic()
    left, every = signal.setitimer(signal.ITIMER_REAL, 0)  # first: that alarm is its owner's, and must not ring in ours
    try:
        signal.signal(signal.SIGALRM, enough)
        try:
            over = False
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
            return call()
        finally:
            over = True
    except _Enough:
        raise TimeoutError(f"{what} did not end in {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # one that should have rung meanwhile rings now
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), AT_ONCE), every)
