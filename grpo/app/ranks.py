"""A command on several ranks: who starts the processes, and what each of them does around its part of a run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from grpo.app.settings import Resolved
from grpo.distributed.facts import settings, versions
from grpo.distributed.places import Machine, Place
from grpo.errors import ConfigError, RanksLost
from grpo.run.progress import told

if TYPE_CHECKING:
    from grpo.distributed.meeting import Meeting

OK, FAILED, BAD_SETTINGS = 0, 1, 2

# torch.distributed takes a second to import: below, where there are several ranks.


class Ended(SystemExit):
    """SIGTERM before a run listens to it: another rank has failed, and what was begun is put away on the way out."""


def variables(timeout: float | None, shared_gpu: bool) -> dict[str, str]:
    """What the flags of a command say to its ranks."""
    from grpo.distributed import group

    found = {} if timeout is None else {group.TIMEOUT: f"{timeout:g}"}
    return found | ({group.SHARED_GPU: "1"} if shared_gpu else {})


def start(machine: Machine, words: Sequence[str], variables: Mapping[str, str], planned: Resolved | None) -> int:
    """Start the ranks of this machine with the same words; the exit code of the first that fails.

    planned: the settings where they are known already: what is wrong with them is said once, and nothing is started.
    """
    from grpo.distributed.start import start as start_processes

    if planned is not None:
        expect_work(planned.config.groups_per_step, machine.ranks)
        planned.config.expect_ranks(machine.ranks)
    return start_processes(machine, [sys.executable, "-m", "grpo", *words], variables)


def take_part(place: Place, variables: Mapping[str, str], job: Callable[[], int]) -> int:
    """Do the job as one rank of several; its exit code. Where one cannot start, all end with a line that says why."""
    from grpo.distributed import group

    os.environ.update(place.variables() | dict(variables))
    before = signal.signal(signal.SIGTERM, _end)
    code = FAILED
    try:
        group.arrive()
        code = job()
    except ConfigError as error:
        say(f"{group.excuse(told(error)) or f'rank {place.rank}: '}{told(error)}")
        code = BAD_SETTINGS
    except RanksLost as error:
        say(told(error))
    except BaseException as error:
        group.excuse(told(error))
        raise
    finally:
        group.leave(lost=code == FAILED)
        signal.signal(signal.SIGTERM, before)
    return code


def expect_work(groups: int, ranks: int) -> None:
    """Refuse more ranks than groups of a step: some would have nothing to sample."""
    if groups < ranks:
        raise ConfigError(
            f"{ranks} ranks would share {groups} {'group' if groups == 1 else 'groups'} a step: some would have none "
            f"to sample; start {groups} at most, or raise groups_per_step"
        )


def expect_divided(resolved: Resolved) -> None:
    """Refuse to divide among ranks what one process has to keep anyway."""
    if resolved.config.shard != "none" and _meeting() is None:
        raise ConfigError(
            f"shard={resolved.config.shard} divides among ranks, and there is one; give --ranks, or leave it out"
        )


def expect_alike(resolved: Resolved) -> None:
    """Before a folder is made: refuse settings, code or data that differ between ranks, and ranks without work."""
    if (meeting := _meeting()) is None:
        return
    from grpo.distributed import group

    expect_work(resolved.config.groups_per_step, meeting.ranks)
    resolved.config.expect_ranks(meeting.ranks)
    named = {name if block == "task" else f"{block}.{name}": value for block, name, value, _ in resolved.table()}
    meeting.agree({**versions(), **settings(named)}, group.shares_gpu(), "comparing settings")


def say(why: str) -> None:
    """A line to standard error, in one go: ranks that print at the same time must not end up in each other's lines."""
    print(f"grpo: {why}\n", end="", file=sys.stderr, flush=True)


def excuse(why: str) -> str:
    """Tell the other ranks, where there are any, that this one cannot go on; its name, to begin a line with."""
    if _meeting() is None:
        return ""
    from grpo.distributed import group

    return group.excuse(why)


def _meeting() -> Meeting | None:
    """Where this process has met the other ranks; who has met none has not even imported what they meet by."""
    group = sys.modules.get("grpo.distributed.group")
    return None if group is None else group.arrived()


def examine(folder: Path) -> int:
    """`grpo doctor` as one rank of several: the chief prints what was tried; the exit code."""
    from grpo.distributed import group
    from grpo.distributed.proof import proofs

    meeting, ranks = group.arrive(), group.join()
    cards = meeting.agree(versions(), group.shares_gpu(), "examining")
    found = []
    for proof in proofs(ranks, cards, folder):
        found.append(proof)
        if ranks.chief:
            remedy = f"   → {proof.remedy}" if proof.remedy else ""
            print(f"{' ' if proof.sound else '✗'} {proof.what.ljust(10)}  {proof.value}{remedy}", flush=True)
    return OK if all(proof.sound for proof in found) else FAILED


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(FAILED)
