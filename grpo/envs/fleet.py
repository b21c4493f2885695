"""Several copies of one environment, stepped together: the seam between environments and whoever plays in them.

A fleet has `size` members. Each is reset, stepped and saved by number, and only the members that are named move: an
episode that has ended waits until it is reset. Nothing resets by itself, so every episode is counted whole.

    fleet = make_fleet("CartPole-v1", size=8)
    begun = fleet.reset([0, 1, 2], seeds=[7, 7, 9])          # members 0 and 1 start from the same state
    stepped = fleet.step([0, 2], actions=np.array([1, 0]))   # member 1 stands still

A member that raises, dies, hangs or answers nonsense is reported in `errors`, by its position in the call; the others
go on, and it is fit again after its next `reset`.

Letters: M members of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym
import numpy as np

Tree: TypeAlias = Any
"""Observations of M members: an array (M, …), or a dict of such arrays where the space is a Dict."""


class EnvError(ValueError):
    """An environment that cannot be used, in one line that says which, where and what to do."""


@dataclass(frozen=True)
class Begun:
    """What members saw after a reset or a restore."""

    observation: Tree
    """One row a member, in the order asked; zeros where it failed."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Position in the call → what went wrong, naming member and step."""


@dataclass(frozen=True)
class Stepped:
    """What members saw after a step. Terminated and truncated are kept apart; together they count as terminated."""

    observation: Tree
    reward_M: np.ndarray
    terminated_M: np.ndarray
    truncated_M: np.ndarray
    success_M: np.ndarray | None = None
    """1 or 0 where the environment tells (`info["is_success"]` or `info["success"]`), else NaN; None: nobody told."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Position in the call → what went wrong. Its row is zeros, and neither terminated nor truncated."""

    @property
    def going_M(self) -> np.ndarray:
        """Whose episode goes on."""
        going_M: np.ndarray = ~(self.terminated_M | self.truncated_M)
        going_M[list(self.errors)] = False
        return going_M


@dataclass(frozen=True)
class Snapshot:
    """A moment of an episode that members can be put back into. Seed and actions always say how it was reached."""

    seed: int
    actions: np.ndarray
    """(T, …): every action since the reset."""
    state: Mapping[str, np.ndarray] | None = None
    """The environment's own state, where it can be read and written; None: restored by playing the actions again."""


@runtime_checkable
class Fleet(Protocol):
    """Several copies of one environment."""

    name: str
    """For messages: the environment's id or class."""
    size: int
    """Members, numbered 0 … size − 1."""
    observation_space: gym.Space[Any]
    """Of one member."""
    action_space: gym.Space[Any]
    """Of one member."""
    horizon: int | None
    """Steps after which the environment truncates; None: it does not say."""

    def reset(self, members: Sequence[int] | np.ndarray, seeds: Sequence[int]) -> Begun: ...
    def step(self, members: Sequence[int] | np.ndarray, actions: Any) -> Stepped: ...
    def snapshot(self, members: Sequence[int] | np.ndarray) -> list[Snapshot]: ...
    def restore(self, members: Sequence[int] | np.ndarray, snapshots: Sequence[Snapshot]) -> Begun: ...
    def close(self) -> None: ...


@runtime_checkable
class Overlapping(Protocol):
    """What a fleet has besides that steps elsewhere: something else can be done meanwhile."""

    def send(self, members: Sequence[int] | np.ndarray, actions: Any) -> Callable[[], Stepped]:
        """Begin a step; what is returned waits for it. Nothing else can be asked of the fleet before."""
        ...
