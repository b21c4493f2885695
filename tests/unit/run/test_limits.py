"""A time limit in this process: what it ends, and what it leaves alone."""

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo.run.limits import at_most


def spins():
    while True:
        pass


def catches():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(1000)


@pytest.mark.parametrize("call", [lambda: time.sleep(1000), spins, catches, threading.Event().wait])
def test_what_takes_too_long_is_ended(call):
    with pytest.raises(TimeoutError, match=r"this did not end in 0.05 s"):
        at_most(0.05, "this", call)


def test_what_it_gives_or_raises_comes_through():
    assert at_most(1000, "this", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        at_most(1000, "this", lambda: 1 // 0)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_an_alarm_of_somebodys_own_goes_on():
    def mine(number, frame): ...

    before = signal.signal(signal.SIGALRM, mine)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        at_most(1000, "this", int)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.setitimer(signal.ITIMER_REAL, 0)[0] > 0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_in_another_thread_there_is_no_limit():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(at_most, 0.01, "this", lambda: time.sleep(0.1)).result() is None
