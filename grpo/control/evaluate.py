"""How good a policy is on starts that training never used, with confidence intervals; and a video of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.control.play import Episodes
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory
from grpo.envs.serial import name_of
from grpo.envs.spaces import stack
from grpo.envs.video import can_show, record

RESAMPLES = 2000


@dataclass(frozen=True)
class Evaluation:
    """Whole episodes of a policy that does not learn meanwhile."""

    return_E: np.ndarray
    length_E: np.ndarray
    success_E: np.ndarray
    """NaN where the environment does not tell."""
    failed: int = 0
    why: str = ""
    """What went wrong with the first that failed."""

    @staticmethod
    def of(episodes: Episodes) -> Evaluation:
        """What these episodes show."""
        ok_N = episodes.ok_N
        found = (episodes.return_N[ok_N], episodes.steps_N[ok_N], episodes.success_N[ok_N])
        return Evaluation(*found, failed=len(episodes.errors), why=next(iter(episodes.errors.values()), ""))

    def metrics(self) -> dict[str, float | None]:
        """Means and spread, for a run's metrics."""
        known_E = self.success_E[~np.isnan(self.success_E)]
        if not len(self.return_E):
            return {"return": None, "failed": float(self.failed)}
        found: dict[str, float | None] = {
            "return": float(self.return_E.mean()),
            "return_std": float(self.return_E.std()),
            "length": float(self.length_E.mean()),
        }
        if len(known_E):
            low, high = share_interval(known_E)
            found |= {"success": float(known_E.mean()), "success_low": low, "success_high": high}
        return found | ({"failed": float(self.failed)} if self.failed else {})

    def table(self) -> list[dict[str, Any]]:
        """A row a quantity: mean, 95 % interval of the mean, spread, extremes."""
        if not len(self.return_E):
            raise EnvError(f"all {self.failed} episodes failed{f': {self.why}' if self.why else ''}")
        known_E = self.success_E[~np.isnan(self.success_E)]
        rows = [_row("return", self.return_E), _row("length", self.length_E)]
        return rows + ([_row("success", known_E)] if len(known_E) else [])


def _row(name: str, value_E: np.ndarray) -> dict[str, Any]:
    low, high = share_interval(value_E) if name == "success" else interval(value_E)
    return {
        "quantity": name,
        "mean": float(value_E.mean()),
        "low": low,
        "high": high,
        "std": float(value_E.std()),
        "min": float(value_E.min()),
        "max": float(value_E.max()),
        "episodes": len(value_E),
    }


def interval(value_E: np.ndarray, share: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap of the mean, the same every time."""
    random = np.random.default_rng(0)
    means = value_E[random.integers(0, len(value_E), (RESAMPLES, len(value_E)))].mean(1)
    tail = 50 * (1 - share)
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def share_interval(value_E: np.ndarray, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of yes and no, which 20 of 20 does not shrink to a point."""
    count, share = len(value_E), float(value_E.mean())
    middle, spread = share + z * z / (2 * count), z * np.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    low, high = (middle - spread) / (1 + z * z / count), (middle + spread) / (1 + z * z / count)
    return max(float(low), 0.0), min(float(high), 1.0)


# --- one episode at a time, to look at ------------------------------------------------------------------------------


class Player(gym.Wrapper[Any, Any, Any, Any]):
    """An environment and the greedy policy that plays it, observation by observation."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        policy: ActorPolicy,
        scaling: Scaling,
        action_repeat: int = 1,
        end_on_success: bool = False,
    ) -> None:
        super().__init__(env)
        self._policy, self._scaling, self._repeat, self._ends = policy, scaling, action_repeat, end_on_success

    def reset(self, **options: Any) -> Any:
        """A new episode: the policy forgets the last one."""
        self._memory = self._policy.begin(1)
        self._ahead: list[Any] = []
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        """The environment's, over with its first success where that is asked for."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        there = self._ends and bool(info.get("is_success", info.get("success", False)))
        return observation, reward, terminated or there, truncated, info

    def act(self, observation: Any) -> Any:
        """The action for what is seen."""
        if not self._ahead:
            seen = self._scaling(stack([observation], self.env.observation_space))
            acted = self._policy.act(seen, None, self._memory)
            self._memory = acted.memory
            self._ahead = [a for a in self._policy.head.to_env(acted.recorded) for _ in range(self._repeat)]
        return self._ahead.pop(0)

    def episode(self, seed: int) -> float:
        """The return of one episode."""
        (observation, _), total, over = self.reset(seed=seed), 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = self.step(self.act(observation))
            total, over = total + float(reward), bool(terminated or truncated)
        return total


def rendered(env: EnvFactory | gym.Env[Any, Any], mode: str | None) -> gym.Env[Any, Any]:
    """The environment in a render mode: the one that was given where it has it, else made again."""
    if isinstance(env, EnvFactory):
        return env.make(render_mode=mode)
    if mode is None or env.render_mode == mode:
        return env
    if env.spec is None:
        raise EnvError(f"{name_of(env)} was not made with gym.make, so it cannot be made again to draw it; pass an id")
    return gym.make(env.spec, render_mode=mode)


def watch(
    env: EnvFactory | gym.Env[Any, Any],
    policy: ActorPolicy,
    scaling: Scaling,
    action_repeat: int,
    seeds: Sequence[int],
    render: bool = False,
    video: str | Path | None = None,
    end_on_success: bool = False,
) -> list[float]:
    """Greedy episodes; `render`: in a window, or in a video where there is no display."""
    window = render and can_show()
    if render and not window and video is None:
        video = Path("test.mp4")
    shown = rendered(env, "human" if window else "rgb_array" if video is not None else None)
    player = Player(shown, policy, scaling, action_repeat, end_on_success)
    policy.eval()
    try:
        if video is None or window:
            return [player.episode(seed) for seed in seeds]
        return list(record(player, player.act, len(seeds), seeds, video).returns)
    finally:
        if shown is not env:
            shown.close()
