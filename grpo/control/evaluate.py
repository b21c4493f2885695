"""How good a policy is on starts that training never used; and a video of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from grpo.control.play import Episodes
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.evaluate import Evaluation, rendered
from grpo.envs.make import EnvFactory
from grpo.envs.rules import EpisodeRules
from grpo.envs.spaces import stack
from grpo.envs.video import can_show, record


def judged(episodes: Episodes) -> Evaluation:
    """What these episodes show."""
    ok_N = episodes.ok_N
    found = (episodes.return_N[ok_N], episodes.steps_N[ok_N], episodes.success_N[ok_N])
    return Evaluation(*found, failed=len(episodes.errors), why=next(iter(episodes.errors.values()), ""))


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
            self._ahead = [
                a for a in self._policy.head.to_env(acted.recorded) for _ in range(self._rules.action_repeat)
            ]
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
            shown.close()
