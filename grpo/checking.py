"""`grpo.check`: whether a policy and a source keep the promises of `grpo.protocols`, for people who write a room."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo.capabilities import ScoresRows
from grpo.errors import warn
from grpo.models import ModelPolicy, ModelSource
from grpo.promises import NEEDED, PROMISES, Flaw, Room, flaws_of
from grpo.reference import FrozenReference

GROUP_SIZE = 4
"""Tries from each state, where a user's own models are checked."""


@dataclass(frozen=True)
class CheckReport:
    """What `check` found; `print(report)` says it in words."""

    flaws: tuple[Flaw, ...]
    promises: tuple[str, ...]
    """Those that were tried."""

    @property
    def sound(self) -> bool:
        """Whether there is nothing serious."""
        return not any(flaw.serious for flaw in self.flaws)

    def __str__(self) -> str:
        verdict = f"{len(self.promises)} promises tried, {len(self.flaws)} flaws"
        return "\n".join([*map(str, self.flaws), verdict])


class CheckFailed(AssertionError):
    """A promise that is broken; `report` has them all."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__(f"this room does not keep its promises\n{report}")
        self.report = report


def check(
    policy: Any,
    source: Any,
    reference: Any = None,
    *,
    states: Sequence[Any] | None = None,
    raises: bool = True,
) -> CheckReport:
    """Try out a SequencePolicy and a RolloutSource, or your PolicyModel and RewardModel with some `states`.

    Raises `CheckFailed` with the whole list where something is wrong, and warns of what is only doubtful;
    `raises=False` returns the list. Weights and global randomness are as before in the end; the source has collected a
    few times and is closed, so train with a fresh one.
    """
    room = _room(policy, source, reference, states)
    tried, flaws = [], []
    with _own_randomness():
        for promise in PROMISES:
            tried.append(promise.__name__)
            flaws += flaws_of(promise, room)
            if promise in NEEDED and any(flaw.serious for flaw in flaws):
                break  # nothing to try the others on
    report = CheckReport(tuple(flaws), tuple(tried))
    if raises and not report.sound:
        raise CheckFailed(report)
    if raises:
        for flaw in report.flaws:
            warn(str(flaw))
    return report


def _room(policy: Any, source: Any, reference: Any, states: Sequence[Any] | None) -> Room:
    """Users' models as the trainer would seat them."""
    scores_rows = isinstance(policy, ScoresRows)
    seat = policy if scores_rows else ModelPolicy(policy)
    if isinstance(seat, ModelPolicy) and not hasattr(source, "collect"):
        if not states:
            raise TypeError("check() needs states= beside a reward model: a few that your policy can be asked about")
        source = ModelSource(seat, source, GROUP_SIZE, states, len(states))
    if reference is not None and not isinstance(reference, ScoresRows):
        reference = FrozenReference(ModelPolicy(reference))
    return Room(seat, source, reference)


@contextmanager
def _own_randomness() -> Iterator[None]:
    """The global generators as they were, afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
