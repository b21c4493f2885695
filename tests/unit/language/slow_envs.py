"""Environments and tools that take their time; actors import them by name."""

import asyncio
import os
import threading
import time

LIVE = {"now": 0}
LET_GO = threading.Event()
"""What one that holds the loop waits for."""
DELAYS = {}
"""By the row's `name`: seconds before each answer."""


class Echo:
    """Repeats, three times."""

    async def reset(self, row):
        self.row, self.turn = row, 0

    async def step(self, completion):
        self.turn += 1
        await asyncio.sleep(DELAYS.get(self.row.get("answer"), 0.01))
        return [{"role": "user", "content": "more" * self.turn}], 1.0, self.turn == 3


def where() -> str:
    """Which process it is in."""
    return str(os.getpid())


async def loud(what: str) -> str:
    """Say it loudly.

    Args:
        what: what to say
    """
    return what.upper()


class Gate(Echo):
    """Does not answer before sixteen have been asked."""

    async def step(self, completion):
        LIVE["now"] += self.turn == 0
        while LIVE["now"] < 16:
            await asyncio.sleep(0.005)
        self.turn += 1
        return [{"role": "user", "content": "more"}], 1.0, self.turn == 3


class Trouble(Echo):
    """By the row's answer: hangs, holds the loop, raises, dies once."""

    async def step(self, completion):
        what = self.row["answer"]
        if what == "hangs":
            await asyncio.sleep(3600)
        if what.startswith("holds"):
            LET_GO.wait(3600)
        if what == "raises":
            raise ValueError("no")
        return await super().step(completion)


class Plain:
    """Without async, for actors: says which process it is in, or takes it down."""

    def reset(self, row):
        self.row, self.turn = row, 0
        return None

    def step(self, completion):
        self.turn += 1
        what = self.row["answer"]
        if what.startswith("/") and self.turn == 2 and not os.path.exists(what):
            open(what, "w").close()
            os._exit(3)  # as with its machine: not the next time
        if what == "dies":
            os._exit(3)
        if what == "hangs":
            time.sleep(3600)
        return [{"role": "user", "content": f"turn {self.turn}"}], 1.0, self.turn == 3
