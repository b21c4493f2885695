"""Episodes of a fleet: endless streams of them, and whole ones from a list of starts.

    EpisodeStream   each stream plays one episode after the other, for ever; who uses it says when each begins and moves
    EpisodeRunner   starts ─► members of the fleet ─► step: live members only ─► how each episode ended
                       ▲                                            │
                       └──── next start ◄── episode ended ◄─────────┘

Neither knows who decides, or what is learned from it.

Letters: S streams, L live members, M members of a call, N episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from grpo.envs.action_repeat import repeated
from grpo.envs.fleet import Begun, EnvError, Fleet, Overlapping, Snapshot, Stepped, Tree
from grpo.envs.rules import EpisodeRules
from grpo.envs.spaces import joined, put, take, zeros

RESETS = 5
"""Times in a row that a stream tries to begin an episode before it gives up."""
REMEMBERED = 20
"""Whole episodes whose mean return is reported."""

Start: TypeAlias = int | Snapshot
"""Where an episode begins: the environment's reset with this seed, or a state that was visited."""


class CannotBegin(EnvError):
    """None of several episodes in a row could begin."""


class EpisodeStream:
    """S endless streams of episodes, each in a member of its own; an episode that fails is given up and counted."""

    def __init__(self, fleet: Fleet, count: int, seed_of: Callable[[int, int], int]) -> None:
        """seed_of: from a stream and the number of its episode to the episode's seed."""
        self._fleet, self._seed_of = fleet, seed_of
        self.over_S = np.ones(count, bool)
        """Whose next episode has yet to begin."""
        self._begun_S = np.zeros(count, np.int64)
        self.length_S, self.return_S = np.zeros(count, np.int64), np.zeros(count)
        """Of the running episodes."""
        self._seeds = [0] * count
        self._actions: list[list[np.ndarray]] = [[] for _ in range(count)]
        """Where the running episodes began and what was done since: enough to come back, also to an only copy."""
        self.env_steps, self.episodes = 0, 0
        """Steps made, and whole episodes played."""
        self.finished: list[tuple[float, int]] = []
        """(return, length) of the last whole episodes."""
        self.failures: list[str] = []
        """What went wrong since somebody last looked, who empties it."""

    def __len__(self) -> int:
        return len(self.over_S)

    @property
    def ended(self) -> int:
        """Episodes that are behind, also those that failed."""
        return int(np.maximum(self._begun_S - 1, 0).sum())

    def begin(self, streams: np.ndarray) -> Tree:
        """The next episode of these streams; one that cannot begin is passed over, a few times."""
        self.return_S[streams], self.length_S[streams] = 0.0, 0
        for _ in range(RESETS):
            chosen = [self._seed_of(s, int(self._begun_S[s])) for s in streams.tolist()]
            self._begun_S[streams] += 1
            for s, seed in zip(streams.tolist(), chosen, strict=True):
                self._seeds[s], self._actions[s] = seed, []
            begun = self._fleet.reset(streams, chosen)
            if not begun.errors:
                self.over_S[streams] = False
                return begun.observation
            self.failures += begun.errors.values()
        raise CannotBegin(f"no episode could begin in {RESETS} tries: {next(iter(begun.errors.values()))}")

    def step(self, streams: np.ndarray, action_M: np.ndarray) -> Stepped:
        """One action in the running episode of each of these streams."""
        return self._noted(streams, action_M, self._fleet.step(streams, action_M))

    def send(self, streams: np.ndarray, action_M: np.ndarray) -> Callable[[], Stepped]:
        """The same, begun: what is returned waits for it. Of a fleet that can be left alone meanwhile."""
        assert isinstance(self._fleet, Overlapping)
        wait = self._fleet.send(streams, action_M)
        return lambda: self._noted(streams, action_M, wait())

    def _noted(self, streams: np.ndarray, action_M: np.ndarray, stepped: Stepped) -> Stepped:
        for s, action in zip(streams.tolist(), action_M, strict=True):
            self._actions[s].append(action)
        self.return_S[streams] += stepped.reward_M
        self.length_S[streams] += 1
        self.over_S[streams] = ~stepped.going_M
        whole = streams[stepped.terminated_M | stepped.truncated_M]
        self.finished += [(float(self.return_S[s]), int(self.length_S[s])) for s in whole.tolist()]
        self.finished = self.finished[-REMEMBERED:]
        self.failures += stepped.errors.values()
        self.env_steps, self.episodes = self.env_steps + len(streams), self.episodes + len(whole)
        return stepped

    # --- going on later ---------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Numbers to go on from."""
        return {
            "over": self.over_S.tolist(),
            "begun": self._begun_S.tolist(),
            "length": self.length_S.tolist(),
            "return": self.return_S.tolist(),
            "seeds": list(self._seeds) if self._begun_S.any() else [],
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "finished": [list(item) for item in self.finished],
            "failures": list(self.failures),
        }

    def actions(self) -> list[np.ndarray]:
        """What was done in each stream's running episode, which leads back to where it is; none before the first."""
        space = self._fleet.action_space
        shape = (-1, *(space.shape or ()))
        return [np.array(made, space.dtype).reshape(shape) for made in self._actions] if self._begun_S.any() else []

    def load(self, values: Mapping[str, Any], actions: Sequence[Any]) -> Tree:
        """Play the running episodes up to where they were; what is seen there, None where none is running."""
        self._begun_S, self.length_S = np.array(values["begun"]), np.array(values["length"])
        self.return_S = np.array(values["return"], np.float64)
        self.finished = [(float(a), int(b)) for a, b in values["finished"]]
        # States of other versions may lack these: then nobody had waited or asked.
        self.over_S = np.array(values.get("over", [not values["seeds"]] * len(self)))
        self.env_steps, self.episodes = int(values.get("env_steps", 0)), int(values.get("episodes", 0))
        self.failures = list(values.get("failures", ()))
        if not values["seeds"]:
            return None
        self._seeds = [int(seed) for seed in values["seeds"]]
        made = [np.asarray(one) for one in actions]
        self._actions = [list(one) for one in made]
        live = np.flatnonzero(~self.over_S)
        if not len(live):
            return None
        begun = self._fleet.restore(live, [Snapshot(self._seeds[s], made[s]) for s in live.tolist()])
        if begun.errors:
            raise EnvError(f"the running episodes cannot be resumed: {next(iter(begun.errors.values()))}")
        return begun.observation


class EpisodeRunner:
    """One episode from each of N starts, by as many members as there are; L of them are live."""

    def __init__(self, fleet: Fleet, starts: Sequence[Start], rules: EpisodeRules) -> None:
        self._fleet, self._starts, self._rules = fleet, starts, rules
        rows = len(starts)
        self._waiting = 0
        """The next start that has not begun."""
        self.length_N, self.steps_N = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        """Decisions, and steps of the environment."""
        self.terminated_N, self.truncated_N = np.zeros(rows, bool), np.zeros(rows, bool)
        self.success_N = np.full(rows, np.nan)
        self.last = zeros(fleet.observation_space, rows)
        """What was seen at the end of each."""
        self.errors: dict[int, str] = {}
        self.longest = 0
        """Decisions of the live member that has made most."""
        self.member_L, self.row_L, self.observation = self._begun(np.arange(min(fleet.size, rows)))
        self.step_L = np.zeros(len(self.row_L), np.int64)

    def step(self, at: np.ndarray, actions: Any) -> Stepped:
        """One action of the live members `at`, for as many environment steps as it lasts."""
        times = self._rules.action_repeat
        return self._step(at, actions) if times == 1 else repeated(self._step, at, actions, times)

    def move(self, stepped: Stepped, made_L: np.ndarray) -> tuple[np.ndarray, int] | None:
        """Everybody on, by so many actions; where an episode ended, the next start takes over.

        Says who stays, and how many begin behind them; None: all stay.
        """
        self.step_L += made_L
        self.longest += int(made_L.max())
        self.observation = stepped.observation
        stay_L = stepped.going_M
        if stay_L.all():
            return None
        self._finish(~stay_L, stepped)
        member, row, seen = self._begun(self.member_L[~stay_L])
        self.member_L, self.row_L = np.append(self.member_L[stay_L], member), np.append(self.row_L[stay_L], row)
        self.step_L = np.append(self.step_L[stay_L], np.zeros(len(row), np.int64))
        self.observation = take(self.observation, stay_L)
        if len(row):
            self.observation = joined([self.observation, seen])
        self.longest = int(self.step_L.max(initial=0))
        return stay_L, len(row)

    def _step(self, at: np.ndarray, actions: Any) -> Stepped:
        stepped = self._fleet.step(self.member_L[at], actions)
        self.steps_N[self.row_L[at]] += 1
        if self._rules.end_on_success and stepped.success_M is not None:
            return replace(stepped, terminated_M=stepped.terminated_M | (stepped.success_M == 1.0))
        return stepped

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

    def _begun(self, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tree]:
        """Members that now play the next starts, their rows, what they see. A start that fails is a failed row."""
        member: list[int] = []
        row: list[int] = []
        seen: list[Tree] = []
        while len(members) and self._waiting < len(self._starts):
            rows = np.arange(self._waiting, min(self._waiting + len(members), len(self._starts)))
            self._waiting += len(rows)
            taken, members = members[: len(rows)], members[len(rows) :]
            begun = begin(self._fleet, taken, [self._starts[i] for i in rows.tolist()])
            self.errors |= {int(rows[at]): message for at, message in begun.errors.items()}
            fit = np.array([at not in begun.errors for at in range(len(rows))])
            member += taken[fit].tolist()
            row += rows[fit].tolist()
            seen.append(take(begun.observation, fit))
            members = np.append(members, taken[~fit])
        return np.array(member, np.int64), np.array(row, np.int64), joined(seen) if seen else None


def begin(fleet: Fleet, members: np.ndarray, starts: Sequence[Start]) -> Begun:
    """Each member at its start."""
    seeds = [start for start in starts if not isinstance(start, Snapshot)]
    if len(seeds) == len(starts):
        return fleet.reset(members, seeds)
    return fleet.restore(members, [start for start in starts if isinstance(start, Snapshot)])
