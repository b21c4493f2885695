"""The seams: what a user's own models look like, and what a room builds from them. No base classes, only shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from grpo.core.arrays import Array
from grpo.rollouts import Rollouts, Scores

# --- what a user brings ---------------------------------------------------------------------------------------------


class PolicyModel(Protocol):
    """Your policy. Lists are flat and equally long: each state stands beside its action, repeated once a try.

    Optional: `get_entropy(states, actions)` (else entropy is estimated from log-probs) and `get_mask(states, actions)`,
    needed when log-probs have two dimensions: which of the (N, T) decisions were made.
    """

    def generate_actions(self, states: list[Any], num_actions_per_state: int, **kwargs: Any) -> list[list[Any]]: ...
    def get_log_probabilities(self, states: list[Any], actions: list[Any]) -> Array: ...
    def get_parameters(self) -> dict[str, Array]: ...
    def train(self) -> Any: ...
    def eval(self) -> Any: ...
    def to(self, device: Any) -> Any: ...


class RewardModel(Protocol):
    """Your reward: one finite number for each (state, action)."""

    def compute_rewards(self, states: list[Any], actions: list[Any]) -> Array: ...
    def train(self) -> Any: ...
    def eval(self) -> Any: ...
    def to(self, device: Any) -> Any: ...


POLICY_METHODS = ("generate_actions", "get_log_probabilities", "get_parameters", "train", "eval", "to")
REWARD_METHODS = ("compute_rewards", "train", "eval", "to")


def expect_methods(thing: object, methods: Sequence[str], role: str) -> None:
    """Raise with the list of what is missing."""
    missing = [name for name in methods if not callable(getattr(thing, name, None))]
    if missing:
        names = ", ".join(f"{name}()" for name in missing)
        raise TypeError(f"the {role} {type(thing).__name__} has no {names}; see grpo.protocols for what it needs")


# --- what a room builds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectRequest:
    """One request for tries."""

    step: int
    attempt: int = 0
    """0, then 1, 2, … when the same starts are asked for again because their groups had no signal."""
    starts: Sequence[Any] | None = None
    """Which starts; None: the source's next ones."""


@dataclass(frozen=True)
class Collected:
    """Tries, and the starts they came from: one for each group id 0, 1, …"""

    rollouts: Rollouts
    starts: Sequence[Any]


@dataclass(frozen=True)
class State:
    """What must be kept to go on later: JSON-able values and named arrays."""

    values: Mapping[str, Any]
    arrays: Mapping[str, Array]


class SequencePolicy(Protocol):
    """Scores recorded decisions, differentiably."""

    version: int

    def score(self, rows: Rollouts, entropy: bool = False) -> Scores: ...
    def parameters(self) -> Mapping[str, Array]: ...
    def split(self, rows: Rollouts, limit: int | None, halvings: int = 0) -> list[Sequence[int]]:
        """Parts of at most `limit` (rows, or what the policy counts) halved so often; every row once. See by_cost."""
        ...

    def train(self) -> Any: ...
    def eval(self) -> Any: ...


class Reference(Protocol):
    """The policy the KL is measured to."""

    def score(self, rows: Rollouts) -> Array: ...
    def sync(self, policy: Mapping[str, Array], alpha: float) -> None: ...
    def parameters(self) -> Mapping[str, Array]: ...


class RolloutSource(Protocol):
    """Where tries come from; may own environments, engines, learners.

    Optional: `headline`, names of its metrics that a person wants to see first; `measures()`, numbers that depend on
    the machine; `make_room()`, let go of memory that is kept between steps, and whether there was any.
    """

    def collect(self, request: CollectRequest) -> Collected: ...
    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...
    def metrics(self) -> Mapping[str, float | None]: ...
    def show(self, rows: Rollouts) -> list[dict[str, Any]]: ...
    def close(self) -> None: ...


class Phase(Protocol):
    """A stopwatch the run may hand to the trainer: `with phase("collect"): …`."""

    def __call__(self, name: str) -> AbstractContextManager[Any]: ...


def no_phase(name: str) -> AbstractContextManager[Any]:
    """The trainer's default: no stopwatch."""
    return nullcontext()
