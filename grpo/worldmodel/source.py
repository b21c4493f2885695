"""Where the world-model room's tries come from: it plays, remembers, learns the world, and imagines futures in it.

collect:  play the steps that are due ─► replay ─► update the world model as often as is due
                                               └─► P states seen on the way ─► P × G imagined futures ─► Rollouts

With `acting=beside` the steps were played while the last round was learned from, and the next ones are begun first.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.config import ConfigError
from grpo.envs.evaluate import Evaluation
from grpo.envs.fleet import Fleet
from grpo.errors import SamplesFailed, line
from grpo.protocols import Collected, CollectRequest, State
from grpo.rollouts import Rollouts
from grpo.seeding import derive, generator
from grpo.worldmodel.acting import Lanes
from grpo.worldmodel.background import BackgroundActor, Tape
from grpo.worldmodel.config import WorldModelConfig
from grpo.worldmodel.evaluate import EvalEnvs, judge, watch
from grpo.worldmodel.imagine import Futures, Imagination, Imagined, RewardFn, own_rewards
from grpo.worldmodel.model.learner import Learner, ModelDiverged, choose
from grpo.worldmodel.model.optimizer import part
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.process import prepare
from grpo.worldmodel.replay.buffer import Replay, Sample, TrainRatio
from grpo.worldmodel.returns import Critic, ReturnNormalizer, as_rewards, discounted, lambda_returns
from grpo.worldmodel.show import leave_forecast, leave_groups, leave_strips
from grpo.worldmodel.views import VECTOR, View

MOST_SEEN = 8
"""Numbers of an observation that are kept to look at; larger ones say little to the eye."""


@dataclass(frozen=True)
class Judged:
    """Imagined futures as the algorithm gets them."""

    reward_NH: Tensor | None
    reward_N: Tensor | None
    baseline_NH: Tensor | None


class WorldModelSource:
    """Owns the environments, the replay, the world model with its optimizer and, if asked for, a critic."""

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
        eval_envs: EvalEnvs,
        config: WorldModelConfig,
        reward_fn: RewardFn | None = None,
    ) -> None:
        self.policy, self.learner, self.fleet, self.view, self.eval_envs = policy, learner, fleet, view, eval_envs
        self.model = learner.model
        self.config, self.reward_fn = config, reward_fn
        size = learner.model.size
        self.critic: Critic | None = None
        if config.valued:
            width, units, layers = learner.model.flat_width, size.units, config.actor_layers
            made = Critic(width, units, layers, config.critic_learning_rate, config.slow_rate, config.seed)
            self.critic = made.to(policy.device)
        self._imagination = Imagination(learner.model, policy, learner.compiled, config.cuda_graphs)
        self.normalizer = ReturnNormalizer()
        self.folder: Path | None = None
        """Where the replay may keep what memory is too small for; set it before the first step."""
        self.parentless: str | None = None
        """Why the agent to begin with was not found; what goes on from a saved state does without."""
        self._lanes: Lanes | None = None
        self._replay: Replay | None = None
        self._beside = BackgroundActor(learner.model, policy) if config.acting == "beside" else None
        self._ahead: int | None = None
        """With it: the round whose steps were played already, or are being played."""
        self._before: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        """The lanes before that round."""
        self._counted = 0
        """Environment steps that were reported."""
        self._ratio = TrainRatio(0 if learner.frozen else config.train_ratio, config.batch_size * config.batch_length)
        self._saved: State | None = None
        """What was loaded and has not been needed yet: looking at an agent wakes neither replay nor environments."""
        self._metrics: dict[str, float | None] = {}
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
        judged = self._judge(imagined, request.attempt)
        weight_NH = imagined.weight_NH(config.discount)
        inputs: dict[str, Any] = {"flat": imagined.flat[:, :-1].contiguous(), "action": imagined.action_NH}
        if config.algorithm.beta and config.algorithm.kl_estimator == "exact":
            with torch.no_grad():
                inputs["old"] = policy.head.describe(imagined.out_NHF)
        starts = [start[p] for p in range(len(start.deter))]
        rollouts = Rollouts(
            group_N=torch.arange(len(starts), device=policy.device).repeat_interleave(config.group_size),
            mask_NT=torch.ones_like(weight_NH, dtype=torch.bool),
            old_logp_NT=imagined.logp_NH,
            reward_N=judged.reward_N,
            reward_NT=judged.reward_NH,
            baseline_NT=judged.baseline_NH,
            weight_NT=None if config.algorithm.credit == "trajectory" else weight_NH,  # there it is in the reward
            inputs=inputs,
        )
        self._last = imagined if request.attempt == 0 else self._last
        return Collected(rollouts, starts)

    def _live(self, step: int) -> Latent:
        """Play and learn what is due; the states to imagine from."""
        self._begin()
        lanes, replay = self._awake()
        config = self.config
        if self._beside is None:
            random = self._play(lanes, replay, step)
        else:
            random = generator(config.seed, step, 1)
            self._settle()
            if self._ahead != step:
                self._beside.refresh()
                self._play(lanes, replay, step)
        self._expect_sound(lanes, step)
        told, due = self._told(lanes), self._ratio.due(lanes.env_steps)
        if self._beside is not None:
            self._before, self._ahead = (lanes.values(), lanes.arrays()), step + 1
            self._beside.begin(lambda tape: self._play(lanes, tape, step + 1))
        due += config.pretrain if step == 0 and not self.learner.frozen else 0
        seen = self._learned(replay, due, step)
        self._metrics = {**told, **self._studied(replay)}
        return choose(*seen, config.groups_per_step, random)

    def _play(self, lanes: Lanes, memory: Replay | Tape, step: int) -> np.random.Generator:
        """The steps of a round, into the replay or onto a tape for it; what is left of the round's randomness."""
        config, noise = self.config, self._generator(step, "act")
        random = generator(config.seed, step, 0)
        until = max(config.prefill, lanes.env_steps + config.steps_per_collect)
        while lanes.env_steps < until or (isinstance(memory, Replay) and not memory.sequences):
            lanes.tick(memory, random, noise)
        return random

    def _settle(self) -> None:
        """Wait for what is being played beside, and remember it."""
        tape = None if self._beside is None else self._beside.finish()
        if tape is not None and self._replay is not None:
            tape.remember(self._replay)

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
            np.savez_compressed(path, **{"ids": sample.ids_BT, **sample.batch})  # type: ignore[arg-type]
        except OSError as error:
            return f"; the batch was not kept: {error}"
        return f"; the last batch is in {path}"

    def _begin(self) -> None:
        """Before anything is played: nobody takes a fresh agent for the one that was asked for."""
        if self.parentless is not None:
            raise ConfigError(self.parentless)
        prepare(self.policy.device, self.config.precision)

    def _expect_sound(self, lanes: Lanes, step: int) -> None:
        """Environments that failed: an error on the first step, later a warning; the run counts them."""
        if lanes.failures and step == 0:
            raise SamplesFailed(f"on the first step the environment failed: {lanes.failures[0]}")
        for message in dict.fromkeys(lanes.failures):
            warnings.warn(f"an episode was given up: {message}", stacklevel=5)

    def _judge(self, imagined: Imagined, attempt: int) -> Judged:
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
            if whole and self.critic is None:
                self._note(own, reward_NH, attempt)
                return Judged(None, own / self._scale(own[:, None], attempt), None)
        if self.critic is None:
            return_NH = discounted(reward_NH, continue_NH, torch.zeros_like(reward_NH[:, 0]), gamma)
            value_NH = None
        else:
            all_NH = self.critic.value(imagined.flat)
            value_NH, ahead_NH = all_NH[:, :-1], all_NH[:, 1:]
            lam = config.gae_lambda if config.actor == "critic" else 1.0
            return_NH = lambda_returns(reward_NH, continue_NH, ahead_NH, ahead_NH[:, -1], gamma, lam)
            if attempt == 0:
                self._metrics["critic/loss"] = self.critic.learn(imagined.flat[:, :-1], return_NH, weight_NH)
                self._metrics["critic/updates_skipped"] = float(self.critic.skipped)
        self._note(return_NH[:, 0], reward_NH, attempt)
        scale = self._scale(return_NH, attempt)
        if config.algorithm.credit == "trajectory":
            paid_NH = weight_NH * reward_NH
            if value_NH is not None:
                last_N = weight_NH[:, -1] * gamma * continue_NH[:, -1] * ahead_NH[:, -1]
                paid_NH = torch.cat([paid_NH[:, :-1], paid_NH[:, -1:] + last_N[:, None]], 1)
            return Judged(paid_NH / scale, None, None)
        baseline_NH = value_NH / scale if config.actor == "critic" and value_NH is not None else None
        return Judged(as_rewards(return_NH, gamma) / scale, None, baseline_NH)

    def _scale(self, return_NH: Tensor, attempt: int) -> float:
        """What returns are divided by, where the recipe does not do it."""
        if self.config.return_scale == "none" or self.config.algorithm.scale != "none":
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

    def _told(self, lanes: Lanes) -> dict[str, float | None]:
        """How playing went since somebody last asked."""
        done, played = lanes.finished, lanes.env_steps - self._counted
        failed, lanes.failures = len(lanes.failures), []
        self._counted = lanes.env_steps
        return {
            "return": float(np.mean([total for total, _ in done])) if done else None,
            "episode_length": float(np.mean([length for _, length in done])) if done else None,
            "env_steps": float(lanes.env_steps),
            "episodes": float(lanes.episodes),
            "failed": float(failed),
            "samples": float(played),
        }

    def _studied(self, replay: Replay) -> dict[str, float]:
        """How far the world model is."""
        counts = {"model/updates": float(self.learner.updates), "model/updates_skipped": float(self.learner.skipped)}
        return counts | replay.metrics() | self.learner.metrics

    def _generator(self, step: int, stream: str) -> torch.Generator:
        """Randomness from (seed, step, stream): nothing to save."""
        return torch.Generator().manual_seed(derive(self.config.seed, step, stream))

    # --- what it owns, woken when it is needed ----------------------------------------------------------------------

    def _awake(self) -> tuple[Lanes, Replay]:
        """The environments and the replay, as they were saved if there is a state to go on from."""
        if self._lanes is None or self._replay is None or self._saved is not None:
            self._close_replay()
            config, size = self.config, self.model.size
            player = self._beside or self
            self._lanes = Lanes(self.fleet, self.view, player.model, player.policy, config.seed)
            self._replay = Replay(
                config.replay_capacity,
                config.batch_length,
                None if self.folder is None else self.folder / "replay",
                lanes=config.envs,
                seed=config.seed,
                latent=(size.deter, size.stoch, size.classes),
                memory=config.replay_memory,
            )
            saved, self._saved = self._saved, None
            if saved is not None and saved.values["lanes"] is not None:
                self._lanes.load(saved.values["lanes"], _of(saved.arrays, "lanes"))
                self._replay.load_state(State(saved.values["replay"], _of(saved.arrays, "replay")))
        return self._lanes, self._replay

    @property
    def replay(self) -> Replay:
        """What was seen."""
        return self._awake()[1]

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> Mapping[str, float | None]:
        """Metrics on starts that training never uses, the same ones every time."""
        return self.judge(self.config.eval_episodes, self.config.eval_greedy).metrics()

    def judge(self, episodes: int, greedy: bool = True, seed: int | None = None) -> Evaluation:
        """So many episodes on independent starts."""
        self._begin()
        chosen = self.config.seed if seed is None else seed
        return judge(self.eval_envs, self.view, self.model, self.policy, episodes, greedy, chosen)

    def watch(self, episodes: int, render: bool = False, video: str | Path | None = None) -> list[float]:
        """Greedy episodes in a window or a film; their returns."""
        self._begin()
        return watch(self.eval_envs, self.view, self.model, self.policy, episodes, self.config.seed, render, video)

    def leave(self, folder: Path) -> Mapping[str, Path]:
        """For the run folder: a film of an episode, what the world model predicted, futures with their returns."""
        if not self.config.video:
            return {}
        left: dict[str, Path] = {}
        if self._replay is not None and self._replay.sequences:
            sample = self._replay.peek(16, 0)
            left |= leave_forecast(self.learner, sample, folder, self._generator(0, "show"))
        if self._last is not None and self._paid_NH is not None:
            left |= leave_groups(self._last, self._paid_NH, self.config.discount, folder)
        path = folder / "video.mp4"
        self.watch(1, video=path)
        return left | {"video": path}

    def film(self, rows: Rollouts, stem: Path) -> list[list[dict[str, str]]]:
        """What the world model predicts by now of one replayed sequence, beside the samples, for the first row."""
        if not self.config.films or self._replay is None:
            return []
        sample, random = self._replay.peek(16, 0), self._generator(0, "show")
        return [leave_strips(self.learner, sample, stem, self.config.horizon, random)]

    # --- what must be kept, and what can be seen --------------------------------------------------------------------

    def state(self) -> State:
        """Everything the next step depends on; what is being played beside is waited for.

        A round that failed does not count: who goes on from here plays it again, and this run's next step tells why.
        """
        ahead, before = self._ahead, None
        try:
            self._settle()
        except Exception:  # as above
            ahead, before = None, self._before
        parts = {"study": self.learner.state()}
        if self.critic is not None:
            parts["critic"] = self.critic.state()
        values: dict[str, Any] = {"range": self.normalizer.value, "ratio": dict(self._ratio.state().values)}
        values |= {"ahead": ahead, "counted": self._counted}
        arrays: dict[str, Any] = {}
        if self._saved is not None:
            kept = {name: x for name, x in self._saved.arrays.items() if name.startswith(("lanes/", "replay/"))}
            arrays |= kept
            values |= {name: self._saved.values[name] for name in ("lanes", "replay")}
        elif self._lanes is None or self._replay is None:
            values |= {"lanes": None, "replay": None}
        else:
            parts["replay"] = self._replay.state()
            values["lanes"], kept = before or (self._lanes.values(), self._lanes.arrays())
            arrays |= {f"lanes/{name}": _kept(x) for name, x in kept.items()}
        for name, state in parts.items():
            values[name] = dict(state.values)
            arrays |= {f"{name}/{key}": _kept(x) for key, x in state.arrays.items()}
        buffers = {name: p for name, p in self.policy.module.state_dict().items() if name not in self._moving()}
        arrays |= {f"actor/{name}": x for name, x in buffers.items()}
        return State(values, arrays)

    def _moving(self) -> set[str]:
        """What of the actor the trainer keeps itself."""
        return set(self.policy.parameters())

    def load_state(self, state: State) -> None:
        """Go on from there; the replay and the environments when they are needed."""
        self.learner.load_state(State(state.values["study"], part(state.arrays, "study")))
        if self.critic is not None:
            self.critic.load_state(State(state.values["critic"], part(state.arrays, "critic")))
        self.policy.module.load_state_dict(part(state.arrays, "actor"), strict=False)
        self.normalizer.value = state.values["range"]
        if self._beside is not None:
            self._beside.forget()
        # Older states do not say: they are of lockstep, where nobody plays ahead and what was played has been told.
        told = (state.values["lanes"] or {"env_steps": 0})["env_steps"]
        self._ahead, self._counted = state.values.get("ahead"), state.values.get("counted", told)
        self.parentless = None
        self._ratio.load_state(State(state.values["ratio"], {}))
        self._saved = state

    def metrics(self) -> Mapping[str, float | None]:
        """Of what was played, learned and imagined last."""
        return self._metrics

    @torch.no_grad()
    def entropies(self, rows: Rollouts) -> Tensor | None:
        """Of each action, by the actor as it is now."""
        return self.policy.score(rows, entropy=True).entropy_NT

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """Of each future: actions, rewards, the chance to get that far, and what was imagined, if it is little."""
        columns = {"actions": rows.inputs["action"], "rewards": rows.reward_NT, "weights": rows.weight_NT}
        columns["observations"] = self._painted(rows)
        listed = {name: x.tolist() for name, x in columns.items() if x is not None}
        return [{name: x[i] for name, x in listed.items()} for i in range(len(rows))]

    @torch.no_grad()
    def _painted(self, rows: Rollouts) -> Tensor | None:
        """The numbers that the model sees in imagined states, (N, T, D)."""
        model = self.model
        if self.view.shapes.get(VECTOR, (MOST_SEEN + 1,))[0] > MOST_SEEN:
            return None
        deter, stoch = rows.inputs["flat"].split([model.size.deter, model.flat_width - model.size.deter], -1)
        painted = model.decoder(deter, stoch.unflatten(-1, (model.size.stoch, model.size.classes)))
        return model.decoder.observations(painted)[VECTOR].round(decimals=4)

    def close(self) -> None:
        """End the environments and their processes, close the files."""
        if self._beside is not None:
            self._beside.close()
        self._close_replay()
        self.fleet.close()
        self.eval_envs.close()


def _of(arrays: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The arrays of one part, as they are."""
    return {n.removeprefix(f"{kind}/"): x for n, x in arrays.items() if n.startswith(f"{kind}/")}


def _kept(x: Any) -> Any:
    """As a checkpoint wants it."""
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(np.ascontiguousarray(x))
