"""Where ranks meet before and beside their collectives: a key-value store over TCP that one process holds.

    meeting = meet(place, seconds=300)     every rank connects, or says which one has not come
    meeting.agree({"setting seed": "0"})   the same everywhere, or an error on every rank that says what differs
    meeting.excuse("no GPU")               a rank that cannot start tells the others, who then need not wait for it
    meeting.say("collect")                 what this rank is doing; `blame` reads it when somebody has waited too long

Nothing here takes part in the arithmetic: that is `grpo.distributed.group`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from grpo.distributed.places import Place
from grpo.errors import ConfigError, RanksLost, line

GLANCE = 0.05
"""Seconds between looks at the store while somebody is waited for."""
ANSWERS = 30.0
"""Seconds in which a store that listens says so."""
LINGERS = 5.0
"""Seconds that a rank waits for the others to leave first, where they still have something to read."""
SHOWN = 60
"""Characters of a value that differs."""
WAITS = "waiting at "
"""Begins what a rank says that waits for others."""
OTHERS = "excuse/others"
"""Where a rank excuses itself whose number may be another's, too."""
OWN = ("host", "pid", "gpu")
"""What every rank has for itself."""


class Meeting:
    """One rank's side of the store."""

    def __init__(self, store: Any, rank: int, ranks: int, seconds: float, holds: bool = False) -> None:
        """seconds: how long anybody is waited for; holds: whether the store ends with this process."""
        self._store, self._lingers = store, holds
        self.rank, self.ranks, self.seconds = rank, ranks, seconds

    @property
    def store(self) -> Any:
        """For torch.distributed, apart from our own words."""
        return PrefixStore("group", self._store)

    def agree(self, facts: Mapping[str, str], shared_gpu: bool = False, what: str = "starting") -> list[dict[str, str]]:
        """What every rank says about itself; raises on all of them where they may not work together.

        facts: what must be the same, by names a person knows; `host`, `pid` and `gpu` are added.
        """
        cards = [json.loads(text) for text in self._round(what, json.dumps({**itself(), **facts}))]
        wrong = [*disagreements(cards), *([] if shared_gpu else shared_gpus(cards))]
        if wrong:
            raise ConfigError("; ".join(wrong))
        return cards

    def ready(self, what: str) -> None:
        """Go on once every rank is here; where one has excused itself, all leave with its words."""
        self._round(what, "")

    def excuse(self, why: str) -> None:
        """Tell the others that this rank will not come."""
        try:
            self._lingers = True
            self._store.set(f"excuse/{self.rank}", why)
            self._store.add("excused", 1)
        except RuntimeError:  # the store is gone: so are they
            return

    def expect_as_many(self) -> None:
        """Raise where another machine counts other ranks than this one; the others hear of it too."""
        first = int(self._store.compare_set("ranks", "", str(self.ranks)).decode())
        if first == self.ranks:
            return
        why = (
            f"rank {self.rank} was started as one of {self.ranks}, others as one of {first}; start every machine with "
            "the same number of ranks, and no run beside another at one MASTER_PORT"
        )
        self._store.set(OTHERS, why)
        self._store.add("excused", 1)
        self._lingers = True
        self.leave()
        raise ConfigError(why)

    def say(self, phase: str) -> None:
        """Write down what this rank does from now on."""
        try:
            self._store.set(f"phase/{self.rank}", phase)
        except RuntimeError as error:
            raise self._gone(error, "Go on from the last checkpoint") from error

    def _gone(self, error: RuntimeError, then: str) -> RanksLost:
        return RanksLost(
            f"rank {self.rank} has lost the store where ranks meet ({line(error)}): whoever started the run, or "
            f"rank 0, is gone. {then}"
        )

    def phases(self) -> dict[int, str]:
        """What each rank last said it does."""
        return {rank: self._read(f"phase/{rank}") or "not there yet" for rank in range(self.ranks)}

    def blame(self, what: str, cut: bool = False) -> str:
        """In one line who is waited for at `what`, and where they are instead; cut: a connection ended, no time-out."""
        phases = self.phases()
        if excuses := self.excuses():
            return excuses
        late = {rank: phase for rank, phase in phases.items() if phase != WAITS + what and rank != self.rank}
        if cut and (self.ranks == 2 or not late):
            gone = f"rank {1 - self.rank}" if self.ranks == 2 else "one of them"
            return f"{gone} has ended or its machine has gone, while this one waited at {what}"
        if not late:
            return f"all ranks wait at {what}: the network between them does not carry it; try `grpo doctor --ranks`"
        others = "; ".join(f"{named(ranks)}, last seen {phase}" for phase, ranks in grouped(late).items())
        return f"it waited at {what} for {others}"

    def end(self) -> None:
        """Told by every rank that is done; it returns once rank 0 is, or has waited too long for it."""
        end = time.monotonic() + self.seconds
        try:
            if self.rank == 0:
                self._store.set("ended", "")
            while not self._store.check(["ended"]) and time.monotonic() < end:
                time.sleep(GLANCE)
        except RuntimeError:  # it is gone, and the store with it
            return

    def leave(self) -> None:
        """Go; who holds the store or has excused itself stays a moment, so that the others can still read why."""
        try:
            gone = self._store.add("gone", 1)
            end = time.monotonic() + (LINGERS if self._lingers else 0.0)
            while gone < self.ranks and time.monotonic() < end:
                time.sleep(GLANCE)
                gone = self._store.add("gone", 0)
        except RuntimeError:  # whoever held it has gone first
            return

    # --- one round: everybody writes, everybody reads -----------------------------------------------------------------

    def _round(self, what: str, text: str) -> list[str]:
        """What each rank wrote; names those that have not within the time."""
        try:
            return self._exchanged(what, text)
        except RanksLost:
            raise
        except RuntimeError as error:
            raise self._gone(error, "What ended it is in its own output; start again") from error

    def _exchanged(self, what: str, text: str) -> list[str]:
        self._store.set(f"{what}/{self.rank}", text)
        here = self._store.add(f"{what}/here", 1)
        end = time.monotonic() + self.seconds
        while here < self.ranks:
            if self._store.add("excused", 0):
                raise ConfigError(f"the run cannot start: {self.excuses()}")
            if time.monotonic() > end:
                raise RanksLost(self._absent(what))
            time.sleep(GLANCE)
            here = self._store.add(f"{what}/here", 0)
        return [text.decode() for text in self._store.multi_get([f"{what}/{rank}" for rank in range(self.ranks)])]

    def excuses(self) -> str:
        """What ranks have said that do not go on; empty: nobody has."""
        said = {rank: self._read(f"excuse/{rank}") for rank in range(self.ranks)}
        counted = self._read(OTHERS)
        return "; ".join([*(f"rank {rank}: {why}" for rank, why in said.items() if why), *filter(None, [counted])])

    def _absent(self, what: str) -> str:
        missing = [rank for rank in range(self.ranks) if self._read(f"{what}/{rank}") is None]
        return (
            f"{named(missing)} of {self.ranks} did not come within {self.seconds:g} s ({what}); look at what "
            f"{'it' if len(missing) == 1 else 'they'} printed, or wait longer: --rank-timeout"
        )

    def _read(self, key: str) -> str | None:
        try:
            return str(self._store.get(key).decode()) if self._store.check([key]) else None
        except RuntimeError:
            return None


def meet(place: Place, seconds: float) -> Meeting:
    """Connect to the store, or hold it where that is this rank's part."""
    holds = place.rank == 0 and not place.store_runs
    store = _held(place, seconds) if holds else connected(f"rank {place.rank}", place.address, place.port, seconds)
    meeting = Meeting(PrefixStore(f"grpo/{place.attempt}", store), place.rank, place.ranks, seconds, holds)
    meeting.expect_as_many()
    return meeting


def _held(place: Place, seconds: float) -> Any:
    """The store, in this process."""
    try:
        return TCPStore(place.address, place.port, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            told = f"port {place.port} is in use on this machine; set MASTER_PORT to another, the same for every rank"
        else:
            where = f"{place.address}:{place.port}"
            told = f"rank 0 cannot listen at {where} ({line(error)}); set MASTER_ADDR to this machine's own name"
        raise ConfigError(told) from None


def connected(who: str, address: str, port: int, seconds: float) -> Any:
    """The store that another process holds; raises where none answers in time, also where something else does.

    It is waited for here, for torch prints a stack of frames at each try; and then in a thread: to a port at which
    another program listens torch would wait for ever.
    """
    found: list[Any] = []

    def connect() -> None:
        try:
            limit = timedelta(seconds=seconds)
            found.append(TCPStore(address, port, None, False, limit, wait_for_workers=False))
        except (RuntimeError, ValueError) as error:
            found.append(error)

    error = _listened(address, port, seconds)
    if error is None:
        waiting = threading.Thread(target=connect, daemon=True)
        waiting.start()
        waiting.join(ANSWERS)
        if not found:
            raise ConfigError(
                f"another program than rank 0 listens at {address}:{port}; set MASTER_PORT to another, the same for "
                "every rank"
            )
        error = found[0] if isinstance(found[0], Exception) else None
    if error is not None:
        raise ConfigError(
            f"{who} cannot reach rank 0 at {address}:{port} within {seconds:g} s ({line(error)[:160]}); is it started, "
            "and does a firewall let the port through? MASTER_ADDR and MASTER_PORT say where"
        )
    return found[0]


def _listened(address: str, port: int, seconds: float) -> Exception | None:
    """None once somebody takes a connection; what the last try met when the time is up."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(min(left, ANSWERS), GLANCE)).close()
        except UnicodeError as error:  # no name of a machine
            return error
        except OSError as error:
            if left <= 0:
                return error
            time.sleep(min(1.0, left))
        else:
            return None


# --- what ranks know about themselves -------------------------------------------------------------------------------


def itself() -> dict[str, str]:
    """Where this rank runs: its machine, process and GPU."""
    return {"host": socket.gethostname(), "pid": str(os.getpid()), "gpu": gpu()}


def gpu() -> str:
    """The GPU that is in use, by the number that no other in the world has; empty: none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def disagreements(cards: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for everything that should be the same and is not."""
    found = []
    for name in dict.fromkeys(name for card in cards for name in card if name not in OWN):
        values = grouped({rank: card.get(name, "nothing") for rank, card in enumerate(cards)})
        if len(values) > 1:
            said = ", ".join(f"{_short(value)} on {named(ranks)}" for value, ranks in values.items())
            found.append(f"{name} differs: {said} ({_hosts(cards, values)}); start every rank with the same")
    return found


def shared_gpus(cards: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for every GPU that two ranks would use."""
    found = []
    for number, ranks in grouped({rank: card["gpu"] for rank, card in enumerate(cards) if card["gpu"]}).items():
        if len(ranks) > 1:
            found.append(
                f"{named(ranks)} share one GPU ({number} on {cards[ranks[0]]['host']}); start one rank a GPU, or add "
                "--shared-gpu, with which they divide it and talk through the CPU"
            )
    return found


def grouped(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks of each value."""
    found: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        found.setdefault(value, []).append(rank)
    return found


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2` or `ranks 0, 1, 2 and 61 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first = ", ".join(map(str, ranks[:8]))
    return f"ranks {first}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _hosts(cards: Sequence[Mapping[str, str]], values: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(dict.fromkeys(cards[ranks[0]]["host"] for ranks in values.values()))


def _short(value: str) -> str:
    return value if len(value) <= SHOWN else f"{value[: SHOWN - 1]}…"
