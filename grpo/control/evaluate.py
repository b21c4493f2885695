"""How good a policy is on starts that training never used; videos and recordings of it.

Letters: M actions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from grpo.agreement import attempted
from grpo.control.config import ControlConfig
from grpo.control.groups import EVALUATION, EXPERT, seeds
from grpo.control.play import Episodes, play
from grpo.control.scaling import Scaling
from grpo.envs.copies import EnvCopies
from grpo.envs.evaluate import Evaluation, rendered
from grpo.envs.fleet import Fleet
from grpo.envs.make import EnvFactory
from grpo.envs.rules import EpisodeRules
from grpo.envs.serial import close
from grpo.envs.spaces import stack
from grpo.envs.video import can_show, record
from grpo.protocols import Ranks, Slots, State
from grpo.seeding import generator

if TYPE_CHECKING:
    from grpo.control.policy import ActorPolicy

EPISODES = ("return_E", "length_E", "success_E")
"""Of an evaluation: what there is of each episode."""
MOST_ENVS = 64
"""Copies that play at a time unless `num_envs` says otherwise."""


class Evaluator:
    """Plays with the policy as it is, and learns nothing from it."""

    def __init__(self, policy: ActorPolicy, scaling: Scaling, copies: EnvCopies, config: ControlConfig) -> None:
        self._policy, self._scaling, self.copies, self._config = policy, scaling, copies, config

    def evaluate(
        self,
        episodes: int | None = None,
        greedy: bool | None = None,
        seed: int | None = None,
        ranks: Ranks | None = None,
    ) -> Evaluation:
        """So many episodes on independent starts, the same ones every time; None: as the settings say.

        ranks: who shares greedy ones; the others are drawn with one generator, so that everybody plays them all.
        """
        config = self._config
        episodes = config.eval_episodes if episodes is None else episodes
        greedy = config.eval_greedy if greedy is None else greedy
        fleet = self.copies.fleet(min(episodes, config.num_envs or MOST_ENVS))
        chosen = config.seed if seed is None else seed
        starts = seeds(chosen, 0, EVALUATION, episodes)
        random = None if greedy else generator(chosen, EVALUATION)
        self._policy.eval()
        if random is None and ranks is not None and ranks.size > 1:
            return shared(ranks, starts, lambda own: play(fleet, self._policy, self._scaling, own, None, config.rules))
        return judged(play(fleet, self._policy, self._scaling, starts, random, config.rules))

    def record(self, path: Path, fleet: Fleet, episodes: int, seed: int | None = None) -> Path:
        """Greedy episodes that did not fail, as a file that `warm_start` takes."""
        from grpo.control.imitate import worth_it, write  # here: whoever watches only needs no torch

        starts = seeds(self._config.seed if seed is None else seed, 0, EXPERT, episodes)
        self._policy.eval()
        played = play(fleet, self._policy, self._scaling, starts, None, self._config.rules)
        return write(path, worth_it(played, fleet.name), self._policy.head)

    def watch(self, episodes: int, render: bool = False, video: str | Path | None = None) -> list[float]:
        """Greedy episodes on independent starts, in a window or a video; their returns."""
        starts = seeds(self._config.seed, 0, EVALUATION, episodes)
        return watch(self.copies.single, self._policy, self._scaling, self._config.rules, starts, render, video)


def judged(episodes: Episodes) -> Evaluation:
    """What these episodes show."""
    ok_N = episodes.ok_N
    found = (episodes.return_N[ok_N], episodes.steps_N[ok_N], episodes.success_N[ok_N])
    return Evaluation(*found, failed=len(episodes.errors), why=next(iter(episodes.errors.values()), ""))


def shared(ranks: Ranks, starts: Sequence[int], playing: Callable[[Sequence[int]], Episodes]) -> Evaluation:
    """What episodes from these starts show, each rank's share played by it."""
    own = Slots(ranks.rank, ranks.size).of(len(starts))

    def mine() -> State:
        if not own:
            return State({"count": 0, "why": ""}, {})
        found = judged(playing(starts[own.start : own.stop]))
        return State({"count": found.failed, "why": found.why}, {name: vars(found)[name] for name in EPISODES})

    told = attempted(ranks, "evaluating", mine)
    joined = {name: np.concatenate([state.arrays[name] for state in told if state.arrays]) for name in EPISODES}
    why = next((state.values["why"] for state in told if state.values["why"]), "")
    return Evaluation(**joined, failed=sum(state.values["count"] for state in told), why=why)


# --- one episode at a time, to look at ------------------------------------------------------------------------------


class Player(gym.Wrapper[Any, Any, Any, Any]):
    """An environment and the greedy policy that plays it, observation by observation."""

    def __init__(self, env: gym.Env[Any, Any], policy: ActorPolicy, scaling: Scaling, rules: EpisodeRules) -> None:
        super().__init__(env)
        self._policy, self._scaling, self._rules = policy, scaling, rules

    def reset(self, **options: Any) -> Any:
        """A new episode: the policy forgets the last one."""
        self._memory = self._policy.begin(1)
        self._ahead: list[Any] = []
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        """The environment's, over with its first success where that is asked for."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        there = self._rules.end_on_success and bool(info.get("is_success", info.get("success", False)))
        return observation, reward, terminated or there, truncated, info

    def act(self, observation: Any) -> Any:
        """The action for what is seen."""
        if not self._ahead:
            seen = self._scaling(stack([observation], self.env.observation_space))
            acted = self._policy.act(seen, None, self._memory)
            self._memory = acted.memory
            action_M, times = self._policy.head.to_env(acted.recorded), self._rules.action_repeat
            self._ahead = [action for action in action_M for _ in range(times)]
        return self._ahead.pop(0)

    def episode(self, seed: int) -> float:
        """The return of one episode."""
        (observation, _), total, over = self.reset(seed=seed), 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = self.step(self.act(observation))
            total, over = total + float(reward), bool(terminated or truncated)
        return total


def watch(
    env: EnvFactory | gym.Env[Any, Any],
    policy: ActorPolicy,
    scaling: Scaling,
    rules: EpisodeRules,
    seeds: Sequence[int],
    render: bool = False,
    video: str | Path | None = None,
) -> list[float]:
    """Greedy episodes; `render`: in a window, or in a video where there is no display."""
    window = render and can_show()
    if render and not window and video is None:
        video = Path("test.mp4")
    shown = rendered(env, "human" if window else "rgb_array" if video is not None else None)
    player = Player(shown, policy, scaling, rules)
    policy.eval()
    try:
        if video is None or window:
            return [player.episode(seed) for seed in seeds]
        return list(record(player, player.act, len(seeds), seeds, video).returns)
    finally:
        if shown is not env:
            close(shown)
