"""Endless streams of episodes, cut into windows: the group of `group_by=steps`.

An episode that a window cuts goes on in the next one, so long episodes are played, and counted, whole. A row of the
result is the part of one episode that lies in the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from grpo.control.config import ControlConfig
from grpo.control.groups import STREAMS, seeds
from grpo.control.play import Episodes, Record, begin, named
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.fleet import EnvError, Fleet, Snapshot, Tree
from grpo.envs.spaces import each, joined, put, take

RESETS = 5
"""Times a stream tries to begin an episode before it gives up."""
REMEMBERED = 20
"""Whole episodes whose mean return is reported."""


class Streams:
    """One endless stream of episodes for each group."""

    def __init__(self, fleet: Fleet, config: ControlConfig) -> None:
        count = config.groups_per_step
        self._fleet, self._config = fleet, config
        self._member_P = np.arange(count)
        self._begun_P = np.zeros(count, np.int64)
        """Episodes begun so far."""
        self._seeds: list[int] = [0] * count
        self._actions: list[list[np.ndarray]] = [[] for _ in range(count)]
        """Where the running episodes began and what was done since: enough to come back, also to an only copy."""
        self._return_P, self._length_P = np.zeros(count), np.zeros(count, np.int64)
        """Of the running episodes."""
        self._observation: Tree = None
        self._record = Record(count, config.group_size)
        """Of the window; each is written over by the next, and handed over as a copy."""
        self.finished: list[tuple[float, int]] = []
        """(return, length) of the last whole episodes."""

    @property
    def ended(self) -> int:
        """Episodes that are over."""
        return int(np.maximum(self._begun_P - 1, 0).sum())

    def window(self, policy: ActorPolicy, scaling: Scaling, random: np.random.Generator) -> tuple[Episodes, np.ndarray]:
        """The next `group_size` steps of every stream, and the stream of each row."""
        if self._observation is None:
            self._observation = self._fresh(self._member_P)
        steps, count = self._config.group_size, len(self._member_P)
        record = self._record
        done_TP, over_TP = np.zeros((steps, count), bool), np.zeros((steps, count), bool)
        failed: dict[tuple[int, int], str] = {}
        lasts: dict[tuple[int, int], Tree] = {}
        behind_P = self._length_P.copy()
        for t in range(steps):
            seen = scaling(self._observation)
            acted = policy.act(seen, random)
            action_P = policy.head.to_env(acted.recorded)
            stepped = self._fleet.step(self._member_P, action_P)
            for actions, action in zip(self._actions, action_P, strict=True):
                actions.append(action)
            moment = {"action": acted.recorded, "logp": acted.logp_M, "out": acted.out_MF, "reward": stepped.reward_M}
            moment |= named("seen", seen)
            if seen is not self._observation:
                moment |= named("raw", self._observation)
            record.write(np.full(count, t), self._member_P, t, moment)
            over_TP[t] = stepped.terminated_M
            done_TP[t] = stepped.terminated_M | stepped.truncated_M
            self._return_P += stepped.reward_M
            self._length_P += 1
            self.finished += [
                (float(self._return_P[p]), int(self._length_P[p])) for p in np.flatnonzero(done_TP[t]).tolist()
            ]
            for at, message in stepped.errors.items():
                failed[t, at], done_TP[t, at] = message, True
            self._observation = stepped.observation
            if done_TP[t].any():
                over = np.flatnonzero(done_TP[t])
                lasts |= {(t, p): take(stepped.observation, [p]) for p in over.tolist()}
                self._observation = take(stepped.observation, np.arange(count))
                put(self._observation, over, self._fresh(over))
        self.finished = self.finished[-REMEMBERED:]
        lasts = {(steps - 1, p): take(self._observation, [p]) for p in range(count)} | lasts
        return _pieces(record, done_TP, over_TP, failed, steps, lasts, behind_P)

    def _fresh(self, members: np.ndarray) -> Tree:
        """The next episode of these streams; one that cannot begin is passed over, a few times."""
        self._return_P[members], self._length_P[members] = 0.0, 0
        for _ in range(RESETS):
            chosen = [self._seed(p) for p in members.tolist()]
            self._begun_P[members] += 1
            for p, seed in zip(members.tolist(), chosen, strict=True):
                self._seeds[p], self._actions[p] = seed, []
            begun = begin(self._fleet, members, chosen)
            if not begun.errors:
                return begun.observation
        raise EnvError(next(iter(begun.errors.values())))

    def _seed(self, stream: int) -> int:
        return seeds(self._config.seed, int(self._begun_P[stream]), STREAMS + 16 * (stream + 1), 1)[0]

    def values(self) -> dict[str, Any]:
        """Numbers to go on from."""
        return {
            "begun": self._begun_P.tolist(),
            "return": self._return_P.tolist(),
            "length": self._length_P.tolist(),
            "finished": [list(item) for item in self.finished],
            "seeds": [] if self._observation is None else list(self._seeds),
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The running episodes' actions, which lead back to where they are."""
        if self._observation is None:
            return {}
        space = self._fleet.action_space
        shape = (-1, *(space.shape or ()))
        return {f"actions/{p}": np.array(made, space.dtype).reshape(shape) for p, made in enumerate(self._actions)}

    def load(self, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Play the running episodes up to where they were."""
        self._begun_P, self._length_P = np.array(values["begun"]), np.array(values["length"])
        self._return_P = np.array(values["return"], np.float64)
        self.finished = [(float(a), int(b)) for a, b in values["finished"]]
        if values["seeds"]:
            self._seeds = [int(seed) for seed in values["seeds"]]
            saved = [Snapshot(s, np.asarray(arrays[f"actions/{p}"])) for p, s in enumerate(self._seeds)]
            self._actions = [list(moment.actions) for moment in saved]
            begun = self._fleet.restore(self._member_P, saved)
            if begun.errors:
                raise EnvError(f"the running episodes cannot be resumed: {next(iter(begun.errors.values()))}")
            self._observation = begun.observation


def _pieces(
    record: Record,
    done_TP: np.ndarray,
    over_TP: np.ndarray,
    failed: Mapping[tuple[int, int], str],
    steps: int,
    lasts: Mapping[tuple[int, int], Tree],
    behind_P: np.ndarray,
) -> tuple[Episodes, np.ndarray]:
    """The window's episodes as rows of their own, and the stream each belongs to."""
    cuts: list[tuple[int, int, int]] = []  # stream, first step, one past the last
    for p in range(done_TP.shape[1]):
        ends = [0, *(np.flatnonzero(done_TP[:, p]) + 1).tolist(), steps]
        cuts += [(p, a, b) for a, b in pairwise(ends) if b > a]
    longest = max(b - a for _, a, b in cuts)

    def rows(x_PT: np.ndarray) -> np.ndarray:
        made = np.zeros((len(cuts), longest, *x_PT.shape[2:]), x_PT.dtype)
        for row, (p, a, b) in enumerate(cuts):
            made[row, : b - a] = x_PT[p, a:b]
        return made

    def table(name: str) -> np.ndarray:
        found = record.table(name, steps, copy=False)
        assert found is not None
        return rows(found)

    seen, raw = (record.tree(name, steps, copy=False) for name in ("seen", "raw"))
    seen = each(seen, rows)
    length_N = np.array([b - a for _, a, b in cuts])
    errors = {row: failed[b - 1, p] for row, (p, _, b) in enumerate(cuts) if (b - 1, p) in failed}
    length_N[list(errors)] -= 1  # the step that failed was not made
    terminated_N = np.array([bool(over_TP[b - 1, p]) for p, _, b in cuts])
    episodes = Episodes(
        observation=seen,
        raw=seen if raw is None else each(raw, rows),
        action_NT=table("action"),
        logp_NT=table("logp"),
        out_NTF=table("out"),
        reward_NT=table("reward"),
        mask_NT=np.arange(longest)[None] < length_N[:, None],
        offset_N=np.array([0 if a else behind_P[p] for p, a, _ in cuts]),
        terminated_N=terminated_N,
        truncated_N=~terminated_N,
        success_N=np.full(len(cuts), np.nan),
        last=joined([lasts[b - 1, p] for p, _, b in cuts]),
        errors=errors,
        steps_N=np.array([b - a for _, a, b in cuts]),
    )
    return episodes, np.array([p for p, _, _ in cuts])
