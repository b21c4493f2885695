"""What fleets over environments that others have batched share.

A batched environment steps everybody and starts the next episode by itself, wherever it likes. A fleet promises the
opposite: members move only when named, an episode that has ended shows its last observation and waits, and a reset
starts from the seed that was asked for. The fleets made from this one keep that promise or say in one line why they
cannot.

Letters: M members, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from grpo.envs.fleet import Begun, EnvError, Snapshot, Stepped, Tree
from grpo.envs.serial import numbered
from grpo.envs.spaces import bounds, leaves, numeric, put, zeros
from grpo.errors import line
from grpo.rollouts import LARGEST_REWARD
from grpo.run.signals import from_a_person

Members: TypeAlias = Sequence[int] | np.ndarray

_SUCCESS = ("is_success", "success")


class BatchedFleet:
    """Who waits, which actions led here, and what is fit to be seen."""

    _lockstep = False
    """Whether members cannot stand still while others play."""

    def __init__(
        self, name: str, size: int, observes: gym.Space[Any], acts: gym.Space[Any], horizon: int | None
    ) -> None:
        if not isinstance(acts, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
            raise EnvError(f"{name}: its batched form takes actions from {acts}, not arrays; use vector='serial'")
        if numeric(observes) != observes:
            raise EnvError(f"{name}: its batched form shows {observes}, not all of it arrays; use vector='serial'")
        self.name, self.size, self.horizon = name, size, horizon
        self.observation_space: gym.Space[Any] = observes
        self.action_space: gym.Space[Any] = acts
        self._low, self._high = bounds(acts)
        self._over_M = np.ones(size, bool)  # nobody has begun, so everybody waits
        self._length_M = np.zeros(size, np.intp)
        self._seed_M = [0] * size
        self._action_MT = np.zeros((size, 64, *(acts.shape or ())), acts.dtype)

    def reset(self, members: Members, seeds: Sequence[int]) -> Begun:
        """Begin an episode for each named member; equal seeds, equal starts."""
        members = self._numbers(members)
        if not members.size:
            return Begun(zeros(self.observation_space, 0))
        own, problem = [int(seed) for seed in seeds], ""
        try:
            observation = self._start(members, own)
        except EnvError:
            raise
        except BaseException as error:  # anything an environment may raise
            if from_a_person(error):
                raise
            observation, problem = zeros(self.observation_space, len(members)), f"reset raised {line(error)}"
        self._over_M[members], self._length_M[members] = bool(problem), 0
        for member, seed in zip(members.tolist(), own, strict=True):
            self._seed_M[member] = seed
        if problem:
            return Begun(observation, {p: self._say(m, problem) for p, m in enumerate(members)})
        return Begun(observation, self._withdraw(members, observation))

    def step(self, members: Members, actions: Any) -> Stepped:
        """One action for each named member; the others stand still."""
        members, action_M = self._numbers(members), np.asarray(actions)
        if not members.size:
            return self._nothing(0, {})
        if not np.can_cast(action_M.dtype, self._action_MT.dtype, "same_kind"):
            raise EnvError(f"{self.name}: actions of type {action_M.dtype} do not fit {self.action_space}")
        action_M = action_M.astype(self._action_MT.dtype).reshape(len(members), *self._action_MT.shape[2:])
        over_M = self._over_M[members]
        fit_M = ((action_M >= self._low) & (action_M <= self._high)).reshape(len(members), -1).all(1) & ~over_M
        if fit_M.all():
            return self._play(members, action_M)
        errors = {
            int(p): self._say(
                members[p],
                "its episode has ended; reset it first"
                if over_M[p]
                else f"action {action_M[p]} is not in {self.action_space}",
            )
            for p in np.flatnonzero(~fit_M)
        }
        self._over_M[members[~fit_M]] = True
        whole, played = self._nothing(len(members), errors), np.flatnonzero(fit_M)
        if not played.size:
            return whole
        part = self._play(members[played], action_M[played])
        put(whole.observation, played, part.observation)
        whole.reward_M[played] = part.reward_M
        whole.terminated_M[played], whole.truncated_M[played] = part.terminated_M, part.truncated_M
        if part.success_M is not None:
            whole = replace(whole, success_M=np.full(len(members), np.nan))
            put(whole.success_M, played, part.success_M)
        return replace(whole, errors=errors | {int(played[p]): problem for p, problem in part.errors.items()})

    def snapshot(self, members: Members) -> list[Snapshot]:
        """Seed and actions of each named member: playing them again leads here."""
        return [
            Snapshot(self._seed_M[m], self._action_MT[m, : self._length_M[m]].copy(), self._state_of(m))
            for m in self._numbers(members).tolist()
        ]

    def restore(self, members: Members, snapshots: Sequence[Snapshot]) -> Begun:
        """Put members back by playing each seed's actions again; an episode that ends early on the way is an error."""
        members, longest = self._numbers(members), max((len(s.actions) for s in snapshots), default=0)
        # Who cannot stand still must arrive together with the others, so the shorter ones set off later.
        delays = [longest - len(s.actions) if self._lockstep else 0 for s in snapshots]
        self._over_M[members] = True
        observation, errors = zeros(self.observation_space, len(members)), dict[int, str]()
        for t in range(longest + 1):
            turn = [p for p, delay in enumerate(delays) if delay == t]
            if turn:
                begun = self.reset(members[turn], [snapshots[p].seed for p in turn])
                put(observation, turn, begun.observation)
                errors |= {turn[p]: problem for p, problem in begun.errors.items()}
            plays = [
                p
                for p, delay in enumerate(delays)
                if delay <= t < delay + len(snapshots[p].actions) and p not in errors
            ]
            if plays:
                actions = np.stack([snapshots[p].actions[t - delays[p]] for p in plays])
                stepped = self.step(members[plays], actions)
                put(observation, plays, stepped.observation)
                errors |= {plays[p]: problem for p, problem in stepped.errors.items()}
        return Begun(observation, errors)

    def _play(self, members: np.ndarray, action_M: np.ndarray) -> Stepped:
        """`step` for members and actions that are known to be fit."""
        try:
            observation, reward, terminated_M, truncated_M, success_M = self._advance(members, action_M)
        except EnvError:
            raise
        except BaseException as error:  # anything an environment may raise
            if from_a_person(error):
                raise
            problem = line(error)
            self._over_M[members] = True
            return self._nothing(len(members), {p: self._say(m, problem) for p, m in enumerate(members)})
        at_M = self._length_M[members]
        self._make_room(int(at_M.max()) + 1)
        self._action_MT[members, at_M] = action_M
        self._length_M[members] = at_M + 1
        reward_M = np.array(reward, float)
        reward_M[np.abs(reward_M) > LARGEST_REWARD] = np.inf
        terminated_M, truncated_M = np.array(terminated_M, bool), np.array(truncated_M, bool)
        self._over_M[members] = terminated_M | truncated_M
        errors = self._withdraw(members, observation, reward_M)
        if errors:
            terminated_M[list(errors)] = truncated_M[list(errors)] = False
        return Stepped(observation, reward_M, terminated_M, truncated_M, success_M, errors)

    def _withdraw(self, members: np.ndarray, *trees: Tree) -> dict[int, str]:
        """Who answered with NaN or infinity: its rows become zeros, and it waits for a reset."""
        floats = [leaf for tree in trees for leaf in leaves(tree) if leaf.dtype.kind == "f"]
        if all(np.isfinite(leaf).all() for leaf in floats):
            return {}
        bad_M = ~np.all([np.isfinite(leaf).reshape(len(members), -1).all(1) for leaf in floats], 0)
        for tree in trees:
            for leaf in leaves(tree):
                leaf[bad_M] = 0
        self._over_M[members[bad_M]] = True
        problem = "its observation or reward is NaN, infinite or more than float32 can hold"
        return {int(p): self._say(members[p], problem) for p in np.flatnonzero(bad_M)}

    def _numbers(self, members: Members) -> np.ndarray:
        return np.array(numbered(members, self.size, self.name), np.intp)

    def _make_room(self, length: int) -> None:
        while length > self._action_MT.shape[1]:
            self._action_MT = np.concatenate([self._action_MT, np.zeros_like(self._action_MT)], 1)

    def _say(self, member: int, problem: str) -> str:
        return f"{self.name} member {member}, step {self._length_M[member]}: {problem}"

    def _nothing(self, count: int, errors: Mapping[int, str]) -> Stepped:
        return Stepped(
            zeros(self.observation_space, count),
            np.zeros(count),
            np.zeros(count, bool),
            np.zeros(count, bool),
            errors=errors,
        )

    def _state_of(self, member: int) -> Mapping[str, np.ndarray] | None:
        return None

    def _start(self, members: np.ndarray, seeds: list[int]) -> Tree:
        """First observations, in arrays that are the caller's to change."""
        raise NotImplementedError

    def _advance(self, members: np.ndarray, action_M: np.ndarray) -> tuple[Tree, Any, Any, Any, np.ndarray | None]:
        """Observation, reward, terminated, truncated and success of a step."""
        raise NotImplementedError


def success_of(info: Mapping[str, Any]) -> np.ndarray | None:
    """What `info` says of success; NaN for members of whom it says nothing."""
    for key in _SUCCESS:
        if key in info:
            return np.where(info.get(f"_{key}", True), np.asarray(info[key], float), np.nan)
    return None
