"""Playing whole episodes with a fleet, and the record that they leave.

    starts ─► seats: members of the fleet ─► look, decide, step: live members only ─► Episodes (N × T)
                 ▲                                            │
                 └──── next start ◄── episode ended ◄─────────┘

An episode that fails is a row with an error, and the others go on. Nothing here knows what an advantage is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.fleet import Begun, Fleet, Snapshot, Stepped, Tree
from grpo.envs.spaces import each, joined, put, take, zeros

Start = int | Snapshot
"""Where an episode begins: the environment's reset with this seed, or a state that was visited."""

INSIDE = "\x1f"
"""Between the keys of an observation inside an observation; no environment writes it."""


@dataclass(frozen=True)
class Episodes:
    """N episodes of up to T decisions, as played."""

    observation: Tree
    """(N, T, …), as the policy saw them."""
    raw: Tree
    """(N, T, …), as the environment gave them; the same arrays where nothing is scaled."""
    action_NT: np.ndarray
    """(N, T, …), as the head records them."""
    logp_NT: np.ndarray
    out_NTF: np.ndarray | None
    """The policy's numbers for each decision, where they were asked for."""
    reward_NT: np.ndarray
    mask_NT: np.ndarray
    offset_N: np.ndarray
    """Decisions made before the row begins: 0, or where a continuation branched off."""
    terminated_N: np.ndarray
    truncated_N: np.ndarray
    success_N: np.ndarray
    """1, 0, or NaN where the environment does not tell."""
    last: Tree
    """(N, …): what was seen after the last decision, raw."""
    errors: Mapping[int, str]
    """Row → what went wrong."""
    steps_N: np.ndarray
    """Environment steps of each row; more than its decisions where an action is held."""

    @property
    def env_steps(self) -> int:
        """Environment steps in all."""
        return int(self.steps_N.sum())

    def __len__(self) -> int:
        return len(self.mask_NT)

    @property
    def return_N(self) -> np.ndarray:
        """Sum of the environment's rewards."""
        return np.asarray(np.where(self.mask_NT, self.reward_NT, 0.0).sum(1))

    @property
    def length_N(self) -> np.ndarray:
        """Decisions made."""
        return np.asarray(self.mask_NT.sum(1))

    @property
    def ok_N(self) -> np.ndarray:
        """Rows that did not fail."""
        ok_N = np.ones(len(self), bool)
        ok_N[list(self.errors)] = False
        return ok_N


def play(
    fleet: Fleet,
    policy: ActorPolicy,
    scaling: Scaling,
    starts: Sequence[Start],
    random: np.random.Generator | None,
    *,
    action_repeat: int = 1,
    end_on_success: bool = False,
    keep_out: bool = False,
    visit: Callable[[Seats], None] | None = None,
) -> Episodes:
    """One episode from each start; without `random` with the most likely actions. `visit` sees every decision."""
    seats = Seats(fleet, policy, starts)
    record = Record(len(starts), min(fleet.horizon or 256, 256))
    while len(seats.row_L):
        if visit is not None:
            visit(seats)
        seen = scaling(seats.observation)
        acted = policy.act(seen, random, seats.memory)
        actions, size = policy.head.to_env(acted.recorded), policy.columns.size
        at, raw, made_L = np.arange(len(seats.row_L)), seats.observation, np.zeros(len(seats.row_L), np.int64)
        stepped: Stepped | None = None
        for i in range(size):  # the chunk: those whose episode goes on act again, without looking
            mine = at * size + i
            now = _held(fleet, seats, at, actions[mine], action_repeat, end_on_success)
            moment = {"action": acted.recorded[mine], "logp": acted.logp_M[mine], "reward": now.reward_M}
            moment |= named("seen", seen)
            if seen is not raw:
                moment |= named("raw", raw)
            if keep_out:
                moment["out"] = acted.out_MF[mine]
            record.write(seats.step_L[at] + i, seats.row_L[at], seats.longest + i, moment)
            made_L[at] += 1
            stepped = now if stepped is None else _later(stepped, at, now)
            going = _going(now)
            if i == size - 1 or not going.any():
                break
            at, raw = at[going], take(now.observation, going)
            seen = scaling(raw)
        assert stepped is not None
        seats.move(stepped, acted.memory, made_L)
    if not record.begun:
        rows = len(starts)
        record.write(np.zeros(rows, np.int64), np.arange(rows), 0, _nothing(fleet, policy, rows, keep_out))
    return _episodes(record, seats, starts, action_repeat)


class Seats:
    """Who plays which episode, and how each ended. Live members only; arrays over them end in L."""

    def __init__(self, fleet: Fleet, policy: ActorPolicy, starts: Sequence[Start]) -> None:
        self._fleet, self._policy, self._starts = fleet, policy, starts
        rows = len(starts)
        self.waiting = 0
        """The next start that has not begun."""
        self.length_N = np.zeros(rows, np.int64)
        self.terminated_N, self.truncated_N = np.zeros(rows, bool), np.zeros(rows, bool)
        self.success_N = np.full(rows, np.nan)
        self.last = zeros(fleet.observation_space, rows)
        self.errors: dict[int, str] = {}
        self.steps_N = np.zeros(rows, np.int64)
        self.longest = 0
        self.member_L, self.row_L, self.observation = self._seated(np.arange(min(fleet.size, rows)))
        self.step_L = np.zeros(len(self.row_L), np.int64)
        self.memory = policy.begin(len(self.row_L))

    def move(self, stepped: Stepped, memory: Any, made_L: np.ndarray) -> None:
        """Everybody one decision on, of so many actions; episodes that ended give their seat to the next start."""
        self.step_L += made_L
        self.longest += int(made_L.max())
        done_L = stepped.terminated_M | stepped.truncated_M
        if stepped.errors:
            done_L[list(stepped.errors)] = True
        self.observation, self.memory = stepped.observation, memory
        if not done_L.any():
            return
        self._finish(done_L, stepped)
        stay_L = ~done_L
        member, row, seen = self._seated(self.member_L[done_L])
        self.member_L, self.row_L = np.append(self.member_L[stay_L], member), np.append(self.row_L[stay_L], row)
        self.step_L = np.append(self.step_L[stay_L], np.zeros(len(row), np.int64))
        self.observation = take(self.observation, stay_L)
        if self.memory is not None:
            self.memory = self._policy.seated(self.memory, stay_L, len(row))
        if len(row):
            self.observation = joined([self.observation, seen])
        self.longest = int(self.step_L.max(initial=0))

    def _finish(self, done_L: np.ndarray, stepped: Stepped) -> None:
        rows = self.row_L[done_L]
        self.length_N[rows] = self.step_L[done_L]
        self.terminated_N[rows], self.truncated_N[rows] = stepped.terminated_M[done_L], stepped.truncated_M[done_L]
        if stepped.success_M is not None:
            self.success_N[rows] = stepped.success_M[done_L]
        put(self.last, rows, take(stepped.observation, done_L))
        for at, message in stepped.errors.items():
            row = int(self.row_L[at])
            self.errors[row], self.length_N[row] = message, self.step_L[at] - 1

    def _seated(self, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tree]:
        """Members that now play the next starts, their rows, what they see. A start that fails is a failed row."""
        member: list[int] = []
        row: list[int] = []
        seen: list[Tree] = []
        while len(members) and self.waiting < len(self._starts):
            rows = np.arange(self.waiting, min(self.waiting + len(members), len(self._starts)))
            self.waiting += len(rows)
            sitting, members = members[: len(rows)], members[len(rows) :]
            begun = begin(self._fleet, sitting, [self._starts[i] for i in rows.tolist()])
            self.errors |= {int(rows[at]): message for at, message in begun.errors.items()}
            fit = np.array([at not in begun.errors for at in range(len(rows))])
            member += sitting[fit].tolist()
            row += rows[fit].tolist()
            seen.append(take(begun.observation, fit))
            members = np.append(members, sitting[~fit])
        return np.array(member, np.int64), np.array(row, np.int64), joined(seen) if seen else None


def begin(fleet: Fleet, members: np.ndarray, starts: Sequence[Start]) -> Begun:
    """Each member at its start."""
    seeds = [start for start in starts if not isinstance(start, Snapshot)]
    if len(seeds) == len(starts):
        return fleet.reset(members, seeds)
    return fleet.restore(members, [start for start in starts if isinstance(start, Snapshot)])


def _held(
    fleet: Fleet, seats: Seats, at: np.ndarray, actions: Any, times: int, end_on_success: bool = False
) -> Stepped:
    """The same action for several environment steps, until the episode ends; rewards add up."""
    stepped = _step(fleet, seats, at, actions, end_on_success)
    for _ in range(times - 1):
        going = np.flatnonzero(_going(stepped))
        if not len(going):
            break
        stepped = _later(stepped, going, _step(fleet, seats, at[going], actions[going], end_on_success))
    return stepped


def _step(fleet: Fleet, seats: Seats, at: np.ndarray, actions: Any, end_on_success: bool) -> Stepped:
    """One environment step of the live members `at`."""
    stepped = fleet.step(seats.member_L[at], actions)
    seats.steps_N[seats.row_L[at]] += 1
    if end_on_success and stepped.success_M is not None:
        return replace(stepped, terminated_M=stepped.terminated_M | (stepped.success_M == 1.0))
    return stepped


def _going(stepped: Stepped) -> np.ndarray:
    """Whose episode goes on."""
    going_M: np.ndarray = ~(stepped.terminated_M | stepped.truncated_M)
    going_M[list(stepped.errors)] = False
    return going_M


def _later(stepped: Stepped, at: np.ndarray, further: Stepped) -> Stepped:
    """What is known after the members `at` have made a further step; rewards add up."""
    observation = each(stepped.observation, np.copy)
    put(observation, at, further.observation)
    reward_M, terminated_M, truncated_M = (
        x.copy() for x in (stepped.reward_M, stepped.terminated_M, stepped.truncated_M)
    )
    reward_M[at] += further.reward_M
    terminated_M[at], truncated_M[at] = further.terminated_M, further.truncated_M
    success_M = stepped.success_M
    if further.success_M is not None:
        success_M = np.full(len(reward_M), np.nan) if success_M is None else success_M.copy()
        success_M[at] = further.success_M
    errors = {**stepped.errors, **{int(at[i]): text for i, text in further.errors.items()}}
    return Stepped(observation, reward_M, terminated_M, truncated_M, success_M, errors)


class Record:
    """Arrays over (step, row) that grow in steps; one assignment writes all live members."""

    def __init__(self, rows: int, steps: int) -> None:
        self._rows, self._steps = rows, steps
        self._arrays: dict[str, np.ndarray] = {}

    def write(self, step_L: np.ndarray, row_L: np.ndarray, longest: int, moment: Mapping[str, np.ndarray]) -> None:
        """What the live members saw and did at their steps, of which `longest` is the largest."""
        if longest >= self._steps:
            for name, array in self._arrays.items():
                self._arrays[name] = np.concatenate([array, np.zeros_like(array)])
            self._steps *= 2
        at_L = step_L * self._rows + row_L
        for name, value in moment.items():
            if name not in self._arrays:
                self._arrays[name] = np.zeros((self._steps * self._rows, *value.shape[1:]), value.dtype)
            self._arrays[name][at_L] = value

    @property
    def begun(self) -> bool:
        """Whether anything was written."""
        return bool(self._arrays)

    def table(self, name: str, steps: int, copy: bool = True) -> np.ndarray | None:
        """(N, T, …), cut to `steps`; None where nothing was written. Without `copy` as it lies here."""
        array = self._arrays.get(name)
        if array is None:
            return None
        cut = np.swapaxes(array[: steps * self._rows].reshape(steps, self._rows, *array.shape[1:]), 0, 1)
        return np.ascontiguousarray(cut) if copy else cut

    def tree(self, name: str, steps: int, copy: bool = True) -> Tree:
        """An observation's tables, laid out as it was; None where nothing was written."""
        if name in self._arrays:
            return self.table(name, steps, copy)
        parts = {
            key.removeprefix(name + INSIDE).split(INSIDE)[0] for key in self._arrays if key.startswith(name + INSIDE)
        }
        return {part: self.tree(name + INSIDE + part, steps, copy) for part in sorted(parts)} or None


def _nothing(fleet: Fleet, policy: ActorPolicy, rows: int, keep_out: bool) -> dict[str, np.ndarray]:
    """The moment of a step in which no episode could begin: rows to hold the errors."""
    head = policy.head
    moment = {"action": np.zeros((rows, *head.shape), head.dtype), "logp": np.zeros(rows, np.float32)}
    moment |= {"reward": np.zeros(rows)} | named("seen", zeros(fleet.observation_space, rows))
    return moment | ({"out": np.zeros((rows, head.size), np.float32)} if keep_out else {})


def _episodes(record: Record, seats: Seats, starts: Sequence[Start], action_repeat: int) -> Episodes:
    steps = max(int(seats.length_N.max()), 1)
    action_NT, logp_NT, reward_NT = (record.table(name, steps) for name in ("action", "logp", "reward"))
    assert action_NT is not None and logp_NT is not None and reward_NT is not None
    seen, raw = record.tree("seen", steps), record.tree("raw", steps)
    return Episodes(
        observation=seen,
        raw=seen if raw is None else raw,
        action_NT=action_NT,
        logp_NT=logp_NT,
        out_NTF=record.table("out", steps),
        reward_NT=reward_NT,
        mask_NT=np.arange(steps)[None] < seats.length_N[:, None],
        offset_N=np.array([len(s.actions) // action_repeat if isinstance(s, Snapshot) else 0 for s in starts]),
        terminated_N=seats.terminated_N,
        truncated_N=seats.truncated_N,
        success_N=seats.success_N,
        last=seats.last,
        errors=seats.errors,
        steps_N=seats.steps_N,
    )


# --- observations are an array, or a dict of observations -----------------------------------------------------------


def named(name: str, tree: Tree) -> dict[str, np.ndarray]:
    """An observation's arrays under names of their own, as `Record` keeps them."""
    if not isinstance(tree, dict):
        return {name: tree}
    return {key: x for part, inner in tree.items() for key, x in named(name + INSIDE + part, inner).items()}
