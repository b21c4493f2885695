"""Episodes of a group, played again exactly as they were and filmed, for `grpo view`.

A tape says where an episode began, what was done and what was paid. It is played in an environment of its own, so that
training never hears of it; what does not repeat itself is not shown. Environments that train in processes of their own,
because they may hang or die, are filmed in one too.

Letters: M members of a call, F numbers of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.control.play import Episodes
from grpo.envs.episodes import Start, begin
from grpo.envs.fleet import EnvError, Fleet, Snapshot
from grpo.envs.make import EnvFactory
from grpo.envs.processes import ProcessFleet
from grpo.envs.serial import SerialFleet, name_of
from grpo.envs.video import DEFAULT_FPS, frames_of, write_video
from grpo.workers import Pool

MOST_FILMS = 16
"""Episodes of a group that are filmed."""
MOST_FRAMES = 120
"""Of one film; of longer episodes every second, third, … moment is drawn."""
HEIGHT = 240
"""Pixels of a frame, at most."""
TIMEOUT = 120.0
"""Seconds that a group's films may take in another process."""


@dataclass(frozen=True)
class Tape:
    """An episode as it was played."""

    start: Start
    action_T: np.ndarray
    """As the environment gets them."""
    reward_T: np.ndarray
    """As the environment paid them."""
    steps: int
    """Of the environment; more than its actions where one is held."""
    repeat: int = 1


@dataclass(frozen=True)
class Reel:
    """What it takes to play N episodes again."""

    starts: Sequence[Start]
    episodes: Episodes

    @staticmethod
    def of(starts: Sequence[Start], episodes: Episodes) -> Reel:
        """Without what was seen: that comes again by itself, and may be large."""
        return Reel(starts, replace(episodes, observation=None, raw=None, last=None, out_NTF=None))

    def tape(self, row: int, head: Any, repeat: int) -> Tape | None:
        """Of one episode; None where it failed."""
        episodes = self.episodes
        length = int(episodes.length_N[row])
        if row in episodes.errors or not length:
            return None
        start = self.starts[row]
        # Its own state is laid out as the fleet that trains likes it; seed and actions lead there too.
        start = replace(start, state=None) if isinstance(start, Snapshot) else start
        action_T = head.to_env(episodes.action_NT[row, :length])
        return Tape(start, action_T, episodes.reward_NT[row, :length], int(episodes.steps_N[row]), repeat)


def film(
    single: EnvFactory | gym.Env[Any, Any], fleet: Fleet, tapes: Sequence[Tape | None], stem: Path
) -> list[list[dict[str, str]]]:
    """Films named after `stem`, one for each tape, and how their rows name them."""
    if not isinstance(single, EnvFactory):
        raise EnvError(f"{name_of(single)} is the only copy there is, and it trains; pass an id or a factory")
    found: list[list[dict[str, str]]] = [[] for _ in tapes]
    chosen = [(i, tape) for i, tape in enumerate(tapes) if tape is not None][:MOST_FILMS]
    paths = [stem.with_name(f"{stem.name}-film-{i}.mp4") for i, _ in chosen]
    work = single, [tape for _, tape in chosen], paths
    if isinstance(fleet, ProcessFleet):
        with Pool(_shot, workers=1, timeout=TIMEOUT) as pool:
            reply = pool.map([work])[0]
            if error := reply.error or reply.value:
                raise EnvError(error)
    else:
        _shoot(work)
    for (i, _), path in zip(chosen, paths, strict=True):
        found[i] = [{"kind": "video", "name": "episode", "file": path.name}]
    return found


def _shot(work: tuple[EnvFactory, Sequence[Tape], Sequence[Path]]) -> str:
    """The same in another process; what went wrong in the environment's own words, or nothing."""
    try:
        _shoot(work)
    except EnvError as error:
        return str(error)
    return ""


def _shoot(work: tuple[EnvFactory, Sequence[Tape], Sequence[Path]]) -> None:
    """All films of a group, one after the other, in one environment."""
    factory, tapes, paths = work
    env = factory.make(render_mode="rgb_array")
    with closing(SerialFleet([env])) as fleet:
        for tape, path in zip(tapes, paths, strict=True):
            stride = -(-tape.steps // MOST_FRAMES)
            fps = float(env.metadata.get("render_fps") or DEFAULT_FPS) / stride
            write_video(_frames(fleet, env, tape, stride), path, max(fps, 1.0))


def _frames(fleet: SerialFleet, env: gym.Env[Any, Any], tape: Tape, stride: int) -> Iterator[np.ndarray]:
    """The first moment, every `stride`-th and the last; EnvError where it goes another way than the first time."""
    if errors := begin(fleet, np.array([0]), [tape.start]).errors:
        raise EnvError(errors[0])
    yield _small(frames_of(env)[-1])
    made = 0
    for action, reward in zip(tape.action_T, tape.reward_T, strict=True):
        paid, over = 0.0, False
        for _ in range(tape.repeat):
            stepped = fleet.step([0], action[None])
            if stepped.errors:
                raise EnvError(stepped.errors[0])
            paid, made = paid + float(stepped.reward_M[0]), made + 1
            there = stepped.success_M is not None and stepped.success_M[0] == 1.0  # an end where end_on_success says so
            over = bool(stepped.terminated_M[0] or stepped.truncated_M[0])
            if made % stride == 0 or made == tape.steps:
                yield _small(frames_of(env)[-1])
            if over or made == tape.steps:
                break
        ends = over or there if made == tape.steps else not over
        if not ends or not math.isclose(paid, reward, rel_tol=1e-6, abs_tol=1e-6):
            raise EnvError(f"{fleet.name} does not repeat itself: played again, it differs at step {made}")


def _small(frame: np.ndarray) -> np.ndarray:
    """At most HEIGHT pixels high: the mean of squares of pixels."""
    k = -(-frame.shape[0] // HEIGHT)
    if k == 1:
        return frame
    height, width = (side // k * k for side in frame.shape[:2])
    total = np.zeros((height // k, width // k, frame.shape[2]), np.uint32)
    for i in range(k):
        for j in range(k):
            total += frame[i:height:k, j:width:k]
    return (total // (k * k)).astype(np.uint8)
