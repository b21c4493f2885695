"""Where the world-model room's tries come from: it learns the world from what was played, and imagines futures in it.

collect:  collector ─► replay ─► update the world model as often as is due
                             └─► P states seen on the way ─► P × G imagined futures ─► returns ─► Rollouts

Letters: H steps of a future, F numbers that the actor gives for a decision, B × T replayed steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.config import ConfigError
from grpo.envs.copies import EnvCopies
from grpo.envs.evaluate import Evaluation
from grpo.envs.fleet import Fleet
from grpo.errors import SamplesFailed, line
from grpo.protocols import Collected, CollectRequest, Ranks, State, as_part, part
from grpo.rollouts import Rollouts
from grpo.run.inside import write_inside
from grpo.seeding import derive
from grpo.worldmodel.collector import Collector
from grpo.worldmodel.config import WorldModelConfig
from grpo.worldmodel.evaluate import Players, judge, watch
from grpo.worldmodel.imagine import Futures, Imagination, Imagined, RewardFn, own_rewards
from grpo.worldmodel.model.learner import Learner, ModelDiverged, choose
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.process import prepare
from grpo.worldmodel.replay.buffer import Replay, Sample
from grpo.worldmodel.returns import Critic, ReturnNormalizer, as_rewards, discounted, lambda_returns
from grpo.worldmodel.show import imagined_vectors, leave_forecast, leave_futures, leave_groups, leave_strips
from grpo.worldmodel.tail import FittedTail
from grpo.worldmodel.views import View

KEPT = ("range", "ratio", "ahead", "counted", "lanes", "study", "critic", "tail", "replay", "actor")
"""The parts of a state, named and in order as files have them."""
MEASURED = 256
"""Sequences by which observations are scaled."""


@dataclass(frozen=True)
class Returns:
    """Imagined futures as the algorithm gets them."""

    reward_NH: Tensor | None
    reward_N: Tensor | None
    baseline_NH: Tensor | None


class WorldModelSource:
    """Owns the collector, the world model with its optimizer and, if asked for, a critic."""

    headline = ("return", "env_steps", "imagined/return", "model/loss", "eval/return")
    """What a person wants to see first."""

    panels = ("return", "imagined/return", "model/loss", "eval/return")
    """What its curves show first."""

    def __init__(
        self,
        policy: ActorPolicy,
        learner: Learner,
        fleet: Fleet,
        view: View,
        copies: EnvCopies,
        config: WorldModelConfig,
        reward_fn: RewardFn | None = None,
    ) -> None:
        self.policy, self.learner, self.view, self.copies = policy, learner, view, copies
        self.model = learner.model
        self.config, self.reward_fn = config, reward_fn
        self.collector = Collector(learner, policy, fleet, view, config)
        self.critic: Critic | None = None
        if config.valued:
            width, units, layers = self.model.flat_width, self.model.size.units, config.actor_layers
            made = Critic(width, units, layers, config.critic_learning_rate, config.slow_rate, config.seed)
            self.critic = made.to(policy.device)
        self.tail: FittedTail | None = None
        if config.beyond == "fitted":
            drawn = derive(config.seed, 0, "tail")
            self.tail = FittedTail(self.model.flat_width, config.discount, config.gae_lambda, drawn, policy.device)
        self._imagination = Imagination(
            learner.model, policy, learner.compiled, config.cuda_graphs, coarse=config.precision == "bfloat16"
        )
        self.normalizer = ReturnNormalizer()
        self.parentless: str | None = None
        """Why the agent to begin with was not found; what goes on from a saved state does without."""
        self._metrics: dict[str, float | None] = {}
        self._seconds: dict[str, float] = {}
        self._last: Imagined | None = None
        """What was imagined last, and below what it was paid: to look at."""
        self._paid_NH: Tensor | None = None

    # --- tries ------------------------------------------------------------------------------------------------------

    def collect(self, request: CollectRequest) -> Collected:
        """A group of imagined futures from each start."""
        if request.starts is None:
            start = self._live(request.step)
        else:
            start = Latent(
                torch.stack([one.deter for one in request.starts]), torch.stack([one.stoch for one in request.starts])
            )
        config, policy = self.config, self.policy
        random = self._generator(request.step, f"imagine/{request.attempt}")
        imagined = self._imagination(start, config.group_size, config.horizon, random)
        returns = self._returns(imagined, request.attempt)
        weight_NH = imagined.weight_NH(config.discount)
        inputs: dict[str, Any] = {"flat": imagined.flat[:, :-1].contiguous(), "action": imagined.action_NH}
        if config.recipe.beta and config.recipe.kl_estimator == "exact":
            with torch.no_grad():
                inputs["old"] = policy.head.describe(imagined.out_NHF)
        starts = [start[p] for p in range(len(start.deter))]
        rollouts = Rollouts(
            group_N=torch.arange(len(starts), device=policy.device).repeat_interleave(config.group_size),
            mask_NT=torch.ones_like(weight_NH, dtype=torch.bool),
            old_logp_NT=imagined.logp_NH,
            reward_N=returns.reward_N,
            reward_NT=returns.reward_NH,
            baseline_NT=returns.baseline_NH,
            weight_NT=None if config.recipe.credit == "trajectory" else weight_NH,  # there it is in the reward
            inputs=inputs,
        )
        self._last = imagined if request.attempt == 0 else self._last
        return Collected(rollouts, starts)

    def _live(self, step: int) -> Latent:
        """Play and learn what is due; the states to imagine from."""
        self._begin()
        began = time.perf_counter()
        played = self.collector.advance(step)
        learns = time.perf_counter()
        if step == 0 and self.config.measures_observations:
            self.model.measure(self.learner.given(played.replay.peek(MEASURED, 0))[0])
        seen = self._learned(played.replay, played.updates, step)
        self._seconds = {"play": learns - began, "world_model": time.perf_counter() - learns}
        counts = {"model/updates": float(self.learner.updates), "model/updates_skipped": float(self.learner.skipped)}
        self._metrics = {**played.metrics, **counts, **played.replay.metrics(), **self.learner.metrics}
        return choose(*seen, self.config.groups_per_step, played.random)

    def _learned(self, replay: Replay, updates: int, step: int) -> tuple[Latent, Tensor]:
        """So many updates of the world model; the states that the last one passed through, and which are ends."""
        random, seen = self._generator(step, "learn"), None
        for _ in range(updates):
            sample = replay.sample(self.config.batch_size)
            try:
                seen = self.learner.update(sample, replay, random)
            except ModelDiverged as error:
                raise ModelDiverged(f"{error}{self._dumped(sample, step)}") from None
        return self.learner.remember(replay.sample(self.config.batch_size), random) if seen is None else seen

    def _dumped(self, sample: Sample, step: int) -> str:
        """Leave the batch that did it, for looking at; where it is."""
        if self.folder is None:
            return ""
        path = self.folder / "samples" / f"diverged-model-{step + 1:08d}.npz"
        try:
            path.parent.mkdir(exist_ok=True)
            arrays: dict[str, Any] = {"ids": sample.ids_BT, **sample.batch}
            write_inside(self.folder, f"samples/{path.name}", lambda file: np.savez_compressed(file, **arrays))
        except OSError as error:
            return f"; the batch was not kept: {error}"
        return f"; the last batch is in {path}"

    def _begin(self) -> None:
        """Before anything is played: nobody takes a fresh agent for the one that was asked for."""
        if self.parentless is not None:
            raise ConfigError(self.parentless)
        prepare(self.policy.device, self.config.precision)

    def _returns(self, imagined: Imagined, attempt: int) -> Returns:
        """Rewards, and a baseline where the actor wants one, so that the algorithm's returns are the actor's."""
        config, gamma = self.config, self.config.discount
        reward_NH, continue_NH = imagined.reward_NH, imagined.continue_NH
        weight_NH = imagined.weight_NH(gamma)
        if self.reward_fn is not None:
            try:
                own = own_rewards(self.reward_fn, Futures(imagined, self.model, self.policy))
            except Exception as error:  # a user's function may raise anything
                raise SamplesFailed(f"the reward function failed: {line(error)}") from error
            whole = own.ndim == 1
            reward_NH = torch.cat([torch.zeros_like(reward_NH[:, 1:]), own[:, None]], 1) if whole else own
            if whole and not config.valued and self.tail is None:
                self._note(own, reward_NH, attempt)
                return Returns(None, own / self._scale(own[:, None], attempt), None)
        value_NH, last_N = None, torch.zeros_like(reward_NH[:, 0])
        if self.tail is not None:
            last_N = self.tail.value(imagined.flat, reward_NH, continue_NH, weight_NH, config.group_size, not attempt)
        if self.critic is None:
            return_NH = discounted(reward_NH, continue_NH, last_N, gamma)
        else:
            all_NH = self.critic.value(imagined.flat)
            value_NH, ahead_NH = all_NH[:, :-1], all_NH[:, 1:]
            last_N = ahead_NH[:, -1]
            lam = config.gae_lambda if config.actor == "critic" else 1.0
            return_NH = lambda_returns(reward_NH, continue_NH, ahead_NH, last_N, gamma, lam)
            if attempt == 0:
                self._metrics["critic/loss"] = self.critic.learn(imagined.flat[:, :-1], return_NH, weight_NH)
                self._metrics["critic/updates_skipped"] = float(self.critic.skipped)
        self._note(return_NH[:, 0], reward_NH, attempt)
        if config.beyond != "none" and attempt == 0:
            self._metrics["imagined/tail"] = float(last_N.mean())
        if self.tail is not None and attempt == 0:
            self._metrics["tail/sums_skipped"] = float(self.tail.skipped)
        scale = self._scale(return_NH, attempt)
        if config.recipe.credit == "trajectory":
            beyond_N = weight_NH[:, -1] * gamma * continue_NH[:, -1] * last_N
            paid_NH = weight_NH * reward_NH
            return Returns(torch.cat([paid_NH[:, :-1], paid_NH[:, -1:] + beyond_N[:, None]], 1) / scale, None, None)
        baseline_NH = value_NH / scale if config.actor == "critic" and value_NH is not None else None
        return Returns(as_rewards(return_NH, gamma) / scale, None, baseline_NH)

    def _scale(self, return_NH: Tensor, attempt: int) -> float:
        """What returns are divided by, where the recipe does not do it."""
        if self.config.return_scale == "none" or self.config.recipe.scale != "none":
            return 1.0
        if attempt:
            return max(1.0, self.normalizer.value or 1.0)
        return self.normalizer.update(return_NH)

    def _note(self, whole_N: Tensor, paid_NH: Tensor, attempt: int) -> None:
        if attempt == 0:
            self._paid_NH = paid_NH
            spread = whole_N.view(-1, self.config.group_size).std(1).mean()
            found = {"imagined/return": whole_N.mean(), "imagined/return_std": spread, "reward": whole_N.mean()}
            found["reward_std"] = whole_N.std()
            self._metrics |= {name: float(x) for name, x in found.items()}

    def _generator(self, step: int, stream: str) -> torch.Generator:
        """Randomness from (seed, step, stream): nothing to save."""
        return torch.Generator().manual_seed(derive(self.config.seed, step, stream))

    @property
    def ranks(self) -> Ranks:
        """Who shares the updates of the world model and the futures. All play alike, and so remember the same."""
        return self.learner.ranks

    @ranks.setter
    def ranks(self, ranks: Ranks) -> None:
        self.learner.ranks = self._imagination.ranks = ranks

    @property
    def replay(self) -> Replay:
        """What was seen."""
        return self.collector.replay

    @property
    def folder(self) -> Path | None:
        """Where the replay may keep what memory is too small for; set it before the first step."""
        return self.collector.folder

    @folder.setter
    def folder(self, path: Path | None) -> None:
        self.collector.folder = path

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> Mapping[str, float | None]:
        """Metrics on starts that training never uses, the same ones every time."""
        return self.judge(self.config.eval_episodes, self.config.eval_greedy).metrics()

    def judge(self, episodes: int, greedy: bool = True, seed: int | None = None) -> Evaluation:
        """So many episodes on independent starts."""
        self._begin()
        chosen = self.config.seed if seed is None else seed
        return judge(self.copies, self.view, self.model, self.policy, episodes, greedy, chosen)

    def players(self, rows: int, seed: int) -> Players:
        """The agent in so many episodes that somebody else plays."""
        self._begin()
        return Players(self.view, self.model, self.policy, rows, True, seed)

    def watch(self, episodes: int, render: bool = False, video: str | Path | None = None) -> list[float]:
        """Greedy episodes in a window or a film; their returns."""
        self._begin()
        return watch(self.copies, self.view, self.model, self.policy, episodes, self.config.seed, render, video)

    def leave(self, folder: Path) -> Mapping[str, Path]:
        """For the run folder: a film of an episode, what the world model predicted, futures with their returns."""
        if not self.config.video:
            return {}
        left: dict[str, Path] = {}
        if (sample := self.collector.peek(16)) is not None:
            left |= leave_forecast(self.learner, sample, folder, self._generator(0, "show"))
        if self._last is not None and self._paid_NH is not None:
            left |= leave_groups(self.model, self._last, self._paid_NH, self.config.discount, folder)
        path = folder / "video.mp4"
        self.watch(1, video=path)
        return left | {"video": path}

    def film(self, rows: Rollouts, stem: Path) -> list[list[dict[str, str]]]:
        """Beside the samples: of each row the future as pictures, of the first also a forecast of what came."""
        sample = self.collector.peek(16) if self.config.films else None
        if sample is None:
            return []
        media = [[one] for one in leave_futures(self.model, rows.inputs["flat"], stem)] or [[]]
        media[0] += leave_strips(self.learner, sample, stem, self.config.horizon, self._generator(0, "show"))
        return media

    # --- what must be kept, and what can be seen --------------------------------------------------------------------

    def state(self) -> State:
        """Everything the next step depends on; what is being played in the background is waited for."""
        played = self.collector.state()
        parts = {"study": self.learner.state()}
        if self.critic is not None:
            parts["critic"] = self.critic.state()
        if self.tail is not None:
            parts["tail"] = self.tail.state()
        values = {"range": self.normalizer.value, **played.values}
        arrays: dict[str, Any] = dict(played.arrays)
        for name, state in parts.items():
            values[name] = dict(state.values)
            arrays |= as_part(name, state.arrays)
        moving = set(self.policy.parameters())  # which the trainer keeps itself
        buffers = {name: x for name, x in self.policy.module.state_dict().items() if name not in moving}
        arrays |= as_part("actor", buffers)
        in_order = sorted(arrays.items(), key=lambda item: KEPT.index(item[0].partition("/")[0]))
        return State({name: values[name] for name in KEPT if name in values}, dict(in_order))

    def load_state(self, state: State) -> None:
        """Go on from there; the replay and the environments when they are needed."""
        self.learner.load_state(State(state.values["study"], part(state.arrays, "study")))
        if self.critic is not None:
            self.critic.load_state(State(state.values["critic"], part(state.arrays, "critic")))
        if self.tail is not None:
            self.tail.load_state(State(state.values["tail"], part(state.arrays, "tail")))
        self.policy.module.load_state_dict(part(state.arrays, "actor"), strict=False)
        self.normalizer.value = state.values["range"]
        self.parentless = None
        self.collector.load_state(state)

    def metrics(self) -> Mapping[str, float | None]:
        """Of what was played, learned and imagined last."""
        return self._metrics

    def measures(self) -> Mapping[str, float]:
        """Seconds of a step's `collect` that went into playing and into the world model."""
        return self._seconds

    @torch.no_grad()
    def entropies(self, rows: Rollouts) -> Tensor | None:
        """Of each action, by the actor as it is now."""
        return self.policy.score(rows, entropy=True).entropy_NT

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """Of each future: actions, rewards, the chance to get that far, and what was imagined, if it is little."""
        columns = {"actions": rows.inputs["action"], "rewards": rows.reward_NT, "weights": rows.weight_NT}
        columns["observations"] = imagined_vectors(self.model, rows.inputs["flat"])
        listed = {name: x.tolist() for name, x in columns.items() if x is not None}
        return [{name: x[i] for name, x in listed.items()} for i in range(len(rows))]

    def close(self) -> None:
        """End the environments and their processes, close the files."""
        self.collector.close()
        self.copies.close()
