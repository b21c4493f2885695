"""What makes a group: which starts are played, and which decisions are compared with each other.

start    G episodes from one initial state: the environment's reset with one seed
branch   G continuations from one visited state, drawn evenly from an episode that the policy plays first
anchor   G episodes from one start; decisions at equal observations are compared, wherever they happened
batch    every episode from a start of its own; all are one group
steps    a window of G steps of one endless stream of episodes (`grpo.control.stream`)

Letters: L live members, M decisions, B bytes of an observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from grpo.control.config import ControlConfig
from grpo.control.play import Episodes, named, play
from grpo.control.scaling import Scaling
from grpo.envs.draws import Random, drawing
from grpo.envs.episodes import EpisodeRunner, Start
from grpo.envs.fleet import EnvError, Fleet, Snapshot
from grpo.seeding import start_seeds

if TYPE_CHECKING:
    from grpo.control.policy import ActorPolicy

TRAINING, TRUNKS, STREAMS, EVALUATION, EXPERT = range(5)
"""Streams of seeds."""


def seeds(seed: int, step: int, stream: int, count: int) -> list[int]:
    """Seeds for the environment, from (seed, step, stream)."""
    return start_seeds([seed, step, stream], count, held_out=stream == EVALUATION)


def starts_of(
    config: ControlConfig, step: int, fleet: Fleet, policy: ActorPolicy, scaling: Scaling, random: Random
) -> tuple[list[Any], Episodes | None]:
    """The starts of a step's groups, one for each group, and the whole episodes that were played to find them."""
    count = config.groups_per_step
    if config.group_by == "batch":
        return [tuple(seeds(config.seed, step, TRAINING, config.episodes))], None
    if config.group_by == "branch":
        return branch_points(config, step, fleet, policy, scaling, random)
    return list(seeds(config.seed, step, TRAINING, count)), None


def tries(config: ControlConfig, starts: Sequence[Any]) -> tuple[list[Start], np.ndarray]:
    """A start for each episode, and its group."""
    if config.group_by == "batch":
        each = [seed for start in starts for seed in start]
        return each, np.repeat(np.arange(len(starts)), [len(start) for start in starts])
    each = [start for start in starts for _ in range(config.group_size)]
    return each, np.repeat(np.arange(len(starts)), config.group_size)


def branch_points(
    config: ControlConfig, step: int, fleet: Fleet, policy: ActorPolicy, scaling: Scaling, random: Random
) -> tuple[list[Snapshot], Episodes]:
    """A visited state of each of several episodes, every state of an episode equally likely.

    A reservoir of one: the state at decision t replaces the one that is kept with probability 1 / (t + 1), so that an
    episode of T steps is saved about log T times, not T times.
    """
    kept: dict[int, Snapshot] = {}

    def visit(runner: EpisodeRunner) -> None:
        drawn_L = drawing(random, runner.row_L).random(len(runner.row_L))
        chosen_L = drawn_L * (runner.step_L // config.action_chunk + 1) < 1.0
        if chosen_L.any():
            saved = fleet.snapshot(runner.member_L[chosen_L])
            kept.update(zip(runner.row_L[chosen_L].tolist(), saved, strict=True))

    trunk = list(seeds(config.seed, step, TRUNKS, config.groups_per_step))
    played = play(fleet, policy, scaling, trunk, random, config.rules, visit=visit)
    if not kept:
        raise EnvError(f"no episode could be branched: {next(iter(played.errors.values()))}")
    return [kept[row] for row in sorted(kept)], played  # an episode that failed at its start gives no group


def inner_groups(config: ControlConfig, episodes: Episodes, group_N: np.ndarray) -> np.ndarray | None:
    """Groups inside trajectories, where decisions are not compared with the group at the same step."""
    rows, steps = episodes.mask_NT.shape
    if config.group_by == "anchor":
        return anchors(episodes.raw, rows, steps)
    if config.group_by == "steps":
        return np.repeat(group_N[:, None], steps, 1)
    if config.judged_by == "batch_step":
        return episodes.offset_N[:, None] + np.arange(steps)[None]
    return None


def anchors(observation: Any, rows: int, steps: int) -> np.ndarray:
    """A number for each distinct observation of the batch."""
    parts = named("", observation).values()
    flat_MB = np.concatenate([np.ascontiguousarray(x).reshape(rows * steps, -1).view(np.uint8) for x in parts], axis=1)
    _, number_M = np.unique(flat_MB, axis=0, return_inverse=True)
    return np.asarray(number_M).reshape(rows, steps)


def expect_anchors(space: gym.Space[Any], name: str) -> None:
    """Refuse groups of equal observations where none are ever equal."""
    if isinstance(space, gym.spaces.Dict):
        for part in space.spaces.values():
            expect_anchors(part, name)
    elif isinstance(space, gym.spaces.Box) and space.dtype.kind == "f":
        raise EnvError(
            f"group_by=anchor compares equal observations; {name} has real-valued ones, which are never equal; "
            "use group_by=start"
        )
