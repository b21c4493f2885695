"""`--ranks`: the same command in several processes of this machine, started and watched by torchrun's own machinery.

The store where ranks meet lives here, so that it can still be read what a rank that died was doing. A signal goes on
to every rank, each of which finishes its step; the first that fails takes the others with it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from grpo.distributed.meeting import Meeting, connected
from grpo.distributed.places import Machine
from grpo.errors import ConfigError
from grpo.processors import processors

FAILED = 1
GRACE = 30
"""Seconds after which torch kills a rank that does not end once another has failed, unless it is told otherwise."""
PERIOD = 0.2
"""Seconds between looks at the processes."""
ENOUGH = 3
"""Signals: a rank that waits for another hears none of the first two."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HANDLED = (*FORWARDED, signal.SIGQUIT)
"""Signals to which torch listens once it has started a process."""
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
"""The network inside of one machine, by operating system."""


def start(machine: Machine, command: Sequence[str], extra: Mapping[str, str], seconds: float = 300.0) -> int:
    """Run a command as the ranks of this machine; the exit code of the first that failed, or 0.

    extra: variables that the ranks get; seconds: how long the machine that holds the store is waited for.
    """
    store, port = _store(machine, seconds)
    places = machine.places(port)
    envs = {place.local_rank: place.variables() | _local(machine) | dict(extra) for place in places}
    args = {place.local_rank: tuple(command[1:]) for place in places}
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL + 1)
    before = {number: signal.getsignal(number) for number in HANDLED}
    with tempfile.TemporaryDirectory(prefix="grpo-ranks-") as folder:
        context = start_processes("grpo", command[0], args, envs, DefaultLogsSpecs(log_dir=folder))
        with _forwarded(list(context.pids().values()), before):
            result = context.wait(period=PERIOD)
    failures = {} if result is None else result.failures
    meeting = Meeting(PrefixStore("grpo/0", store), -1, machine.ranks, seconds)
    for place in places:
        if place.local_rank in failures and failures[place.local_rank].exitcode < 0:
            _tell_killed(place.rank, failures, place.local_rank, meeting)
    return code(failures)


def code(failures: Mapping[int, Any]) -> int:
    """The exit code of the rank that failed first: of those that ended together, one that ended by itself."""
    if not failures:
        return 0
    first = min(failures.values(), key=lambda failure: (failure.timestamp, failure.exitcode < 0, failure.local_rank))
    return first.exitcode if first.exitcode > 0 else FAILED


def _tell_killed(rank: int, failures: Mapping[int, Any], local_rank: int, meeting: Meeting) -> None:
    """A line for a rank that a signal ended, unless it is the one that ends those who are left over."""
    number = -failures[local_rank].exitcode
    others = any(failure.exitcode != -signal.SIGTERM for failure in failures.values())
    if number == signal.SIGTERM and others:
        return
    since = failures[local_rank].timestamp - min(failure.timestamp for failure in failures.values())
    if number == signal.SIGKILL and since >= GRACE - 1:  # they are whole seconds
        print(
            f"grpo: rank {rank} hung in {meeting.phases()[rank]!r}: it did not end within {GRACE} s after another had, "
            "and was killed; go on from the last checkpoint",
            file=sys.stderr,
        )
        return
    name = signal.Signals(number).name if number in list(signal.Signals) else str(number)
    why, go_on = "", "; go on from the last checkpoint"
    if number == signal.SIGKILL:
        why = "; often the machine was out of memory"
    if said := meeting.excuses():  # it waited for that one, inside of a call that hears no other signal
        why, go_on = f", for {said}", ""
    print(
        f"grpo: rank {rank} was ended by {name} in {meeting.phases()[rank]!r}{why}{go_on}",
        file=sys.stderr,
    )


def _store(machine: Machine, seconds: float) -> tuple[Any, int]:
    """The store, held by the first machine; ranks of one machine alone meet where no other machine can reach it."""
    limit = timedelta(seconds=seconds)
    if machine.index:
        return connected("this machine", machine.address, machine.port, seconds), machine.port
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1" if machine.machines == 1 else "", machine.port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"port {machine.port} cannot be used on this machine ({error.strerror}); set MASTER_PORT to another"
        ) from None
    port = listening.getsockname()[1]
    host = "127.0.0.1" if machine.machines == 1 else machine.address
    held = listening.detach()
    return TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=held), port


def _local(machine: Machine) -> dict[str, str]:
    """What ranks of one machine need that share its cores, unless somebody has said otherwise."""
    cores = max(1, processors() // machine.each)
    found = {"OMP_NUM_THREADS": str(cores)}
    if machine.machines == 1 and sys.platform in LOOPBACK:
        found["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    return {name: value for name, value in found.items() if name not in os.environ}


@contextmanager
def _forwarded(pids: Sequence[int], before: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Meanwhile Ctrl-C, SIGTERM and SIGHUP go to the ranks, which lead sessions of their own; the third ends them.

    before: the handlers that stand again afterwards.
    """
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for pid in pids:
            try:
                os.kill(pid, number if len(asked) < ENOUGH else signal.SIGKILL)
            except ProcessLookupError:
                continue

    for number in FORWARDED:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
