"""Where the language room's tries come from: prompts in, groups of completions out, judged.

    prompts.batch(step) ─► engine (or turns: engine, tools, engine, …) ─► rewards ─► Rollouts
                             └ a group has ended: it is judged while the others go on ┘

All randomness of a completion is its own seed, from (seed, step, attempt, group, member): the same whatever else is
sampled beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.config import ConfigError
from grpo.language.comparing import GREEDY, comparisons
from grpo.language.config import LanguageConfig
from grpo.language.data.prompts import Prompts
from grpo.language.engines import Engine, Sampling, Tokens
from grpo.language.engines.inline import InlineEngine
from grpo.language.evaluate import Evaluation, evaluate, of_several
from grpo.language.pictures.ids import thumbnails
from grpo.language.players import Groups, OneAnswer, Player, Remembers
from grpo.language.rewards import Judgement, Rewards, spread, told
from grpo.language.samples import Prompt, Sample, laid, lengths_of, rewards_of
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.speculation import Speculation
from grpo.language.travel import digest, expect_same_prompts, pack, unpack
from grpo.learners import marked, scored_now
from grpo.protocols import Alone, Collected, CollectRequest, Part, Phase, Ranks, State, no_phase
from grpo.rollouts import Rollouts, Status
from grpo.seeding import mixed

TRAINING, PREFLIGHT = 0, 2
"""Streams of randomness; evaluation has its own."""

PARTS = 8
"""Into which a step is cut at most, to be judged: functions that take batches must not be called for every group."""

NO_LOGP = "set temperature=1, or start the server as docs/servers.md says"


class LanguageSource:
    """Samples groups of completions with the policy and judges them."""

    headline = ("reward", "completions/mean_length", "eval/accuracy")
    """What a person wants to see first."""

    panels = ("reward", "eval/accuracy", "completions/mean_length", "frac_reward_zero_std")
    """What its curves show first."""

    def __init__(
        self,
        policy: LanguagePolicy,
        engine: Engine,
        player: Player,
        tokens: Tokens,
        prompts: Prompts,
        held_out: Mapping[str, Prompts],
        rewards: Rewards,
        config: LanguageConfig,
    ) -> None:
        self.policy, self.engine, self.player, self.tokens = policy, engine, player, tokens
        self.prompts, self.held_out, self.rewards, self.config = prompts, held_out, rewards, config
        self.max_steps: int | None = None
        """Of the run, for reward functions that ask."""
        self.same_data = True
        """Whether a saved state must have been made with this data; not where it is only looked at."""
        self.ranks: Ranks = Alone()
        """Who shares the work."""
        self.stopwatch: Phase = no_phase
        """Told when completions are made (`generate`), and when all of them wait for rewards (`rewards_wait`)."""
        self.num_tokens = 0
        self.speculation: Speculation | None = None
        if config.speculate:
            if not isinstance(engine, InlineEngine):
                raise ConfigError(f"speculate needs our own loop to sample; with engine={engine.name} leave it out")
            self.speculation = Speculation(config.speculate, config.seed, prompts, config.groups_per_step)
        self.value_R: Tensor | None = None
        """Of each row of the data, where the recipe compares with it: see `comparing.learn_values`."""
        self.adapts: Remembers | None = None
        """Moves the entropy bonus between steps, where that was asked for."""
        self._version: int | None = None
        self._held = -1
        """What the sampler's weights are called: steps that had been learned from."""
        self._steps: dict[int, tuple[dict[str, Any], list[Prompt]]] = {}
        """Asked for ahead: the place in the data before them, and their prompts."""
        self._reading = Lock()
        self._turn = nullcontext() if isinstance(player, OneAnswer) or not config.staleness else RLock()
        """Of environments: an evaluation waits for what is played ahead."""
        self._metrics: dict[str, float | None] = {}

    # --- tries ------------------------------------------------------------------------------------------------------

    def collect(self, request: CollectRequest) -> Collected:
        """A group of completions for each prompt."""
        starts = self._starts(request)
        own = request.slots.of(len(starts))  # all of them
        samples, judged = self._tried(starts, request, own)
        rollouts = self._rollouts(samples, self.parts(samples, judged), starts, own, request)
        self._told(starts, samples, judged.metrics, request)
        return Collected(rollouts, starts)

    def collect_part(self, request: CollectRequest) -> Part:
        """The groups that are asked for here. Their seeds, and those of the rewards, follow from their places."""
        starts = self._starts(request)
        own = request.slots.of(len(starts))
        mine = {"rank": request.slots.rank, "prompts": digest(starts)}
        if not own:
            packed = pack([])
            return Part(None, starts, State({**packed.values, **mine}, packed.arrays), partial(self._whole, request))
        samples, judged = self._tried(starts, request, own)
        rollouts = self._rollouts(samples, self.parts(samples, judged, always=True), starts, own, request)
        packed = pack(samples)
        beside = State({**packed.values, **mine, "logged": judged.logged}, packed.arrays)
        return Part(rollouts.but(inputs=None), starts, beside, partial(self._whole, request))

    def _whole(self, request: CollectRequest, whole: Collected, besides: Sequence[State]) -> Collected:
        """Everybody's samples, and what is told of them."""
        with self._reading:  # other threads put more in
            self._steps = {step: asked for step, asked in self._steps.items() if step > request.step}
        expect_same_prompts(besides)
        samples = unpack(besides, whole.starts, self.config.group_size)
        own, parts_NK = len(self.rewards.names), torch.as_tensor(whole.rollouts.reward_parts_NK)
        parts_NK = parts_NK[:, :own] if own and bool(parts_NK[:, own:].isnan().all()) else parts_NK
        names = [*self.rewards.names, "environment"][: parts_NK.shape[1]]
        rollouts = whole.rollouts.but(inputs=samples, reward_parts_NK=parts_NK, reward_names=names)
        logged: dict[str, list[float]] = {}
        for some in besides:
            for name, values in some.values.get("logged", {}).items():
                logged.setdefault(name, []).extend(values)
        judged = told(self.rewards.names, rewards_of(samples, self.rewards.names), logged)
        self._told(whole.starts, samples, judged, request)
        return Collected(rollouts, whole.starts)

    def _starts(self, request: CollectRequest) -> list[Prompt]:
        if request.starts is not None:
            return [self.prompts.prompt(start) for start in request.starts]
        if not self.config.staleness:
            return self.prompts.batch(request.step, self.config.groups_per_step)
        with self._reading:  # several threads ask
            if request.step not in self._steps:
                before = self.prompts.state()
                self._steps[request.step] = before, self.prompts.batch(request.step, self.config.groups_per_step)
            return self._steps[request.step][1]

    def _tried(self, starts: Sequence[Prompt], request: CollectRequest, own: range) -> tuple[list[Sample], Judgement]:
        """Of these starts, groups of completions for the places that are our own."""
        config, moment, seeds = self.config, (request.step, request.attempt), self._seeds(starts, request)
        if self.speculation is not None and seeds is not None:
            mine = seeds[own.start * config.group_size : own.stop * config.group_size]
            self.engine.expect(self.speculation.drafts(mine))
        samples, judged = self.judged(starts, config.group_size, config.sampling, TRAINING, moment, seeds, own)
        if request.attempt:
            samples = [replace(sample, attempt=request.attempt) for sample in samples]
        return samples, judged

    def _seeds(self, starts: Sequence[Prompt], request: CollectRequest) -> list[int] | None:
        """Of all samples, where an earlier visit of the prompts has a say in them."""
        if self.speculation is None or request.starts is not None:
            return None
        return self.speculation.seeds(request.step, starts, self.config.group_size)

    def _told(
        self, starts: Sequence[Prompt], samples: Sequence[Sample], judged: Mapping[str, float], request: CollectRequest
    ) -> None:
        """Remember and measure everybody's samples."""
        if self.speculation is not None and (seeds := self._seeds(starts, request)) is not None:
            self.speculation.keep(seeds, samples)
        self._measure(samples, judged, request)

    def follow(self, version: int) -> int:
        """Sample with the policy as it is from now on; `version`: steps that it has learned from.

        Parts of steps that can be sampled at a time, while the policy learns; environments are played in turn.
        """
        self.policy.eval()
        if self._version == self.policy.version:
            self.engine.tend(version)
        else:
            self.engine.refresh(version)
        self._version, self._held = self.policy.version, version
        return self.engine.at_once if isinstance(self.player, OneAnswer) else min(self.engine.at_once, 1)

    def refresh(self) -> None:
        """The same, between two steps."""
        self.follow(self._held + (self._version != self.policy.version))

    def judged(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        stream: int,
        moment: tuple[int, int],
        seeds: Sequence[int] | None = None,
        own: range | None = None,
    ) -> tuple[list[Sample], Judgement]:
        """Samples and what the rewards say of them; groups that have ended are judged while others are sampled.

        seeds: of all samples. own: places of the prompts that are answered here; None: all.
        """
        ahead = stream in (TRAINING, GREEDY) and bool(
            self.config.staleness
        )  # in a thread of its own, while the policy learns
        if not ahead:
            self.refresh()
        watch = no_phase if ahead else self.stopwatch
        own = range(len(prompts)) if own is None else own
        if seeds is None:
            seeds = [mixed(self.config.seed, stream, *moment, g, m) for g in range(len(prompts)) for m in range(count)]
        seeds = seeds[own.start * count : own.stop * count]
        columns = list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
        state, place = self._state_for_rewards(moment[0]), (own.start * count, len(prompts) * count)
        pending = self.rewards.open(columns, len(seeds), moment[0], state, *place)
        prompts = prompts[own.start : own.stop]
        try:
            part: dict[int, Sample] = {}
            with watch("generate"), closing(self._groups(prompts, count, sampling, seeds)) as groups:
                for number, group in groups:
                    part |= enumerate(group, number * count)
                    if self.config.overlap_rewards and len(part) * PARTS >= len(seeds):
                        self.rewards.add(pending, part)
                        part = {}
            if part:
                self.rewards.add(pending, part)
            with watch("rewards_wait"):
                judged = self.rewards.finish(pending)
            if not self.rewards.names and not self.config.recipe.outcome_coef:  # a teacher alone judges
                judged = replace(judged, errors={})
        finally:
            self.rewards.drop(pending)
        return [self._with(pending.samples[row], judged, row) for row in range(len(seeds))], judged

    def sample(self, prompts: Sequence[Prompt], count: int, sampling: Sampling, seeds: Sequence[int]) -> list[Sample]:
        """Completions of the current policy, not judged."""
        self.refresh()
        made = dict(self._groups(prompts, count, sampling, seeds))
        return [sample for number in range(len(prompts)) for sample in made[number]]

    def _groups(self, prompts: Sequence[Prompt], count: int, sampling: Sampling, seeds: Sequence[int]) -> Groups:
        """With the engine's weights, at most `rows_per_generation` rows at a time."""
        at_once = max((self.config.rows_per_generation or len(seeds)) // count, 1)
        # Entered once, not for each group: autocast would cast all weights anew.
        with self._turn, torch.no_grad(), self.policy.precision():
            for first in range(0, len(prompts), at_once):
                some = prompts[first : first + at_once]
                mine = seeds[first * count : (first + len(some)) * count]
                with closing(self.player(self.engine, some, count, sampling, mine)) as groups:
                    for number, group in groups:
                        yield first + number, group

    def _with(self, sample: Sample, judged: Judgement, row: int) -> Sample:
        error = sample.error or judged.errors.get(row)
        known = zip(self.rewards.names, judged.parts_NK[row].tolist(), strict=True)
        given = {name: None if np.isnan(value) else value for name, value in known}
        if sample.reward is not None:
            given["environment"] = sample.reward
        extras = {name: values[row] for name, values in judged.extras.items()}
        return replace(sample, rewards=given, extras=extras, error=error, trace=judged.tracebacks.get(row))

    def _rollouts(
        self, samples: Sequence[Sample], parts: np.ndarray, starts: list[Prompt], own: range, request: CollectRequest
    ) -> Rollouts:
        device, count = self.policy.scorer.device, self.config.group_size
        steps = max(max(sample.length for sample in samples), 1)
        failed_N = np.array([sample.error is not None for sample in samples])
        status_N = np.array([int(Status.TRUNCATED if s.stop == "length" else Status.TERMINATED) for s in samples])
        status_N[failed_N] = int(Status.FAILED)
        mask_NT = laid([sample.made for sample in samples], steps).bool().to(device)
        parts_NK = torch.as_tensor(parts, dtype=torch.float32, device=device)
        names = [*self.rewards.names, "environment"][: parts_NK.shape[1]]
        rollouts = Rollouts(
            group_N=(own.start + torch.arange(len(samples)) // count).to(device),
            mask_NT=mask_NT,
            old_logp_NT=torch.zeros(mask_NT.shape, device=device),
            reward_parts_NK=parts_NK,
            reward_names=names,
            inputs=list(samples),
            status_N=torch.as_tensor(status_N, device=device),
        )
        rollouts = marked(rollouts, self.config, request.step, request.attempt)  # before anything is scored
        beside = comparisons(self, rollouts, starts, own, request)
        return rollouts.but(**self._log_probs(rollouts, samples, steps), **beside)

    def parts(self, samples: Sequence[Sample], judged: Judgement, always: bool = False) -> np.ndarray:
        """One column a reward function, and one for what an environment gave, where there is such (or `always`)."""
        parts_NK = judged.parts_NK
        if always or not parts_NK.shape[1] or any(sample.reward is not None for sample in samples):
            own_N = [np.nan if sample.reward is None else sample.reward for sample in samples]
            parts_NK = np.concatenate([parts_NK, np.array(own_N)[:, None]], axis=1)
        return parts_NK

    def _log_probs(self, rollouts: Rollouts, samples: Sequence[Sample], steps: int) -> dict[str, Tensor]:
        """As recorded by an engine that runs the trained module itself; else scored again, the engine's own beside."""
        device = self.policy.scorer.device
        known = all(sample.logp is not None for sample in samples)
        recorded_NT = None
        if known:
            recorded_NT = laid([s.logp for s in samples if s.logp is not None], steps).to(device)
            if self.config.staleness:  # scored again when their step comes
                made = [torch.full((s.length,), self._held) if s.version is None else s.version for s in samples]
                version_NT = laid(made, steps).to(device)
                return {"old_logp_NT": recorded_NT, "sampled_logp_NT": recorded_NT, "version_NT": version_NT}
            if self.engine.exact:
                return {"old_logp_NT": recorded_NT}
        if self.config.staleness:
            raise ConfigError(f"staleness > 0 needs the log-probs that {self.engine.name} sampled with; {NO_LOGP}")
        old_NT = scored_now(rollouts, self.policy, self.config.recipe)
        return {"old_logp_NT": old_NT} | ({} if recorded_NT is None else {"sampled_logp_NT": recorded_NT})

    # --- what is told -----------------------------------------------------------------------------------------------

    def _measure(self, samples: Sequence[Sample], judged: Mapping[str, float], request: CollectRequest) -> None:
        self.num_tokens += sum(len(s.prompt.ids) + s.length for s in samples)
        if request.attempt:
            self._metrics["num_tokens"] = float(self.num_tokens)
            return
        metrics: dict[str, float | None] = {"num_tokens": float(self.num_tokens), **lengths_of(samples)}
        metrics |= {f"prompts/{what}": float(count) for what, count in self.prompts.counts.items() if count}
        kept = [sample.kept for sample in samples if sample.kept is not None]
        if kept and self.config.sampling.truncates:
            metrics["sampling/kept_probability"] = float(np.mean(kept))
        environment = [sample.reward for sample in samples if sample.reward is not None]
        if environment:
            metrics |= spread(["environment"], np.array(environment)[:, None])
        if any(sample.calls for sample in samples) or self.config.tools:
            calls = sum(sample.calls for sample in samples)
            metrics["tools/call_frequency"] = calls / len(samples)
            failed = sum(sample.failed_calls for sample in samples)
            metrics["tools/failure_frequency"] = failed / calls if calls else 0.0
        self._metrics = metrics | dict(judged)

    def _state_for_rewards(self, step: int) -> dict[str, Any]:
        """What a reward function gets as `trainer_state`."""
        return {"step": step, "max_steps": self.max_steps, "epoch": self.epoch(step)}

    def epoch(self, step: int) -> float | None:
        """Passes over the data set so far; None: its length is not known."""
        try:
            return step / self.epoch_steps()
        except (TypeError, ValueError):
            return None

    def epoch_steps(self) -> float:
        """Steps of one pass over the data set."""
        return self.prompts.epoch_steps(self.config.groups_per_step)

    def metrics(self) -> Mapping[str, float | None]:
        """Of the completions of the last step."""
        return self._metrics

    def measures(self) -> Mapping[str, float]:
        """What the engine says of the last rollout; it depends on the machine."""
        return self.engine.metrics()

    def make_room(self) -> bool:
        """Have the engine let go of what it keeps between steps; whether there was anything."""
        return self.engine.make_room()

    @torch.no_grad()
    def entropies(self, rows: Rollouts) -> Tensor | None:
        """Of each token, by the policy as it is now; None where there is no memory for it."""
        self.policy.eval()
        try:
            return self.policy.score(rows, entropy=True).entropy_NT
        except torch.OutOfMemoryError:
            return None

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """Prompt, completion and verdict of each row, and its tokens one by one."""
        decode = self.tokens.tokenizer.decode
        return [{**sample.told(), "tokens": [decode([int(token)]) for token in sample.ids]} for sample in rows.inputs]

    def illustrate(self, rows: Rollouts) -> list[dict[str, bytes]]:
        """Small pictures of the images that prompts hold, by the name of a file each."""
        shown = [sample.prompt.ids if self.config.log_multimodal else () for sample in rows.inputs]
        return thumbnails(shown)

    def evaluate(self, step: int) -> Mapping[str, float | None]:
        """Held-out prompts, by the current policy; nothing where there are none."""
        return self.judge_held_out().metrics() if self.held_out else {}

    def judge_held_out(self) -> Evaluation:
        """All sets of held-out rows, each by its name where there are several."""
        limit, samples = self.config.eval_prompts, self.config.eval_samples
        made = {name: self.judge_rows(prompts, samples, limit) for name, prompts in self.held_out.items()}
        return made[""] if "" in made else of_several(made)

    def judge_rows(self, prompts: Prompts, samples: int, limit: int | None) -> Evaluation:
        """How well these rows are answered: greedily for one sample a prompt, else sampled."""
        return evaluate(self, prompts, samples, limit)

    # --- what is kept -----------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The count of tokens, the data's position where it is a stream, drafts; all else follows from the step."""
        with self._reading:  # others put more in, and read on
            place = self._steps[min(self._steps)][0] if self._steps else self.prompts.state()
        values = {"num_tokens": self.num_tokens, "data": self.prompts.fingerprint, **place}
        values |= {} if self.adapts is None else {"entropy": self.adapts.state()}
        arrays = {} if self.value_R is None else {"value_R": self.value_R}
        return State(values, arrays if self.speculation is None else arrays | self.speculation.state())

    def load_state(self, state: State) -> None:
        """Go on from there, with the same data."""
        before = self.prompts.fingerprint
        if not self.prompts.goes_on(state.values["data"]) and self.same_data:
            raise ValueError(
                "the data set has changed since this was saved; a run goes on with the rows it began with. Restore "
                "them, or begin a new run from the model it left"
            )
        for held_out in self.held_out.values() if self.prompts.fingerprint != before else ():
            held_out.take_whole()
        if self.speculation is not None:
            self.speculation.load_state(state.arrays)
        self.value_R = state.arrays.get("value_R")
        self.num_tokens = int(state.values["num_tokens"])
        if self.adapts is not None and "entropy" in state.values:
            self.adapts.load_state(state.values["entropy"])
        self.prompts.load_state(state.values)
        self._steps, self._version = {}, None

    def leave(self, path: Path) -> Mapping[str, Path]:
        """The trained model as a folder that others can load; see `output`."""
        if self.output is not None:
            self.output(path / "model")
        return {}

    output: Any = None
    """Writes the model's folder: the front door's `save_model`."""

    def close(self) -> None:
        """Let go of workers and engines."""
        self.rewards.close()
        self.engine.close()
        self.player.close()
