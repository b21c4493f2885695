"""Where the control room's tries come from: groups of episodes, judged and handed over as `Rollouts`."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from grpo.config import ConfigError
from grpo.control.baselines.critic import Critic
from grpo.control.baselines.fitted import FittedValue
from grpo.control.baselines.linear import Baseline, choose, explained, linear, returns_to_go
from grpo.control.baselines.points import until_reward
from grpo.control.chunks import by_token, paid_together
from grpo.control.config import ROOM_BASELINES, ControlConfig
from grpo.control.evaluate import judged, watch
from grpo.control.export import Greedy, export_onnx
from grpo.control.films import Reel, film
from grpo.control.groups import (
    EVALUATION,
    EXPERT,
    expect_anchors,
    inner_groups,
    seeds,
    starts_of,
    tries,
    within,
)
from grpo.control.imitate import imitate, shown_by, worth_it, write
from grpo.control.play import Episodes, play
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import LIMIT, Scaling
from grpo.control.stream import StepWindows
from grpo.envs.evaluate import Evaluation
from grpo.envs.fleet import EnvError, Fleet
from grpo.envs.make import EnvFactory
from grpo.envs.spaces import each, layout, stack, take
from grpo.protocols import Collected, CollectRequest, State, as_part, part
from grpo.resample import resample
from grpo.rollouts import Rollouts, Status
from grpo.seeding import generator

EXAMPLES = 32
"""Observations that an export is checked on."""
MOST_SEEN = 8
"""Numbers of an observation that are kept beside the actions; larger ones say little to the eye."""
MOST_ENVS = 64
"""Copies that play at a time unless `num_envs` says otherwise."""


@dataclass(frozen=True)
class World:
    """How the environment is made."""

    single: EnvFactory | gym.Env[Any, Any]
    """One to look at."""
    others: Callable[[int], Fleet]
    """So many copies for evaluation, apart from those that train."""


class ControlSource:
    """Plays groups of episodes with the policy. It owns the environments, the scaling and, if asked for, a critic."""

    headline = ("return", "episode_length", "env_steps", "eval/return")
    """What a person wants to see first."""

    panels = ("return", "episode_length", "success", "eval/return")
    """What its curves show first."""

    def __init__(
        self,
        policy: ActorPolicy,
        scaling: Scaling,
        fleet: Fleet,
        world: World,
        config: ControlConfig,
    ) -> None:
        self.policy, self.scaling, self.fleet, self.config = policy, scaling, fleet, config
        self.world = world
        streams = config.group_by == "steps"
        if streams and fleet.size < config.groups_per_step:
            raise EnvError(
                f"{fleet.name}: group_by=steps needs a copy for each group; set groups_per_step=1, or pass an id"
            )
        self._eval_fleet: Fleet | None = None
        if config.group_by == "anchor":
            expect_anchors(self.fleet.observation_space, self.fleet.name)
        self.windows = StepWindows(self.fleet, config) if streams else None
        self.critic = Critic(self.fleet.observation_space, config) if config.judged_by == "critic" else None
        self._sighted = config.judged_by == "fitted" and self._sees_pictures()
        """Whether the value that is solved for reads what the policy makes of pictures, not the pictures."""
        read = gym.spaces.Box(-np.inf, np.inf, (policy.sight_size,)) if self._sighted else fleet.observation_space
        self.fitted = FittedValue(read, config) if config.judged_by == "fitted" else None
        self.env_steps, self.episodes = 0, 0
        self.cold = config.warm_start is not None
        """Whether there is an expert that has not been imitated yet."""
        self._metrics: dict[str, float | None] = {}
        self._baseline_metrics: dict[str, float | None] = {}
        self._errors: dict[int, str] = {}
        """Of the step's rows, by number."""
        self._rows = 0
        self._firsts: list[int] = []
        """Number of the first row of each attempt."""
        self._reels: list[Reel] = []
        """The step's episodes, attempt by attempt, to play them again."""

    # --- a warm start ----------------------------------------------------------------------------------------------

    def warm_up(self) -> dict[str, float | None]:
        """Imitate the expert, once; how good the policy was before and is after it."""
        before = self.judge(self.config.eval_episodes, self.config.eval_greedy).metrics()
        starts = seeds(self.config.seed, 0, EXPERT, self.config.warm_start_episodes)
        shown = shown_by(self.config, self.fleet, self.policy.head, starts)
        logp = imitate(self.policy, self.scaling, shown, self.config)
        after = self.judge(self.config.eval_episodes, self.config.eval_greedy).metrics()
        self.cold, self.env_steps = False, self.env_steps + shown.env_steps
        found: dict[str, float | None] = {"imitated": float(len(shown)), "logp": logp}
        found |= {f"before/{name}": value for name, value in before.items()}
        found |= {f"after/{name}": value for name, value in after.items()}
        return {f"warm_start/{name}": value for name, value in found.items()}

    # --- tries ------------------------------------------------------------------------------------------------------

    def collect(self, request: CollectRequest) -> Collected:
        """A group of tries from each start; with filter_rewards only those that tell something."""
        collected = self._tries(request)
        return self._filtered(collected, request) if self.config.filter_rewards else collected

    def _filtered(self, collected: Collected, request: CollectRequest) -> Collected:
        """Groups whose mean return is within bounds; where none is, the last ones, with nothing to learn from."""
        low, high = self.config.rewards_lower_bound, self.config.rewards_upper_bound
        bounds = -np.inf if low is None else low, np.inf if high is None else high
        most = self.config.max_attempts
        found = resample(collected, request, lambda rollouts: within(rollouts, *bounds), self._tries, most)
        self._metrics = {**self._metrics, "attempts": float(found.attempts), "filtered": float(found.missing)}
        kept = found.rollouts
        silent = kept.but(mask_NT=torch.zeros_like(kept.mask_NT)) if found.none_kept else kept
        return Collected(silent, collected.starts)

    def _tries(self, request: CollectRequest) -> Collected:
        """A group of tries from each start."""
        config = self.config
        random = generator(config.seed, request.step, request.attempt)
        self.policy.eval()
        if self.windows is not None:
            episodes, group_N = self.windows.next(self.policy, self.scaling, random)
            starts: list[Any] = list(range(config.groups_per_step))
            found = None
        else:
            starts, found = (
                starts_of(config, request.step, self.fleet, self.policy, self.scaling, random)
                if request.starts is None
                else (list(request.starts), None)
            )
            each, group_N = tries(config, starts)
            keep = self._keeps_old or self.policy.columns.width > 1
            episodes = play(self.fleet, self.policy, self.scaling, each, random, config.rules, keep_out=keep)
            self._reels = [*(self._reels if request.attempt else ()), Reel.of(each, episodes)]
        self.env_steps += episodes.env_steps + (0 if found is None else found.env_steps)
        rollouts = self._rollouts(episodes, group_N, request.attempt)
        self._measure(episodes if found is None else found, request.attempt)
        if self.scaling.mean:  # else it would copy every picture for nothing
            self.scaling.update(take(episodes.raw, episodes.mask_NT))
        return Collected(rollouts, starts)

    @property
    def _keeps_old(self) -> bool:
        """Whether the exact KL to the policy that sampled is asked for."""
        recipe = self.config.recipe
        return bool(recipe.beta) and recipe.kl_estimator == "exact"

    def _rollouts(self, episodes: Episodes, group_N: np.ndarray, attempt: int) -> Rollouts:
        device = self.policy.device
        first = self._number_rows(episodes, attempt)
        columns = self.policy.columns
        reward_NT = learned_from(episodes, self.config)
        if self.config.reward_type == "chunk_level":
            reward_NT = paid_together(reward_NT, episodes.length_N, columns.size)

        def tensor(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.as_tensor(x, dtype=dtype, device=device)

        inputs: dict[str, Any] = {
            "observation": self.policy.tensors(episodes.observation),
            "action": tensor(episodes.action_NT),
            "row": first + torch.arange(len(episodes), device=device)[:, None].expand(episodes.mask_NT.shape),
        }
        if self._keeps_old and episodes.out_NTF is not None:
            with torch.no_grad():
                inputs["old"] = self.policy.head.describe(tensor(episodes.out_NTF))
        status_N = np.full(len(episodes), int(Status.TRUNCATED))
        status_N[episodes.terminated_N] = int(Status.TERMINATED)
        status_N[~episodes.ok_N] = int(Status.FAILED)
        inner_NT = inner_groups(self.config, episodes, group_N)
        judged = self._looked_at(episodes, inputs["observation"]) if self._sighted else episodes
        baseline_NT = self._baseline(judged, reward_NT, group_N)
        rollouts = Rollouts(
            group_N=tensor(group_N),
            mask_NT=tensor(episodes.mask_NT),
            old_logp_NT=tensor(episodes.logp_NT, torch.float32),
            reward_NT=tensor(reward_NT, torch.float32),
            inputs=inputs,
            group_NT=None if inner_NT is None else tensor(inner_NT),
            baseline_NT=None if baseline_NT is None else tensor(baseline_NT, torch.float32),
            status_N=tensor(status_N),
        )
        if columns.width == 1:
            return rollouts
        with torch.no_grad():
            token_NTE = self.policy.head.token_logp(tensor(episodes.out_NTF), inputs["action"])
        return by_token(rollouts, columns, token_NTE)

    def _sees_pictures(self) -> bool:
        return self.policy.sight_size > 0 and bool(layout(self.fleet.observation_space).pictures)

    def _looked_at(self, episodes: Episodes, seen: Any) -> Episodes:
        """Episodes whose observations are what the policy makes of them; `seen`: the same, on its device already."""
        rows = episodes.mask_NT.shape
        sight_NTH = self.policy.sight(each(seen, lambda x: x.flatten(0, 1))).reshape(*rows, -1)
        return replace(episodes, raw=sight_NTH, last=self.policy.sight(self.scaling(episodes.last)))

    def _number_rows(self, episodes: Episodes, attempt: int) -> int:
        """The first row's number: starts that are asked for again within a step get rows of their own."""
        first = self._rows if attempt else 0
        errors = {first + row: message for row, message in episodes.errors.items()}
        self._errors = self._errors | errors if attempt else errors
        self._rows = first + len(episodes)
        self._firsts = [*self._firsts, first] if attempt else [first]
        return first

    def _baseline(self, episodes: Episodes, reward_NT: np.ndarray, group_N: np.ndarray) -> np.ndarray | None:
        judged, gamma = self.config.judged_by, self.config.recipe.gamma
        if judged not in ROOM_BASELINES:
            return None
        return_NT = returns_to_go(episodes, reward_NT, gamma)
        half_N, horizon = _member(group_N) % 2, self.fleet.horizon or 1000
        if self.windows is not None:  # a stream may be a single row, and rows are of different episodes anyway
            half_N = np.arange(len(group_N)) % 2
        if judged == "auto":
            found = choose(episodes, return_NT, group_N, half_N, horizon, self.policy.sight)
        else:
            judged_NT = return_NT
            if self.critic is not None:
                baseline_NT = self.critic.baseline(episodes, reward_NT, return_NT, self.scaling)
            elif self.fitted is not None and self.config.credit_until_reward:
                judged_NT, baseline_NT = until_reward(self.fitted.baseline, episodes, reward_NT, half_N, gamma)
            elif self.fitted is not None:
                baseline_NT = self.fitted.baseline(episodes, reward_NT, return_NT, half_N)
            else:
                baseline_NT = linear(episodes, return_NT, half_N, horizon, self.policy.sight)
            share = explained(judged_NT, baseline_NT, episodes.mask_NT)
            found = Baseline(baseline_NT + (return_NT - judged_NT), share, judged)  # what is not judged cancels
        self._baseline_metrics = {"baseline_explained": found.explained}
        if judged == "auto":
            self._baseline_metrics |= {
                f"baseline/{name}": float(name == found.choice) for name in ("linear", "step", "batch_step")
            }
        return found.baseline_NT

    def _measure(self, episodes: Episodes, attempt: int) -> None:
        """Whole episodes as the environment scores them; of starts that are asked for again, only how many."""
        ok_N = episodes.ok_N
        known_N = episodes.success_N[ok_N & ~np.isnan(episodes.success_N)]
        if self.windows is not None:
            finished = self.windows.stream.finished
            self.episodes = self.windows.stream.ended
            found: dict[str, float | None] = {
                "return": float(np.mean([total for total, _ in finished])) if finished else None,
                "episode_length": float(np.mean([length for _, length in finished])) if finished else None,
            }
        else:
            self.episodes += int(ok_N.sum())
            returns, lengths = episodes.return_N[ok_N], episodes.steps_N[ok_N]
            found = {
                "return": float(returns.mean()) if len(returns) else None,
                "return_std": float(returns.std()) if len(returns) else None,
                "episode_length": float(lengths.mean()) if len(lengths) else None,
            }
        found |= {"success": float(known_N.mean())} if len(known_N) else {}
        found = self._metrics if attempt else found | self._baseline_metrics
        self._metrics = found | {"env_steps": float(self.env_steps), "episodes": float(self.episodes)}

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> Mapping[str, float | None]:
        """Metrics on starts that training never uses, the same ones every time."""
        return self.judge(self.config.eval_episodes, self.config.eval_greedy).metrics()

    def judge(self, episodes: int, greedy: bool = True, seed: int | None = None) -> Evaluation:
        """So many episodes on independent starts."""
        size = min(episodes, self.config.num_envs or MOST_ENVS)
        if self._eval_fleet is not self.fleet and (self._eval_fleet is None or self._eval_fleet.size < size):
            if self._eval_fleet is not None:
                self._eval_fleet.close()
            self._eval_fleet = self.world.others(size)  # the training fleet itself, where there is only one copy
        chosen = self.config.seed if seed is None else seed
        starts = seeds(chosen, 0, EVALUATION, episodes)
        random = None if greedy else generator(chosen, EVALUATION)
        self.policy.eval()
        return judged(play(self._eval_fleet, self.policy, self.scaling, starts, random, self.config.rules))

    def record(self, path: Path, episodes: int, seed: int | None = None) -> Path:
        """Greedy episodes that did not fail, as a file that `warm_start` takes."""
        starts = seeds(self.config.seed if seed is None else seed, 0, EXPERT, episodes)
        self.policy.eval()
        played = play(self.fleet, self.policy, self.scaling, starts, None, self.config.rules)
        return write(path, worth_it(played, self.fleet.name), self.policy.head)

    def leave(self, folder: Path) -> Mapping[str, Path]:
        """A video of the policy on one independent start, for the run folder."""
        if not self.config.video:
            return {}
        path = folder / "video.mp4"
        starts = seeds(self.config.seed, 0, EVALUATION, 1)
        watch(self.world.single, self.policy, self.scaling, self.config.rules, starts, video=path)
        return {"video": path}

    def film(self, rows: Rollouts, stem: Path) -> list[list[dict[str, str]]]:
        """The episodes of these rows once more, as films beside the samples."""
        if not self.config.films or self.windows is not None:
            return []
        tapes = []
        for number in rows.inputs["row"][:, 0].tolist():
            attempt = bisect_right(self._firsts, number) - 1
            row = number - self._firsts[attempt]
            tapes.append(self._reels[attempt].tape(row, self.policy.head, self.config.action_repeat))
        return film(self.world.single, self.fleet, tapes, stem)

    def export(self, path: Path) -> Path:
        """The greedy policy, scaling included, as an ONNX file."""
        mean, std = self.scaling.tree()
        greedy = Greedy(self.policy.network, self.policy.head, mean, std, LIMIT, self.policy.columns.size)
        space = copy.deepcopy(self.fleet.observation_space)
        space.seed(0)
        example = self.policy.tensors(stack([space.sample() for _ in range(EXAMPLES)], space))
        return export_onnx(greedy, example, path, self.policy.begin(EXAMPLES))

    # --- what must be kept, and what can be seen --------------------------------------------------------------------

    def state(self) -> State:
        """Counters, scaling, critic, a module's buffers, streams under way; other episodes begin anew every step."""
        values: dict[str, Any] = {"env_steps": self.env_steps, "episodes": self.episodes, "count": self.scaling.count}
        values |= {"cold": self.cold, "way": self.policy.way}
        parts: dict[str, Mapping[str, Any]] = {"scaling": self.scaling.arrays()}
        parts["buffer"] = {name: x.detach().clone() for name, x in self.policy.network.named_buffers()}
        if self.critic is not None:
            parts["critic"] = self.critic.arrays()
        if self.fitted is not None:
            parts["fitted"] = self.fitted.arrays()
        if self.windows is not None:
            values["streams"], parts["streams"] = self.windows.values(), self.windows.arrays()
        named = {key: x for name, arrays in parts.items() for key, x in as_part(name, arrays).items()}
        return State(values, {key: torch.as_tensor(x) for key, x in named.items()})

    def expect_way(self, values: Mapping[str, Any]) -> None:
        """Refuse weights that were learned for pictures read another way: they would fit, and see something else."""
        if values.get("way", 0) != self.policy.way:
            raise ConfigError(
                "the checkpoint is of a policy that reads pictures another way (an earlier version's, or an actor of "
                "your own); train anew, or pass that actor"
            )

    def load_state(self, state: State) -> None:
        """Go on from there."""
        self.env_steps, self.episodes = int(state.values["env_steps"]), int(state.values["episodes"])
        self.cold = bool(state.values.get("cold", False))
        kept = {name: np.asarray(x) for name, x in state.arrays.items()}
        self.scaling.load(float(state.values["count"]), part(kept, "scaling"))
        buffers = part(kept, "buffer")
        for name, buffer in self.policy.network.named_buffers():
            buffer.copy_(torch.as_tensor(buffers[name]))
        if self.critic is not None:
            self.critic.load(part(kept, "critic"))
        if self.fitted is not None:
            self.fitted.load(part(kept, "fitted"))
        if self.windows is not None:
            self.windows.load(state.values["streams"], part(kept, "streams"))

    def metrics(self) -> Mapping[str, float | None]:
        """Of the episodes collected last."""
        return self._metrics

    @torch.no_grad()
    def entropies(self, rows: Rollouts) -> torch.Tensor | None:
        """Of each action, by the policy as it is now."""
        self.policy.eval()
        return self.policy.score(rows, entropy=True).entropy_NT

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """Actions, rewards, length of each row, what was seen if it is little, and what went wrong with it."""
        numbers = rows.inputs["row"][:, 0].tolist()
        seen = rows.inputs["observation"]
        short = torch.is_tensor(seen) and seen.ndim == 3 and seen.shape[2] <= MOST_SEEN and seen.is_floating_point()
        lengths = rows.mask_NT.sum(1).tolist()
        shown: list[dict[str, Any]] = []
        for i, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            trace = {
                "length": length,
                "actions": rows.inputs["action"][i, :length].tolist(),
                "rewards": [] if rows.reward_NT is None else rows.reward_NT[i, :length].tolist(),
            }
            if short:
                trace["observations"] = [[round(x, 4) for x in seen_F] for seen_F in seen[i, :length].tolist()]
            if attempt := max(bisect_right(self._firsts, number) - 1, 0):
                trace["attempt"] = attempt
            shown.append(trace | ({"error": self._errors[number]} if number in self._errors else {}))
        return shown

    def close(self) -> None:
        """End the environments and their processes."""
        for fleet in (self.fleet, self._eval_fleet):
            if fleet is not None:
                fleet.close()


def _member(group_N: np.ndarray) -> np.ndarray:
    """The place of each row in its group: 0, 1, …"""
    order = np.argsort(group_N, kind="stable")
    first = np.searchsorted(group_N[order], group_N[order])
    place_N = np.empty(len(group_N), np.int64)
    place_N[order] = np.arange(len(group_N)) - first
    return place_N


def learned_from(episodes: Episodes, config: ControlConfig) -> np.ndarray:
    """Rewards as the algorithm sees them."""
    reward_NT, most = np.where(episodes.mask_NT, episodes.reward_NT, 0.0), config.clip_rewards
    return (reward_NT if most is None else reward_NT.clip(-most, most)) * config.reward_scale
