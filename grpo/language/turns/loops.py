"""An event loop beside the thread that samples, for environments and tools that are `async def`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

GRACE = 5.0
"""Seconds over its limit after which a call that does not let itself be cancelled is given up with its loop."""


def asynchronous(thing: Any, *names: str) -> bool:
    """Whether a function, or one of these methods of a class or object, is `async def`."""
    inner = inspect.unwrap(thing) if callable(thing) else thing
    found = [getattr(inner, name, None) for name in names] if names else [inner, type(inner).__call__]
    return any(inspect.iscoroutinefunction(one) for one in found)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Set it going."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def renew(self) -> None:
        """Leave a thread to whoever does not let go of it, and take another one."""
        self.close()
        self._start()

    def close(self) -> None:
        """What is under way is cancelled, and the thread ends."""
        self._loop.call_soon_threadsafe(_wind_up, self._loop)


def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.call_soon, loop.stop)  # after those have heard of it
