"""Endless streams of episodes, cut into windows: the group of `group_by=steps`.

An episode that a window cuts goes on in the next one, so long episodes are played, and counted, whole. A row of the
result is the part of one episode that lies in the window.

Letters: S streams, M those of a call, F numbers of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from grpo.control.config import ControlConfig
from grpo.control.groups import STREAMS, seeds
from grpo.control.play import Episodes, Record, named
from grpo.control.policy import Acted, ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.episodes import EpisodeStream
from grpo.envs.fleet import EnvError, Fleet, Overlapping, Stepped, Tree
from grpo.envs.spaces import each, joined, put, take


@dataclass(frozen=True)
class _Sent:
    """A step of some streams that is under way."""

    t: int
    streams: np.ndarray
    raw: Tree
    """What they saw."""
    seen: Tree
    """The same, scaled."""
    acted: Acted
    wait: Callable[[], Stepped]


@dataclass(frozen=True)
class _Window:
    """What became of the steps of a window."""

    done_TS: np.ndarray
    over_TS: np.ndarray
    """done: an episode ended there; over: it terminated."""
    behind_S: np.ndarray
    """Steps of each stream's episode before the window."""
    failed: dict[tuple[int, int], str]
    lasts: dict[tuple[int, int], Tree]
    """(step, stream) → what went wrong, what was seen last."""


class StepWindows:
    """One endless stream of episodes for each group, a window of steps at a time."""

    def __init__(self, fleet: Fleet, config: ControlConfig) -> None:
        self.stream = EpisodeStream(fleet, config.groups_per_step, partial(_seed, config.seed))
        self._steps = config.group_size
        everyone = np.arange(config.groups_per_step)
        self._parts = np.array_split(everyone, 2) if config.double_buffer else [everyone]
        """Streams that step together: all, or one half after the other. In this order a draw for each half is the same
        as one for all."""
        if config.double_buffer and not isinstance(fleet, Overlapping):
            raise EnvError(
                f"{fleet.name}: double_buffer needs environments in processes of this machine; set vector=processes, "
                "or double_buffer=false (with workers=ray, too)"
            )
        self._observation: Tree = None
        self._record = Record(config.groups_per_step, self._steps)
        """Of the window; each is written over by the next, and handed over as a copy."""
        self.returns: list[float] = []
        """Of the whole episodes that ended in the last window."""

    def next(self, policy: ActorPolicy, scaling: Scaling, random: np.random.Generator) -> tuple[Episodes, np.ndarray]:
        """The next `group_size` steps of every stream, and the stream of each row."""
        stream, steps, count = self.stream, self._steps, len(self.stream)
        if self._observation is None:
            self._observation = stream.begin(np.arange(count))
        window = _Window(np.zeros((steps, count), bool), np.zeros((steps, count), bool), stream.length_S.copy(), {}, {})
        self.returns = []
        parts = self._parts
        seen_by = [self._observation] if len(parts) == 1 else [take(self._observation, part) for part in parts]
        under_way: tuple[int, _Sent] | None = None
        for t in range(steps):
            for p, part in enumerate(parts):
                seen = scaling(seen_by[p])
                acted = policy.act(seen, random)
                if under_way is not None:  # the other half's, while which this half's actions were found
                    seen_by[under_way[0]] = self._arrived(under_way[1], window)
                action = policy.head.to_env(acted.recorded)
                wait = stream.send(part, action) if len(parts) > 1 else partial(stream.step, part, action)
                under_way = p, _Sent(t, part, seen_by[p], seen, acted, wait)
                if len(parts) == 1:
                    seen_by[p], under_way = self._arrived(under_way[1], window), None
        if under_way is not None:
            seen_by[under_way[0]] = self._arrived(under_way[1], window)
        self._observation = seen_by[0] if len(parts) == 1 else joined(seen_by)
        stream.failures = []  # they are rows now
        window.lasts.update({(steps - 1, s): take(self._observation, [s]) for s in range(count)} | window.lasts)
        return _pieces(self._record, window, steps)

    def _arrived(self, sent: _Sent, window: _Window) -> Tree:
        """Wait for a step, note it, begin episodes where some have ended; what is seen then."""
        t, part, acted, stepped = sent.t, sent.streams, sent.acted, sent.wait()
        moment = {"action": acted.recorded, "logp": acted.logp_M, "out": acted.out_MF, "reward": stepped.reward_M}
        moment |= named("seen", sent.seen)
        if sent.seen is not sent.raw:
            moment |= named("raw", sent.raw)
        self._record.write(np.full(len(part), t), part, t, moment)
        done_M = ~stepped.going_M
        window.over_TS[t, part], window.done_TS[t, part] = stepped.terminated_M, done_M
        window.failed.update({(t, int(part[m])): message for m, message in stepped.errors.items()})
        if not done_M.any():
            return stepped.observation
        at, over = np.flatnonzero(done_M), part[done_M]
        self.returns += [float(self.stream.return_S[s]) for s in over.tolist() if (t, s) not in window.failed]
        window.lasts.update({(t, s): take(stepped.observation, [m]) for m, s in zip(at, over.tolist(), strict=True)})
        observation = take(stepped.observation, np.arange(len(part)))
        put(observation, at, self.stream.begin(over))
        return observation

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


def _pieces(record: Record, window: _Window, steps: int) -> tuple[Episodes, np.ndarray]:
    """The window's episodes as rows of their own, and the stream each belongs to."""
    done_TS, over_TS, failed, lasts = window.done_TS, window.over_TS, window.failed, window.lasts
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
        offset_N=np.array([0 if a else window.behind_S[s] for s, a, _ in cuts]),
        terminated_N=terminated_N,
        truncated_N=~terminated_N,
        success_N=np.full(len(cuts), np.nan),
        last=joined([lasts[b - 1, s] for s, _, b in cuts]),
        errors=errors,
        steps_N=np.array([b - a for _, a, b in cuts]),
    )
    return episodes, np.array([s for s, _, _ in cuts])
