"""The step everyone shares: collect → reference → advantages → passes × minibatches × micro-batches → report.

It knows no domain. A policy scores recorded decisions, a source samples and rewards them, a reference is optional.
No files, clocks, logs or devices in here: a run puts those around it (`grpo.run.trainer.GRPOTrainer`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo import together
from grpo.capabilities import KeepsUp, KnowsRanks, MakesRoom, ScoresRows
from grpo.config import GRPOConfig
from grpo.core.arrays import masked
from grpo.errors import warn
from grpo.experience import Experience, with_gates
from grpo.keeping import copies, copy_into, expect_same_kind, flattened, of_policy, unflattened
from grpo.learners import Pass, in_order, marked, passes, scored
from grpo.models import ModelPolicy, ModelSource, moved, reference_of
from grpo.objective import objective
from grpo.optimizers import AdamW
from grpo.pacing import Pace, age_metrics
from grpo.protocols import (
    Collected,
    CollectRequest,
    Phase,
    Ranks,
    Reference,
    RolloutSource,
    SequencePolicy,
    State,
    as_part,
    no_phase,
    part,
)
from grpo.rates import LearningRate, scheduled
from grpo.reference import FrozenReference
from grpo.report import GATES, Diverged, StepReport, Update, Updates, nonfinite_in_a_row, reward_metrics
from grpo.resample import members_of, resample, with_signal, within_bounds
from grpo.roles import RoleMeans
from grpo.rollouts import Rollouts, Scores
from grpo.seeding import update_generator
from grpo.shards import Again
from grpo.teaching import make_teacher, with_lesson

__all__ = ["Diverged", "Hook", "StepReport", "Trainer"]

ROOM = "what sampling keeps between steps is let go of after each from here on"
HALVED = "micro-batches are half as large from here on, the gradient is the same"


class Hook(Protocol):
    """What a room does around each step: a warm start, a learning rate, numbers of its own in the report.

    class Constant:
        def before(self, trainer): ...
        def after(self, trainer, report):
            report.metrics["learning_rate"] = trainer.config.learning_rate
    """

    def before(self, trainer: Trainer) -> None: ...
    def after(self, trainer: Trainer, report: StepReport) -> None: ...


class Trainer:
    """One step of GRPO, and everything the next one depends on.

    Either `policy` and `reward_model` follow `grpo.protocols.PolicyModel` and `RewardModel`, or a room passes a
    `SequencePolicy` and a `RolloutSource`. teacher: a policy that scores, for opd; rate: in place of lr_schedule.
    """

    def __init__(
        self,
        config: GRPOConfig | None = None,
        policy: Any = None,
        reference_policy: Any = None,
        reward_model: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        source: RolloutSource | None = None,
        states: Sequence[Any] | None = None,
        phase: Phase = no_phase,
        hooks: Sequence[Hook] = (),
        teacher: Any = None,
        ranks: Ranks | None = None,
        rate: LearningRate | None = None,
    ) -> None:
        if config is not None and not isinstance(config, GRPOConfig):
            raise TypeError(f"config must be a GRPOConfig, got {type(config).__name__}; use GRPOConfig(**settings)")
        self.config = config or GRPOConfig()
        self.recipe = self.config.recipe
        self.phase, self.steps_done = phase, 0
        self.ranks = together.here() if ranks is None else ranks
        """The processes that share every step; `Alone` unless started by torchrun or `--ranks`."""
        self.run_folder: Any = None
        """Where a run left its results last; `grpo.show(trainer)` looks there."""
        self.policy, self.source = self._seats(policy, reward_model, source, states)
        if isinstance(self.source, KnowsRanks):
            self.source.ranks = self.ranks
        self.pace = Pace(self.ranks, self.source, self.config.groups_per_step, self.config.staleness)
        self.reference = self._make_reference(policy, reference_policy)
        self.teacher = make_teacher(teacher, self.recipe, self.config.device)
        self.roles = RoleMeans(self.recipe) if self.recipe.baseline == "role_mean" else None
        self.optimizer = self._make_optimizer() if optimizer is None else of_policy(optimizer, self.policy)
        scheduler = rate or scheduled(self.config.lr_schedule, self.optimizer)
        self.hooks: tuple[Hook, ...] = (scheduler, *hooks) if scheduler else tuple(hooks)
        self.shards = together.shards(self.ranks, self.config.shard, self.policy.parameters())
        referred = [] if self.reference is None else [self.reference.parameters()]
        together.same_weights(self.ranks, [self.shards.comparable(self.policy.parameters()), *referred])
        self._nonfinite_in_a_row, self._without_gradient = 0, False
        self._halvings = 0  # times that a pass ran out of memory
        for notice in self.recipe.notices():
            warn(notice)

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, states: Sequence[Any] | None = None) -> StepReport:
        """Sample a group from each start, compare, learn."""
        for hook in self.hooks:
            hook.before(self)
        with self.phase("collect"):
            rollouts, metrics = self._collect(states)
        with self.phase("reference"):
            ref_logp_NT = None if self.reference is None else self._scored(rollouts, self.reference.score)
        experience = Experience.build(rollouts, self.recipe, ref_logp_NT, detached=self._detached)
        if self.teacher is not None:
            teacher = together.teaching(self.ranks, self.teacher, self._home)
            experience = with_lesson(experience, teacher, self.recipe, self.phase)
        experience = self._agreed(experience)
        samples = experience.decisions() if self.config.decisions_per_minibatch else experience
        updates = Updates(samples)
        with self.phase("update"):
            self.policy.train()
            for number, rows in enumerate(self._minibatches(samples.rollouts)):
                batch = self._with_batch_gates(samples.minibatch(rows, self.recipe), number)
                updates.add(self._update(rows, batch))
                if updates.exceed_kl(self.config.target_kl):
                    break
        self.steps_done += 1
        self._others_follow()
        metrics |= updates.metrics() | dict(self.source.metrics())
        report = StepReport(self.steps_done, metrics, updates.last_gates(experience), updates.last_scores(experience))
        for hook in self.hooks:
            hook.after(self, report)
        self._raise_if_diverged(updates, report)
        return report

    # --- collect ----------------------------------------------------------------------------------------------------

    def _collect(self, states: Sequence[Any] | None) -> tuple[Rollouts, dict[str, float | None]]:
        """Tries for this step, and how they were rewarded."""
        request = CollectRequest(self.steps_done, 0, states)
        collected = self._tries(request)
        rollouts, counted = self._filtered(collected, request)
        metrics = reward_metrics(rollouts, self.recipe) | counted
        if self.config.no_signal == "resample":
            # Where nothing had a signal the last tries stay, are counted, and teach nothing.
            most = self.config.max_attempts
            found = resample(collected, request, lambda tries: with_signal(tries, self.recipe), self._tries, most)
            rollouts, metrics["attempts"] = found.rollouts, float(found.attempts)
        if self.config.select is not None:
            rollouts = marked(rollouts, self.config, self.steps_done)
        if self.roles is not None:
            rollouts = self.roles.applied(rollouts)
        if self.config.old_logp == "recomputed" or self.config.staleness:
            with torch.no_grad():
                now_NT = self._scored(rollouts, lambda rows: self.policy.score(rows).logp_NT)
            rollouts = rollouts.but(old_logp_NT=now_NT)
        return rollouts, metrics | age_metrics(rollouts, self.steps_done)

    def _tries(self, request: CollectRequest) -> Collected:
        """Everybody's, where several ranks share the work; perhaps they were asked for some steps ago."""
        self.pace.source = self.source  # a script may have put another in its place
        found = self.pace.collect(request)
        if not self.config.staleness or self.ranks.size > 1:
            return found
        return Collected(found.rollouts.each(lambda x: x.to(self._home)), found.starts)

    def _scored(self, rows: Rollouts, score: Callable[[Rollouts], Tensor]) -> Tensor:
        """Log-probs without gradient of the rows that learn, shared by the ranks."""

        def shared(some: Rollouts) -> Tensor:
            return together.scored(self.ranks, some, lambda mine: Scores(score(mine)), self._home).logp_NT

        return shared(rows) if rows.learns_N is None else scored(rows, shared, self.recipe)

    def _agreed(self, experience: Experience) -> Experience:
        """What every rank learns from, once it is certain that all have the same; now and then also of the weights."""
        looked = self.steps_done % together.WEIGHTS_EVERY == 0
        weights = self.shards.comparable(self.policy.parameters()) if looked else {}
        return together.agreed(self.ranks, experience, self._home, weights)

    @property
    def _home(self) -> torch.device:
        """Where the policy computes."""
        return next((p.device for p in self.policy.parameters().values()), torch.device("cpu"))

    def _filtered(self, collected: Collected, request: CollectRequest) -> tuple[Rollouts, dict[str, float | None]]:
        """Groups whose mean reward is within bounds, where that was asked for, and how many were not."""
        if not self.config.filter_rewards:
            return collected.rollouts, {}
        low, high = self.config.rewards_lower_bound, self.config.rewards_upper_bound
        worth = partial(within_bounds, recipe=self.recipe, low=low, high=high)
        found = resample(collected, request, worth, self._tries, self.config.max_attempts)
        kept = found.rollouts
        if found.none_kept:  # the last tries stay, with nothing to learn from
            kept = kept.but(mask_NT=torch.zeros_like(kept.mask_NT))
        return kept, {"attempts": float(found.attempts), "filtered": float(found.missing)}

    @property
    def _detached(self) -> bool:
        """Whether the ratio compares with the current policy: one pass, one minibatch."""
        return self.config.old_logp == "detached" or (self.config.old_logp == "auto" and self.config.one_update)

    # --- update -----------------------------------------------------------------------------------------------------

    def _minibatches(self, rollouts: Rollouts) -> Iterator[Sequence[int] | Tensor]:
        """Rows, or those of whole groups, in an order drawn from (seed, step, pass); every one once a pass."""
        config, everything = self.config, range(len(rollouts))
        members = members_of(rollouts) if config.groups_per_minibatch or config.minibatches else None
        count = len(members or everything)
        size = config.groups_per_minibatch or config.rows_per_minibatch or config.decisions_per_minibatch
        size = math.ceil(count / config.minibatches) if config.minibatches else size
        for number in range(config.num_iterations):
            if size is None or size >= count:
                yield everything
                continue
            order = torch.randperm(count, generator=update_generator(config.seed, self.steps_done, number))
            for chosen in torch.split(order, size):
                yield chosen if members is None else [row for i in chosen.tolist() for row in members[i]]

    def _with_batch_gates(self, batch: Experience, number: int) -> Experience:
        """Gates that span rows, from scores of the whole minibatch; most recipes have none."""
        r = self.recipe
        if r.top_entropy >= 1.0 and not r.clip_cov and not r.kl_cov and r.m2_limit is None:
            return batch
        with torch.no_grad():
            scores = together.scored(
                self.ranks, batch.rollouts, lambda rows: self.policy.score(rows, entropy=True), self._home
            )
        ties = update_generator(self.config.seed, self.steps_done, -1 - number)
        priority_NT = torch.rand(tuple(batch.mask_NT.shape), generator=ties)
        return with_gates(batch, scores, self.recipe, priority_NT.to(scores.logp_NT))

    def _update(self, rows: Sequence[int] | Tensor, batch: Experience) -> Update:
        """Gradients of the whole minibatch, then one optimizer step; or none, and everything stays as it was."""
        values, logp_NT = together.gradients(self.ranks, self.shards, batch, self.policy.parameters(), self._gradients)
        parameters = [p for p in self.policy.parameters().values() if p.grad is not None]
        norm = self.shards.norm(parameters)
        if norm is not None:
            values["grad_norm"] = float(norm)
        finite = all(math.isfinite(values[name]) for name in ("loss", "ratio", "grad_norm") if name in values)
        finite = finite and bool(torch.isfinite(masked(logp_NT, batch.mask_NT)).all())
        too_far = self.config.max_ratio is not None and values["ratio"] > self.config.max_ratio
        skipped = not finite or too_far
        taken = self._can_move(norm) and not skipped
        if taken:
            self._move(parameters, norm)
        self._zero_grad()
        gates = {name: gate for name in GATES if (gate := getattr(batch, name)) is not None}
        return Update(rows, logp_NT, values, finite, taken, skipped, gates)

    def _can_move(self, norm: Tensor | None) -> bool:
        """Whether there are gradients and who takes them; the first time that none have come, a warning."""
        if self.optimizer is not None and norm is None and not self._without_gradient:
            self._without_gradient = True
            warn("the log-probs do not depend on the policy's parameters: nothing is updated")
        return self.optimizer is not None and norm is not None

    def _move(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        """One optimizer step, its gradients clipped."""
        assert self.optimizer is not None and norm is not None
        if self.config.max_grad_norm is not None and float(norm) > self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        self.shards.step(self.optimizer)
        self.policy.version += 1

    def _gradients(self, batch: Experience) -> tuple[dict[str, float], Tensor]:
        """Loss, metrics, log-probs of the minibatch; gradients accumulated. Out of memory: again in smaller parts."""
        while True:
            parts = passes(batch, self.recipe, self._split, self.shards.passes_alone)
            try:
                values, logp_NT = self._accumulated(batch, parts)
                self.shards.finish()
                return values | ({"microbatch_halvings": float(self._halvings)} if self._halvings else {}), logp_NT
            except Again:
                continue
            except torch.OutOfMemoryError:
                made_room = isinstance(self.source, MakesRoom) and self.source.make_room()
                if not made_room and all(len(part.rows) == 1 for part in parts):
                    raise
            # From here on outside of `except`, which keeps the tensors of the pass that failed.
            self.shards.restart()
            self._halvings += not made_room
            warn(f"out of memory: {ROOM if made_room else HALVED}")

    def _split(self, rows: Rollouts) -> Sequence[Sequence[int]]:
        return self.policy.split(rows, self.config.microbatch, self._halvings)

    def _accumulated(self, batch: Experience, parts: Sequence[Pass]) -> tuple[dict[str, float], Tensor]:
        self._zero_grad()
        total: dict[str, Any] = {}
        logp: list[Tensor] = []
        asked = bool(self.recipe.entropy_coef) or self.config.report_entropy
        trained = [p for p in self.policy.parameters().values() if p.requires_grad]
        for rows, learns in parts:
            part = batch.select(rows)
            # A gradient of zero is one, too: where these rows alone reach a parameter, its moments fade.
            with torch.set_grad_enabled(learns or any(p.grad is None for p in trained)):
                scores = self.policy.score(part.rollouts, entropy=asked)
                terms = objective(scores, part, self.recipe)
            if terms.loss.requires_grad:
                self.shards.backward(terms.loss)
            named = {"loss": terms.loss, "policy_loss": terms.policy_loss, "kl": terms.kl, "entropy": terms.entropy,
                     "teacher_kl": terms.teacher_kl}  # fmt: skip
            for name, value in (named | terms.metrics).items():
                if value is not None:
                    total[name] = total[name] + value.detach() if name in total else value.detach()
            logp.append(scores.logp_NT.detach())
        values = {name: float(value) for name, value in total.items()}
        return values, in_order(parts, logp)

    def _zero_grad(self) -> None:
        for parameter in self.policy.parameters().values():
            parameter.grad = None

    def _raise_if_diverged(self, updates: Updates, report: StepReport) -> None:
        """Stop once several steps in a row had nothing finite: this run is lost, its last checkpoint is not."""
        self._nonfinite_in_a_row = nonfinite_in_a_row(self._nonfinite_in_a_row, updates, report)

    # --- who sits where ---------------------------------------------------------------------------------------------

    def _seats(
        self, policy: Any, reward_model: Any, source: RolloutSource | None, states: Sequence[Any] | None
    ) -> tuple[SequencePolicy, RolloutSource]:
        if policy is None:
            raise TypeError("GRPOTrainer needs a policy: any object with the methods of grpo.protocols.PolicyModel")
        scores_rows = isinstance(policy, ScoresRows)
        seat: SequencePolicy = policy if scores_rows else ModelPolicy(policy, self.config.device)
        if source is not None:
            return seat, source
        if not isinstance(seat, ModelPolicy):
            raise TypeError("a SequencePolicy needs source=, a RolloutSource that samples and scores tries")
        if reward_model is None:
            raise TypeError("GRPOTrainer needs a reward_model: any object with compute_rewards(states, actions)")
        moved(reward_model, self.config.device)
        return seat, ModelSource(seat, reward_model, self.config.group_size, states, self.config.groups_per_step)

    def _make_reference(self, policy: Any, reference_policy: Any) -> Reference | None:
        if not self.recipe.beta or self.recipe.kl_to == "old" or self.recipe.kl_estimator == "exact":
            if reference_policy is not None:
                warn("reference_policy is not used: beta is 0, or the KL is not to a reference")
            return None
        if reference_policy is policy:
            raise ValueError("reference_policy is the policy itself; pass copy.deepcopy(policy), or leave it out")
        if reference_policy is None and isinstance(policy, ScoresRows):
            raise TypeError("beta > 0 needs reference_policy=, a grpo.protocols.Reference, beside a SequencePolicy")
        if reference_policy is None:
            return reference_of(policy)
        scores_rows = isinstance(reference_policy, ScoresRows)
        return reference_policy if scores_rows else FrozenReference(ModelPolicy(reference_policy, self.config.device))

    def _others_follow(self) -> None:
        """Reference and teacher, where they do."""
        if isinstance(self.teacher, KeepsUp):
            self.teacher.average.keep_up(self.policy.parameters())
        every = self.config.ref_sync_steps
        if self.reference is not None and every is not None and self.steps_done % every == 0:
            self.reference.sync(self.policy.parameters(), self.config.ref_mixup_alpha)

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        tensors = [p for p in self.policy.parameters().values() if p.requires_grad]
        if not tensors:
            warn("the policy has no trainable parameters: metrics are reported, nothing is updated")
            return None
        return AdamW(tensors, lr=self.config.learning_rate, weight_decay=self.config.weight_decay)

    # --- what must be kept ------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Everything the next step depends on, between steps; copies, so that later steps do not change them."""
        arrays = as_part("policy", copies(self.shards.whole(self.policy.parameters())))
        if self.reference is not None:
            arrays |= as_part("reference", copies(self.reference.parameters()))
        if isinstance(self.teacher, KeepsUp):
            arrays |= as_part("teacher", copies(self.teacher.average.parameters()))
        values: dict[str, Any] = {
            "steps_done": self.steps_done,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "version": self.policy.version,
        }
        if self.optimizer is not None:
            values["optimizer"], tensors = flattened(self.shards.state_dict(self.optimizer))
            values["optimizer_kind"] = type(self.optimizer).__name__
            arrays |= as_part("optimizer", tensors)
        source, ahead = self.source.state(), self.pace.state()
        arrays |= as_part("source", copies(source.arrays)) | as_part("pace", ahead.arrays)
        values |= {} if self.roles is None else self.roles.state().values
        return State(values | {"source": dict(source.values), **ahead.values}, arrays)

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        """Go on exactly where `state` was taken."""
        expect_same_kind(state.values, None if self.optimizer is None else type(self.optimizer).__name__)
        self.shards.put(self.policy.parameters(), part(state.arrays, "policy"), "policy")
        if self.reference is not None:
            copy_into(self.reference.parameters(), part(state.arrays, "reference"), "reference")
        if isinstance(self.teacher, KeepsUp):
            copy_into(self.teacher.average.parameters(), part(state.arrays, "teacher"), "teacher")
        if self.roles is not None:
            self.roles.load_state(state)
        if self.optimizer is not None:
            saved_state = unflattened(state.values["optimizer"], part(state.arrays, "optimizer"))
            self.shards.load_state_dict(self.optimizer, saved_state)
        self.source.load_state(State(state.values["source"], part(state.arrays, "source")))
        self.policy.version = operator.index(state.values["version"])
        self.steps_done = operator.index(state.values["steps_done"])
        self.pace.load_state(State(state.values, part(state.arrays, "pace")), self.steps_done)
        self._nonfinite_in_a_row = operator.index(state.values["nonfinite_in_a_row"])


def __getattr__(name: str) -> Any:
    """`GRPOTrainer` was here before it had a run around it; the name is one layer up now, and still found."""
    if name == "GRPOTrainer":
        return import_module("grpo.run.trainer").GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
