"""A warm start for rewards that chance never finds: the policy first learns to do as an expert does.

The expert is a function from an observation to an action (`file.py:expert`), which plays a few episodes here, or a file
of episodes that somebody recorded. What it does becomes likely under the policy; a Gaussian's deviation stays where
`log_std` puts it, so that there is something left to explore.

Letters: M actions, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from grpo.config import ConfigError
from grpo.control.chunks import by_token
from grpo.control.config import ControlConfig
from grpo.control.play import INSIDE, Episodes, named, play
from grpo.control.policy import Acted, ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.draws import Random
from grpo.envs.fleet import EnvError, Fleet, Tree
from grpo.envs.heads import Head
from grpo.envs.make import EnvFactory
from grpo.envs.spaces import each, take
from grpo.optimizers import AdamW
from grpo.rates import FALLING
from grpo.rollouts import Rollouts
from grpo.run.files import DAMAGE, FolderError
from grpo.run.inside import open_regular

ROWS = 8
"""Episodes in one step of the optimizer."""
LEARNING_RATE = 3e-3
"""Of its AdamW; the run's own has not begun yet."""


@dataclass(frozen=True)
class Shown:
    """N episodes of up to T actions that are worth imitating."""

    observation: Tree
    """(N, T, …), as the environment gave them."""
    action_NT: np.ndarray
    """(N, T, …), as the policy's head records them."""
    mask_NT: np.ndarray
    env_steps: int = 0
    """Played here for it."""

    def __len__(self) -> int:
        return len(self.mask_NT)


class Expert(ActorPolicy):
    """A function from one observation to one action, seated where a policy sits."""

    def __init__(self, decide: Callable[[Any], Any], head: Head, space: gym.Space[Any], name: str) -> None:
        super().__init__(nn.Identity(), head)
        self._decide, self._space, self._name = decide, space, name

    def act(self, observation: Tree, random: Random | None, memory: Any = None) -> Acted:
        """Ask it once for every member."""
        count = len(next(iter(named("", observation).values())))
        actions = np.stack([self._asked(take(observation, member)) for member in range(count)])
        recorded = self.head.from_env(actions)
        return Acted(recorded, np.zeros(count, np.float32), np.zeros((count, self.head.size), np.float32), memory)

    def _asked(self, observation: Any) -> np.ndarray:
        try:
            action = np.asarray(self._decide(observation), self._space.dtype)
        except Exception as error:  # anything an expert may raise
            raise EnvError(
                f"{self._name} fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            ) from error
        if action.shape != (self._space.shape or ()) or not np.isfinite(action).all():
            raise EnvError(f"{self._name} gives {action!r:.80}, the action space is {self._space}")
        return action


def shown_by(config: ControlConfig, fleet: Fleet, head: Head, starts: Sequence[int]) -> Shown:
    """What the expert does from these starts, or did when it was recorded."""
    assert config.warm_start is not None
    if config.warm_start.endswith(".npz"):
        return read(Path(config.warm_start), fleet, head)
    decide = EnvFactory(config.warm_start).resolve()
    expert = Expert(decide, head, fleet.action_space, config.warm_start)  # type: ignore[arg-type]
    unscaled = Scaling(fleet.observation_space, False)
    return worth_it(play(fleet, expert, unscaled, starts, None, config.rules), config.warm_start)


def worth_it(episodes: Episodes, name: str) -> Shown:
    """The episodes that did not fail, neither technically nor, where the environment tells, at their task."""
    rows = np.flatnonzero(episodes.ok_N & (episodes.success_N != 0.0))
    if not len(rows):
        why = next(iter(episodes.errors.values()), "it never succeeds")
        raise EnvError(f"{name}: none of {len(episodes)} episodes can be imitated: {why}")
    return Shown(
        take(episodes.raw, rows), episodes.action_NT[rows], episodes.mask_NT[rows], env_steps=episodes.env_steps
    )


# --- recorded episodes ----------------------------------------------------------------------------------------------


def write(path: Path, shown: Shown, head: Head) -> Path:
    """Episodes as a file: what was seen and done, a row a step, and which episode each belongs to."""
    steps = {f"observation{name}": x[shown.mask_NT] for name, x in named("", shown.observation).items()}
    actions = head.to_env(shown.action_NT[shown.mask_NT])
    arrays = {name.replace(INSIDE, "/"): x for name, x in steps.items()}
    np.savez(path, action=actions, episode=np.nonzero(shown.mask_NT)[0], **arrays)
    return path


def read(path: Path, fleet: Fleet, head: Head) -> Shown:
    """Episodes from a file, checked against the environment."""
    try:
        with open_regular(path) as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (FolderError, *DAMAGE) as error:
        raise ConfigError(f"warm_start: {path} cannot be read as recorded episodes: {error}") from None
    spaces = _parts(fleet.observation_space)
    parts = {f"observation{own.replace(INSIDE, '/')}": own for own in spaces}
    wanted = {name: spaces[own] for name, own in parts.items()} | {"action": fleet.action_space}
    for name in ("episode", *wanted):
        if name not in arrays:
            raise ConfigError(f"warm_start: {path} has no array {name!r}; it has {', '.join(sorted(arrays)) or 'none'}")
    episode_M = arrays["episode"]
    if not len(episode_M):
        raise ConfigError(f"warm_start: {path} has no episodes")
    for name, space in wanted.items():
        _expect_fit(f"warm_start: {path}: {name}", arrays[name], space, len(episode_M))
    numbers, row_M = np.unique(episode_M, return_inverse=True)
    length_N = np.bincount(row_M, minlength=len(numbers))
    mask_NT = np.arange(length_N.max(initial=0))[None] < length_N[:, None]
    order_M = np.argsort(row_M, kind="stable")

    def table(x_M: np.ndarray) -> np.ndarray:
        made = np.zeros((*mask_NT.shape, *x_M.shape[1:]), x_M.dtype)
        made[mask_NT] = x_M[order_M]
        return made

    observation = _tree(fleet.observation_space, {own: table(arrays[name]) for name, own in parts.items()})
    return Shown(observation, table(head.from_env(arrays["action"])), mask_NT)


def _expect_fit(name: str, array_M: np.ndarray, space: gym.Space[Any], count: int) -> None:
    """An error unless these are `count` members of the space; real numbers may be outside of their bounds."""
    if len(array_M) != count:
        raise ConfigError(f"{name} has {len(array_M)} rows, episode has {count}")
    if array_M.shape[1:] != tuple(space.shape or ()):
        raise ConfigError(f"{name} has the shape {array_M.shape[1:]}, it must be {tuple(space.shape or ())}")
    if isinstance(space, gym.spaces.Box):
        wrong_M = ~np.isfinite(array_M).reshape(count, -1).all(1)
    else:
        wrong_M = np.array([not space.contains(np.asarray(x)) for x in array_M], bool)
    if wrong_M.any():
        raise ConfigError(f"{name}, row {int(wrong_M.argmax())}: {array_M[wrong_M][0]!s:.60} is not in {space}")


def _parts(space: gym.Space[Any], name: str = "") -> dict[str, gym.Space[Any]]:
    """Every array of an observation, by its name in a record."""
    if not isinstance(space, gym.spaces.Dict):
        return {name: space}
    return {found: x for key, part in space.spaces.items() for found, x in _parts(part, name + INSIDE + key).items()}


def _tree(space: gym.Space[Any], arrays: dict[str, np.ndarray], name: str = "") -> Tree:
    if not isinstance(space, gym.spaces.Dict):
        return arrays[name]
    return {key: _tree(part, arrays, name + INSIDE + key) for key, part in space.spaces.items()}


# --- learning from them ---------------------------------------------------------------------------------------------


def imitate(policy: ActorPolicy, scaling: Scaling, shown: Shown, config: ControlConfig) -> float:
    """Make what was shown likely; the mean log-prob of an action (or token) that was reached."""
    scaling.update(take(shown.observation, shown.mask_NT))
    rows = _rows(policy, scaling, shown)
    decay, schedule, passes = config.warm_start_weight_decay, config.warm_start_lr_schedule, config.warm_start_passes
    optimizer = AdamW(policy.network.parameters(), lr=LEARNING_RATE, weight_decay=decay)
    order = torch.Generator().manual_seed(config.seed)
    policy.train()
    logp = 0.0
    for number in range(passes):
        if schedule in FALLING:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * FALLING[schedule](number / passes)
        total = torch.zeros(())
        for index in torch.split(torch.randperm(len(rows), generator=order), ROWS):
            part = rows.select(index)
            summed = policy.score(part).logp_NT.sum()
            optimizer.zero_grad()
            (-summed / part.mask_NT.sum()).backward()
            nn.utils.clip_grad_norm_(policy.network.parameters(), 1.0)
            optimizer.step()
            total = total + summed.detach().cpu()
        logp = float(total / rows.mask_NT.sum())
    for parameter in policy.parameters().values():
        parameter.grad = None
    return logp


def _rows(policy: ActorPolicy, scaling: Scaling, shown: Shown) -> Rollouts:
    """What was shown as a record; with chunks, beginning at each of a chunk's places, so that every moment is one."""
    size, device = policy.columns.size, policy.device
    firsts = range(1 if policy.recurrent else min(size, shown.mask_NT.shape[1]))

    def table(x_NT: np.ndarray) -> np.ndarray:
        moved = [np.roll(x_NT, -first, axis=1) for first in firsts]
        return np.concatenate(moved)

    beyond_NT = [np.arange(shown.mask_NT.shape[1]) < shown.mask_NT.shape[1] - first for first in firsts]
    mask_NT = np.concatenate([np.roll(shown.mask_NT, -f, axis=1) & b for f, b in zip(firsts, beyond_NT, strict=True)])
    mask = torch.as_tensor(mask_NT, device=device)
    zero_NT = torch.zeros(mask.shape, device=device)
    action = torch.as_tensor(table(shown.action_NT), device=device)
    record = Rollouts(
        group_N=torch.zeros(len(mask), dtype=torch.int64, device=device),
        mask_NT=mask,
        old_logp_NT=zero_NT,
        reward_NT=zero_NT,
        inputs={"observation": policy.tensors(each(scaling(shown.observation), table)), "action": action},
    ).select(torch.nonzero(mask.any(1))[:, 0])
    if policy.columns.width == 1:
        return record
    width = policy.columns.width
    return by_token(record, policy.columns, record.old_logp_NT[..., None].expand(*record.mask_NT.shape, width))
