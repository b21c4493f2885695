"""What ranks do together or not at all: an error on one of them is raised on every one. Nothing here needs tensors.

Alone, each function does what it would without ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module

from grpo.errors import ConfigError, PassUnfinished, RankFailed, RanksLost, Refused, line
from grpo.protocols import Alone, Ranks, State

NETWORK = ("DistBackendError", "DistNetworkError", "DistStoreError")
"""Errors of torch.distributed, which is not imported here."""


def here() -> Ranks:
    """The ranks that this process is one of, as the variables of torchrun, srun, … say; alone where there are none."""
    if import_module("grpo.distributed.places").found(os.environ) is None:
        return Alone()
    joined: Ranks = import_module("grpo.distributed.group").join()
    return joined


def attempted(ranks: Ranks, what: str, work: Callable[[], State]) -> list[State]:
    """Do something on every rank and gather what comes of it; where it fails on one, all of them raise."""
    wrong: Exception | None = None
    try:
        mine = work()
    except RanksLost:  # nobody would hear of it
        raise
    except Exception as error:
        wrong, mine = error, _failed(error)
    try:
        found = ranks.gather(mine, what)
    except RanksLost as lost:
        if wrong is None:
            raise
        if of_the_network(wrong):
            raise (lost.others if isinstance(lost, PassUnfinished) else lost) from wrong
        if isinstance(lost, PassUnfinished) and _out_of_memory(wrong):
            raise PassUnfinished(what, lost.remedy, lost.others, "out of memory") from wrong
        raise wrong from None  # which is why
    if wrong is not None:
        raise wrong
    for rank, state in enumerate(found):
        _expect_done(rank, what, state)
    return found


def _failed(error: Exception) -> State:
    """What other ranks are told of an error, and whether it is what was asked for that cannot be."""
    refused = isinstance(error, Refused)
    return State({"failed": str(error) if refused else line(error), "refused": refused}, {})


def _expect_done(rank: int, what: str, state: State) -> None:
    """Raise where that rank has failed."""
    if "failed" in state.values:
        kind = ConfigError if state.values["refused"] else RankFailed
        raise kind(f"rank {rank} failed at {what}: {state.values['failed']}")


def of_the_network(error: Exception) -> bool:
    """Whether it is what PyTorch says where a rank is gone that a collective of its own waits for."""
    return type(error).__name__ in NETWORK or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _out_of_memory(error: Exception) -> bool:
    """Whether it is torch's, which has not been imported where nobody computes with it."""
    return "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError)


def by_chief(ranks: Ranks, what: str, work: Callable[[], State]) -> State:
    """What the chief finds, on every rank; where it fails, all of them raise."""
    wrong: Exception | None = None
    mine: State | None = None
    if ranks.chief:
        try:
            mine = work()
        except Exception as error:
            wrong, mine = error, _failed(error)
    found = ranks.broadcast(mine, what)
    if wrong is not None:
        raise wrong
    _expect_done(0, what, found)
    return found
