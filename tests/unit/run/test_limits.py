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


@pytest.fixture
def mine():
    """Rings of an alarm that was there before."""
    rings = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rings.append(number))
    yield rings
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_alarm_of_somebodys_own_goes_on(mine):
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 1000, 7)
    at_most(1000, "this", lambda: time.sleep(0.05))
    assert signal.getsignal(signal.SIGALRM) is handler
    left, every = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left < 999.96 and every == 7  # the time of the call has passed for it, too
    assert not mine


def test_an_alarm_that_was_due_meanwhile_rings_afterwards(mine):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    assert at_most(1000, "this", lambda: time.sleep(0.03) or len(mine)) == 0
    until = time.monotonic() + 10
    while not mine and time.monotonic() < until:
        time.sleep(0.001)
    assert len(mine) == 1


def test_an_alarm_of_somebodys_own_that_rings_at_the_beginning_ends_nothing(mine, monkeypatch):
    set_timer = signal.setitimer

    def late(*words):
        time.sleep(0.003)
        return set_timer(*words)

    set_timer(signal.ITIMER_REAL, 0.0005, 0.0005)
    monkeypatch.setattr(signal, "setitimer", late)
    assert [at_most(1000, "this", lambda: 3) for _ in range(5)] == [3] * 5
    assert mine


def test_in_another_thread_there_is_no_limit():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(at_most, 0.01, "this", lambda: time.sleep(0.1)).result() is None
