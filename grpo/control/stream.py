"""Endless streams of episodes, cut into windows: the group of `group_by=steps`.

An episode that a window cuts goes on in the next one, so long episodes are played, and counted, whole. A row of the
result is the part of one episode that lies in the window.

Letters: S streams, M those of a call, F numbers of the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from grpo.control.config import ControlConfig
from grpo.control.groups import STREAMS, seeds
from grpo.control.play import Episodes, Record, named
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.episodes import EpisodeStream
from grpo.envs.fleet import Fleet, Tree
from grpo.envs.spaces import each, joined, put, take


class StepWindows:
    """One endless stream of episodes for each group, a window of steps at a time."""

    def __init__(self, fleet: Fleet, config: ControlConfig) -> None:
        self.stream = EpisodeStream(fleet, config.groups_per_step, partial(_seed, config.seed))
        self._steps = config.group_size
        self._observation: Tree = None
        self._record = Record(config.groups_per_step, self._steps)
        """Of the window; each is written over by the next, and handed over as a copy."""
        self.returns: list[float] = []
        """Of the whole episodes that ended in the last window."""

    def next(self, policy: ActorPolicy, scaling: Scaling, random: np.random.Generator) -> tuple[Episodes, np.ndarray]:
        """The next `group_size` steps of every stream, and the stream of each row."""
        stream, steps, count = self.stream, self._steps, len(self.stream)
        everyone = np.arange(count)
        if self._observation is None:
            self._observation = stream.begin(everyone)
        done_TS, over_TS = np.zeros((steps, count), bool), np.zeros((steps, count), bool)
        failed: dict[tuple[int, int], str] = {}
        lasts: dict[tuple[int, int], Tree] = {}
        behind_S = stream.length_S.copy()
        self.returns = []
        for t in range(steps):
            seen = scaling(self._observation)
            acted = policy.act(seen, random)
            stepped = stream.step(everyone, policy.head.to_env(acted.recorded))
            moment = {"action": acted.recorded, "logp": acted.logp_M, "out": acted.out_MF, "reward": stepped.reward_M}
            moment |= named("seen", seen)
            if seen is not self._observation:
                moment |= named("raw", self._observation)
            self._record.write(np.full(count, t), everyone, t, moment)
            over_TS[t], done_TS[t] = stepped.terminated_M, ~stepped.going_M
            failed |= {(t, s): message for s, message in stepped.errors.items()}
            self._observation = stepped.observation
            if done_TS[t].any():
                over = np.flatnonzero(done_TS[t])
                self.returns += [float(stream.return_S[s]) for s in over.tolist() if (t, s) not in failed]
                lasts |= {(t, s): take(stepped.observation, [s]) for s in over.tolist()}
                self._observation = take(stepped.observation, everyone)
                put(self._observation, over, stream.begin(over))
        stream.failures = []  # they are rows now
        lasts = {(steps - 1, s): take(self._observation, [s]) for s in range(count)} | lasts
        return _pieces(self._record, done_TS, over_TS, failed, steps, lasts, behind_S)

    def values(self) -> dict[str, Any]:
        """Numbers to go on from."""
        return self.stream.values()

    def arrays(self) -> dict[str, np.ndarray]:
        """The running episodes' actions, which lead back to where they are."""
        return {f"actions/{s}": made for s, made in enumerate(self.stream.actions())}

    def load(self, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Play the running episodes up to where they were."""
        self._observation = self.stream.load(values, [arrays[f"actions/{s}"] for s in range(len(arrays))])


def _seed(seed: int, stream: int, number: int) -> int:
    return seeds(seed, number, STREAMS + 16 * (stream + 1), 1)[0]


def _pieces(
    record: Record,
    done_TS: np.ndarray,
    over_TS: np.ndarray,
    failed: Mapping[tuple[int, int], str],
    steps: int,
    lasts: Mapping[tuple[int, int], Tree],
    behind_S: np.ndarray,
) -> tuple[Episodes, np.ndarray]:
    """The window's episodes as rows of their own, and the stream each belongs to."""
    cuts: list[tuple[int, int, int]] = []  # stream, first step, one past the last
    for s in range(done_TS.shape[1]):
        ends = [0, *(np.flatnonzero(done_TS[:, s]) + 1).tolist(), steps]
        cuts += [(s, a, b) for a, b in pairwise(ends) if b > a]
    longest = max(b - a for _, a, b in cuts)

    def rows(x_ST: np.ndarray) -> np.ndarray:
        made = np.zeros((len(cuts), longest, *x_ST.shape[2:]), x_ST.dtype)
        for row, (s, a, b) in enumerate(cuts):
            made[row, : b - a] = x_ST[s, a:b]
        return made

    def table(name: str) -> np.ndarray:
        found = record.table(name, steps, copy=False)
        assert found is not None
        return rows(found)

    seen, raw = (record.tree(name, steps, copy=False) for name in ("seen", "raw"))
    seen = each(seen, rows)
    length_N = np.array([b - a for _, a, b in cuts])
    errors = {row: failed[b - 1, s] for row, (s, _, b) in enumerate(cuts) if (b - 1, s) in failed}
    length_N[list(errors)] -= 1  # the step that failed was not made
    terminated_N = np.array([bool(over_TS[b - 1, s]) for s, _, b in cuts])
    episodes = Episodes(
        observation=seen,
        raw=seen if raw is None else each(raw, rows),
        action_NT=table("action"),
        logp_NT=table("logp"),
        out_NTF=table("out"),
        reward_NT=table("reward"),
        mask_NT=np.arange(longest)[None] < length_N[:, None],
        offset_N=np.array([0 if a else behind_S[s] for s, a, _ in cuts]),
        terminated_N=terminated_N,
        truncated_N=~terminated_N,
        success_N=np.full(len(cuts), np.nan),
        last=joined([lasts[b - 1, s] for s, _, b in cuts]),
        errors=errors,
        steps_N=np.array([b - a for _, a, b in cuts]),
    )
    return episodes, np.array([s for s, _, _ in cuts])
