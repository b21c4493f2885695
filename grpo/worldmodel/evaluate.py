"""How good an agent is on starts that training never used; and films of it.

Letters: E episodes, L of them at once, M still running, A numbers of an action's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from grpo.envs.copies import EnvCopies
from grpo.envs.evaluate import Evaluation, rendered
from grpo.envs.fleet import Fleet
from grpo.envs.serial import close
from grpo.envs.spaces import put, stack, zeros
from grpo.envs.video import can_show, record
from grpo.seeding import derive
from grpo.worldmodel.acting import EVALUATION, Eyes, episode_seed
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.views import View

MOST_ENVS = 64
"""Copies that are evaluated at a time."""


def starts(seed: int, count: int) -> list[int]:
    """Seeds of episodes that training never plays."""
    return [episode_seed(seed, EVALUATION, number) for number in range(count)]


def judge(
    copies: EnvCopies, view: View, model: WorldModel, policy: ActorPolicy, episodes: int, greedy: bool, seed: int
) -> Evaluation:
    """Episodes side by side, in turns where there are more than copies."""
    fleet = copies.fleet(min(episodes, MOST_ENVS))
    seeds = starts(seed, episodes)
    parts = [
        _played(fleet, view, model, policy, seeds[at : at + fleet.size], greedy, derive(seed, at, "evaluate"))
        for at in range(0, episodes, fleet.size)
    ]
    return Evaluation(
        return_E=np.concatenate([played.return_E for played in parts]),
        length_E=np.concatenate([played.length_E for played in parts]),
        success_E=np.concatenate([played.success_E for played in parts]),
        failed=sum(played.failed for played in parts),
        why=next((played.why for played in parts if played.why), ""),
    )


def _played(
    fleet: Fleet,
    view: View,
    model: WorldModel,
    policy: ActorPolicy,
    seeds: Sequence[int],
    greedy: bool,
    seed: int,
) -> Evaluation:
    count, players = len(seeds), Players(view, model, policy, len(seeds), greedy, seed)
    errors: dict[int, str] = {}
    total_E, length_E, success_E = np.zeros(count), np.zeros(count, np.int64), np.full(count, np.nan)
    begun = fleet.reset(np.arange(count), seeds)
    errors.update(begun.errors)
    observation, live_E = begun.observation, np.array([at not in begun.errors for at in range(count)])
    while live_E.any():
        live = np.flatnonzero(live_E)
        stepped = fleet.step(live, players.decide(observation)[live])
        observation = zeros(fleet.observation_space, count)
        put(observation, live, stepped.observation)
        total_E[live] += stepped.reward_M
        length_E[live] += 1
        if stepped.success_M is not None:
            success_E[live] = stepped.success_M
        errors.update({int(live[at]): message for at, message in stepped.errors.items()})
        live_E[live[stepped.terminated_M | stepped.truncated_M]] = False
        live_E[list(errors)] = False
    ok_E = np.array([at not in errors for at in range(count)])
    return Evaluation(total_E[ok_E], length_E[ok_E], success_E[ok_E], len(errors), next(iter(errors.values()), ""))


class Players:
    """The agent in several episodes at once, from their first observation on."""

    def __init__(self, view: View, model: WorldModel, policy: ActorPolicy, count: int, greedy: bool, seed: int) -> None:
        self._policy, self._greedy = policy, greedy
        self._eyes = Eyes(model, view, count)
        self._code_LA = torch.zeros(count, policy.actions.width, device=policy.device)
        self._first_L = np.ones(count, bool)
        self._noise = torch.Generator().manual_seed(seed)
        self._random = np.random.default_rng(seed)

    remembers = True
    """What it believes of the world."""

    def __repr__(self) -> str:
        return f"<what the policy remembers of {len(self._first_L)} episode(s)>"

    @torch.no_grad()
    def decide(self, observation: Any, greedy: bool | None = None) -> np.ndarray:
        """Actions for what all of them see; `greedy` of this decision alone, where it is given."""
        likeliest = self._greedy if greedy is None else greedy
        self._eyes.look(observation, self._code_LA, self._first_L, self._noise)
        self._first_L = np.zeros_like(self._first_L)
        out = self._policy.network(self._eyes.latent.flat).float().cpu().numpy()
        head = self._policy.head
        recorded = head.mode(out) if likeliest else head.sample(out, self._random)[0]
        self._code_LA = self._policy.actions.code(torch.from_numpy(np.asarray(recorded))).to(self._policy.device)
        action: np.ndarray = head.to_env(recorded)
        return action

    def forget(self, first_L: np.ndarray) -> None:
        """Where True, another episode begins."""
        self._first_L = self._first_L | first_L


# --- one episode at a time, to look at ------------------------------------------------------------------------------


def watch(
    copies: EnvCopies,
    view: View,
    model: WorldModel,
    policy: ActorPolicy,
    episodes: int,
    seed: int,
    render: bool = False,
    video: str | Path | None = None,
) -> list[float]:
    """Greedy episodes; `render`: in a window, or in a film where there is no display."""
    window = render and can_show()
    if render and not window and video is None:
        video = Path("test.mp4")
    mode = "human" if window else "rgb_array" if video is not None else None
    shown = rendered(copies.single, mode)
    players = Players(view, model, policy, 1, True, seed)

    def act(observation: Any) -> Any:
        return players.decide(stack([observation], shown.observation_space))[0]

    class Afresh(gym.Wrapper[Any, Any, Any, Any]):
        """Forgets the last episode when another begins."""

        def reset(self, **options: Any) -> Any:
            nonlocal players
            players = Players(view, model, policy, 1, True, seed)
            return self.env.reset(**options)

    env, seeds = Afresh(shown), starts(seed, episodes)
    try:
        if video is not None and not window:
            return list(record(env, act, episodes, seeds, video).returns)
        return [_episode(env, act, start) for start in seeds]
    finally:
        if shown is not copies.single:
            close(shown)


def _episode(env: gym.Env[Any, Any], act: Callable[[Any], Any], seed: int) -> float:
    (observation, _), total, over = env.reset(seed=seed), 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(act(observation))
        total, over = total + float(reward), bool(terminated or truncated)
    return total
