"""The seams: what a user's own models look like, and what a room builds from them. No base classes, only shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from grpo.core.arrays import Array
from grpo.rollouts import Rollouts, Scores

# --- what a user brings ---------------------------------------------------------------------------------------------


@runtime_checkable
class PolicyModel(Protocol):
    """Your policy. Lists are flat and equally long: each state stands beside its action, repeated once a try.

    A coin; a torch module brings `train`, `eval` and `to`:

    >>> import torch
    >>> class Coin(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.logits = torch.nn.Parameter(torch.zeros(2))
    ...     def generate_actions(self, states, num_actions_per_state, **kwargs):
    ...         sides = torch.distributions.Categorical(logits=self.logits)
    ...         return sides.sample((len(states), num_actions_per_state)).tolist()
    ...     def get_log_probabilities(self, states, actions):
    ...         return self.logits.log_softmax(0)[actions]
    ...     def get_parameters(self):
    ...         return dict(self.named_parameters())
    >>> isinstance(Coin(), PolicyModel)
    True

    Optional: `get_entropy` (`grpo.capabilities.GivesEntropy`; else entropy is estimated from log-probs) and `get_mask`
    (`GivesMask`), needed when log-probs have two dimensions: which of the (N, T) decisions were made.
    """

    def generate_actions(self, states: list[Any], num_actions_per_state: int, **kwargs: Any) -> list[list[Any]]: ...
    def get_log_probabilities(self, states: list[Any], actions: list[Any]) -> Array: ...
    def get_parameters(self) -> dict[str, Array]: ...
    def train(self) -> Any: ...
    def eval(self) -> Any: ...
    def to(self, device: Any) -> Any: ...


@runtime_checkable
class RewardModel(Protocol):
    """Your reward: one finite number for each (state, action).

    >>> class Heads:
    ...     def compute_rewards(self, states, actions):
    ...         return [float(action == 1) for action in actions]
    ...     def train(self): ...
    ...     def eval(self): ...
    ...     def to(self, device): ...
    >>> isinstance(Heads(), RewardModel), Heads().compute_rewards(["toss"] * 3, [0, 1, 1])
    (True, [0.0, 1.0, 1.0])
    """

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
        hint = " (a torch.nn.Module has train, eval and to)" if "to" in missing else ""
        raise TypeError(f"the {role} {type(thing).__name__} has no {names}; see grpo.protocols for what it needs{hint}")


# --- what a room builds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """Which places of a step are collected here, where several ranks share the work: an even run of them.

    >>> [list(Slots(rank, 3).of(7)) for rank in range(3)], list(Slots().of(2))
    ([[0, 1, 2], [3, 4], [5, 6]], [0, 1])
    >>> list(Slots(window=(2, 5)).of(7))
    [2, 3, 4]
    """

    rank: int = 0
    size: int = 1
    window: tuple[int, int] | None = None
    """Of the step's places only those from the first number up to before the second, where a step is asked for in
    parts; None: all."""

    def of(self, count: int) -> range:
        """Of so many places, those that are collected here; there may be none."""
        begin, end = (0, count) if self.window is None else self.window
        each, over = divmod(end - begin, self.size)
        first = begin + self.rank * each + min(self.rank, over)
        return range(first, first + each + (self.rank < over))


@dataclass(frozen=True)
class CollectRequest:
    """One request for tries."""

    step: int
    attempt: int = 0
    """0, then 1, 2, … when the same starts are asked for again because their groups had no signal."""
    starts: Sequence[Any] | None = None
    """Which starts; None: the source's next ones."""
    slots: Slots = Slots()
    """Which of the groups are collected here: all, unless the source can `collect_part` (`grpo.capabilities.Divides`).

    Groups keep the numbers of their places, and what is drawn for one follows from its place, not from who draws it.
    """


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


@dataclass(frozen=True)
class Part:
    """What one rank has collected of a step."""

    rollouts: Rollouts | None
    """Its rows, the groups numbered as in the whole step; None: none of the places was its own."""
    starts: Sequence[Any]
    """Everybody's."""
    beside: State = State({}, {})
    """What all ranks need of it besides: inputs in flat arrays, what metrics are made of."""
    finish: Callable[[Collected, Sequence[State]], Collected] | None = None
    """Called with everybody's rows, in the order of their places, and what each rank's part had beside it."""
    whole: Callable[[Sequence[State]], Collected] | None = None
    """Instead of both: makes the step of what all ranks had beside, which is then all that travels."""


class Ranks(Protocol):
    """The processes that carry out one run together. Each knows everything and does a share of the work.

    Every rank makes the same calls in the same order; a call returns on all of them or raises `grpo.errors.RanksLost`.
    `Alone` is the usual one; `grpo.distributed.group.join()` gives the one over torch.distributed.
    """

    @property
    def rank(self) -> int:
        """This process's number: 0, 1, …, size − 1."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def chief(self) -> bool:
        """Whether this is rank 0, which alone writes files and talks to people."""
        ...

    def gather(self, mine: State, what: str) -> list[State]:
        """What each rank gives, in the order of ranks, on every rank; arrays are on the CPU. `what`: told in errors."""
        ...

    def broadcast(self, chiefs: State | None, what: str) -> State:
        """What the chief gives, on every rank; the others give None."""
        ...

    def sum(self, tensors: Sequence[Array], what: str) -> None:
        """Each tensor becomes its sum over all ranks, in place; shapes, types and order are the same on every rank."""
        ...


class Alone:
    """One process: what it gives is what it gets.

    >>> ranks = Alone()
    >>> ranks.chief, ranks.size, ranks.gather(State({"done": 3}, {}), "how far")[0].values
    (True, 1, {'done': 3})
    """

    rank, size, chief = 0, 1, True

    def gather(self, mine: State, what: str) -> list[State]:
        """What was given."""
        return [mine]

    def broadcast(self, chiefs: State | None, what: str) -> State:
        """What was given."""
        assert chiefs is not None
        return chiefs

    def sum(self, tensors: Sequence[Array], what: str) -> None:
        """A sum of one."""


def part(arrays: Mapping[str, Array], name: str) -> dict[str, Array]:
    """Of a state's arrays those called `name/…`, by the rest of their names."""
    return {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}


def as_part(name: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The way back: these arrays as `name/…`, to stand beside other parts of a state."""
    return {f"{name}/{key}": array for key, array in arrays.items()}


@runtime_checkable
class SequencePolicy(Protocol):
    """Scores recorded decisions, differentiably: rows × decisions in, log-probs of the same shape out.

    A softmax over three arms, whose rows have the arm that was pulled as `inputs`:

    >>> import torch
    >>> from grpo.rollouts import by_cost
    >>> class Arms:
    ...     def __init__(self):
    ...         self.logits_V, self.version = torch.zeros(3, requires_grad=True), 0
    ...     def score(self, rows, entropy=False):
    ...         logp_V = self.logits_V.log_softmax(0)
    ...         return Scores(logp_NT=logp_V[rows.inputs][:, None])
    ...     def parameters(self):
    ...         return {"logits": self.logits_V}
    ...     def split(self, rows, limit, halvings=0):
    ...         return by_cost([1] * len(rows), limit, halvings)
    ...     def train(self): ...
    ...     def eval(self): ...
    >>> isinstance(Arms(), SequencePolicy)
    True
    """

    version: int
    """Updates so far; the trainer counts."""

    def score(self, rows: Rollouts, entropy: bool = False) -> Scores: ...
    def parameters(self) -> Mapping[str, Array]: ...
    def split(self, rows: Rollouts, limit: int | None, halvings: int = 0) -> list[Sequence[int]]:
        """Parts of at most `limit` (rows, or what the policy counts) halved so often; every row once. See by_rows."""
        ...

    def train(self) -> Any: ...
    def eval(self) -> Any: ...


@runtime_checkable
class Average(Protocol):
    """Weights that follow a policy's, a part of the way after every step; a checkpoint keeps them.

    >>> class Half:
    ...     def __init__(self, policy):
    ...         self._weights = {name: p.detach().clone() for name, p in policy.items()}
    ...     def keep_up(self, policy):
    ...         for name, own in self._weights.items():
    ...             own.lerp_(policy[name].detach(), 0.5)
    ...     def parameters(self):
    ...         return self._weights
    >>> issubclass(Half, Average)
    True
    """

    def keep_up(self, policy: Mapping[str, Any]) -> None: ...
    def parameters(self) -> Mapping[str, Any]: ...


@runtime_checkable
class Reference(Protocol):
    """The policy the KL is measured to: it does not learn, and follows the policy only when it is told to.

    `grpo.reference.FrozenReference.copy_of(policy)` is one for any policy that can be copied. By hand:

    >>> class Frozen:
    ...     def __init__(self, policy):
    ...         self.logits_V = policy.logits_V.detach().clone()
    ...     def score(self, rows):
    ...         return self.logits_V.log_softmax(0)[rows.inputs][:, None]
    ...     def sync(self, policy, alpha):
    ...         self.logits_V.lerp_(policy["logits"].detach(), alpha)  # α·policy + (1−α)·reference
    ...     def parameters(self):
    ...         return {"logits": self.logits_V}
    >>> issubclass(Frozen, Reference)
    True
    """

    def score(self, rows: Rollouts) -> Array: ...
    def sync(self, policy: Mapping[str, Array], alpha: float) -> None: ...
    def parameters(self) -> Mapping[str, Array]: ...


@runtime_checkable
class RolloutSource(Protocol):
    """Where tries come from; may own environments, engines, learners.

    All randomness comes from (seed, step, attempt), and `state` holds whatever else the next `collect` depends on.
    Four pulls a start, the last arm pays:

    >>> import torch
    >>> from grpo.seeding import mixed
    >>> class Pulls:
    ...     def __init__(self, policy, seed=0):
    ...         self.policy, self.seed, self.pulled = policy, seed, 0
    ...     @torch.no_grad()
    ...     def collect(self, request):
    ...         starts = [0, 1] if request.starts is None else list(request.starts)
    ...         seed = mixed(self.seed, request.step, request.attempt)
    ...         p_V = self.policy.logits_V.softmax(0)
    ...         draw = torch.Generator().manual_seed(seed)
    ...         arm_N = torch.multinomial(p_V, 4 * len(starts), replacement=True, generator=draw)
    ...         self.pulled += len(arm_N)
    ...         rollouts = Rollouts(
    ...             group_N=torch.arange(len(starts)).repeat_interleave(4),
    ...             mask_NT=torch.ones(len(arm_N), 1, dtype=torch.bool),
    ...             old_logp_NT=p_V.log()[arm_N][:, None],
    ...             reward_N=(arm_N == len(p_V) - 1).float(),
    ...             inputs=arm_N,
    ...         )
    ...         return Collected(rollouts, starts)
    ...     def state(self):
    ...         return State({"pulled": self.pulled}, {})
    ...     def load_state(self, state):
    ...         self.pulled = state.values["pulled"]
    ...     def metrics(self):
    ...         return {"pulled": float(self.pulled)}
    ...     def show(self, rows):
    ...         return [{"arm": arm} for arm in rows.inputs.tolist()]
    ...     def close(self): ...
    >>> issubclass(Pulls, RolloutSource)
    True

    What it may do besides stands in `grpo.capabilities`; `grpo.check(policy, source)` tries out what it must do.
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


# --- a policy outside of training ---------------------------------------------------------------------------


class Playing(Protocol):
    """A policy in several episodes that somebody else plays: what it remembers of each is in here."""

    @property
    def remembers(self) -> bool:
        """Whether its next decision depends on more than what will be seen."""
        ...

    def decide(self, observation: Any, greedy: bool = True) -> Any:
        """Actions for what all of them see, a row each."""
        ...

    def forget(self, first_M: Any) -> None:
        """Where True, another episode begins."""
        ...


class Player(Protocol):
    """A policy as somebody asks it who plays the environment himself."""

    def rows(self, observation: Any) -> tuple[Any, bool]:
        """One observation or several, a row each, and whether it was one."""
        ...

    def players(self, rows: int, seed: int) -> Playing:
        """The policy in so many episodes."""
        ...


class PreflightFinding(Protocol):
    """One line of a pre-flight: note, warning or problem, what was found, and what to do about it."""

    @property
    def level(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def remedy(self) -> str: ...


class Evaluated(Protocol):
    """What an evaluation found: rows of mean and interval, how many tries failed, and why the first one did."""

    @property
    def failed(self) -> int: ...
    @property
    def why(self) -> str: ...
    def table(self) -> list[dict[str, Any]]: ...
