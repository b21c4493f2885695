"""What one step of the trainer tells: metrics by name, and beside them what was sampled and learned from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo.core.advantages import group_count
from grpo.core.arrays import Array, astype, is_torch
from grpo.core.gates import has_signal
from grpo.credit import left_alone, reward_size, trajectory_reward
from grpo.experience import Experience
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts, Scores, Status, row_index

GATES = ("selected_NT", "open_NT", "penalised_NT")
"""Of an experience: those that depend on the policy of the moment."""
MAX_NONFINITE = 3
"""Steps in a row without one finite update before training stops."""


class StepReport(Mapping[str, float | None]):
    """A mapping of metric names to values (None: nothing finite to report)."""

    def __init__(self, step: int, metrics: Mapping[str, float | None], experience: Experience, scores: Scores) -> None:
        self.step = step
        self.metrics = dict(metrics)
        self.experience = experience
        """With the gates of the last pass."""
        self.scores = scores
        """Log-probs of the last pass: the first has ratio 1 and no clips."""

    @classmethod
    def kept(cls, step: int, metrics: Mapping[str, float | None]) -> StepReport:
        """Of a step whose arrays are gone."""
        made = cls.__new__(cls)
        made.step, made.metrics = step, dict(metrics)
        return made

    def forget(self) -> None:
        """Let go of the arrays and keep the metrics."""
        del self.experience, self.scores

    def __getitem__(self, name: str) -> float | None:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}: {v:.4g}" if v is not None else f"{k}: –" for k, v in self.metrics.items())
        return f"StepReport(step {self.step}, {shown})"


class Diverged(RuntimeError):
    """Training stopped because updates kept being non-finite; `report` is the last step, for looking at."""

    def __init__(self, message: str, report: StepReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class Update:
    """One optimizer step, taken or skipped."""

    rows: Sequence[int] | Array
    logp_NT: Array
    values: Mapping[str, float]
    """Loss, its parts and metrics of the whole minibatch."""
    finite: bool
    taken: bool
    """The optimizer moved the weights."""
    skipped: bool
    """It would have, but the minibatch was non-finite or too far off-policy."""
    gates: Mapping[str, Array] = field(default_factory=dict)
    """By name, those that the minibatch had."""


class Updates:
    """The optimizer steps of one trainer step."""

    def __init__(self, experience: Experience) -> None:
        self._experience = experience
        self._all: list[Update] = []

    def add(self, update: Update) -> None:
        """One more."""
        self._all.append(update)

    def exceed_kl(self, target_kl: float | None) -> bool:
        """Whether the policy has left the one that sampled by more than `target_kl`."""
        return target_kl is not None and self._all[-1].values["approx_kl"] > target_kl

    def all_nonfinite(self) -> bool:
        """Whether the step had no finite update."""
        return not any(update.finite for update in self._all)

    def last_scores(self, experience: Experience) -> Scores:
        """Each decision's log-prob when it was last scored, laid out as in `experience`."""
        logp_NT, fresh = self._experience.rollouts.old_logp_NT.detach(), False
        for update in self._all:
            if isinstance(update.rows, range) and update.rows == range(len(logp_NT)):
                logp_NT, fresh = update.logp_NT, True
                continue
            logp_NT = logp_NT if fresh else logp_NT.clone()
            logp_NT[row_index(update.rows, logp_NT)] = update.logp_NT.to(logp_NT.dtype)
            fresh = True
        if self._experience is not experience:  # it was taken apart into decisions
            flat_M, logp_NT = logp_NT[:, 0], experience.rollouts.old_logp_NT.detach().clone()
            logp_NT[experience.rollouts.mask_NT] = flat_M.to(logp_NT.dtype)
        return Scores(logp_NT)

    def last_gates(self, experience: Experience) -> Experience:
        """`experience` with the gates that each decision met when it was last scored; most recipes have none."""
        found: dict[str, Any] = {}
        for name in dict.fromkeys(name for update in self._all for name in update.gates):
            gate_NT = _all(self._experience.mask_NT, name != "penalised_NT")
            for update in self._all:
                gate_NT[row_index(update.rows, gate_NT)] = update.gates[name].to(gate_NT)
            if self._experience is not experience:  # it was taken apart into decisions
                flat_M, gate_NT = gate_NT[:, 0], _all(experience.mask_NT, name != "penalised_NT")
                gate_NT[experience.rollouts.mask_NT] = flat_M
            found[name] = gate_NT
        return replace(experience, **found) if found else experience

    def metrics(self) -> dict[str, float | None]:
        """Mean over the step's updates, of what was finite."""
        names = dict.fromkeys(name for update in self._all for name in update.values)
        found: dict[str, float | None] = {}
        for name in names:
            values = [update.values[name] for update in self._all if name in update.values]
            values = [value for value in values if math.isfinite(value)]
            found[name] = sum(values) / len(values) if values else None
        found["updates"] = float(sum(update.taken for update in self._all))
        found["updates_skipped"] = float(sum(update.skipped for update in self._all))
        return found


def _all(mask_NT: Array, value: bool) -> Array:
    return mask_NT | True if value else mask_NT & False


def nonfinite_in_a_row(before: int, updates: Updates, report: StepReport) -> int:
    """Steps in a row that had nothing finite; raises once they are several: the run is lost, its checkpoint is not."""
    count = before + 1 if updates.all_nonfinite() else 0
    if count >= MAX_NONFINITE:
        raise Diverged(
            f"the last {MAX_NONFINITE} steps had a non-finite loss or gradient and were skipped; lower "
            "learning_rate, set max_ratio, or look at the rewards and log-probs of the last step",
            report,
        )
    return count


def reward_metrics(rollouts: Rollouts, recipe: Recipe) -> dict[str, float | None]:
    """Rewards as sampled, before anything is compared, dropped or sampled again; of NumPy's arrays or PyTorch's."""
    reward_N, weight_N = trajectory_reward(rollouts, recipe)
    valid_N = weight_N > 0
    rewards = reward_N[valid_N]
    signal_N = has_signal(reward_N, rollouts.group_N, weight_N, reward_size(rollouts, recipe))
    one_N = astype(valid_N, reward_N)
    share_N = one_N / group_count(rollouts.group_N, one_N).clip(min=1.0)  # the rows of a group add up to 1
    metrics: dict[str, float | None] = {
        "reward": _mean(rewards) if len(rewards) else None,
        "reward_std": _deviation(rewards) if len(rewards) > 1 else None,
        "frac_reward_zero_std": float((share_N * ~signal_N).sum() / share_N.sum().clip(min=1.0)),
        "length": _mean(astype(rollouts.mask_NT.sum(1), reward_N)),
        "failed": float((~rollouts.scored_N).sum()),
    }
    if dropped := len({*rollouts.group_N[left_alone(rollouts, recipe, weight_N)].tolist()}):
        metrics["groups_dropped"] = float(dropped)
    if rollouts.reward_parts_NK is not None and rollouts.reward_names is None:
        for k, column in enumerate(rollouts.reward_parts_NK.T):
            known = column[column == column]
            metrics[f"rewards/{k}/mean"] = _mean(known) if len(known) else None
    if rollouts.status_N is not None:
        metrics["truncated"] = _mean(astype(rollouts.status_N == int(Status.TRUNCATED), reward_N))
    return metrics


def _mean(x_M: Array) -> float:
    """NumPy's sums are made in float64: those in float32 are less exact than PyTorch's."""
    return float(x_M.mean() if is_torch(x_M) else x_M.mean(dtype="float64").astype(x_M.dtype))


def _deviation(x_M: Array) -> float:
    """The standard deviation that a sample tells of."""
    return float(x_M.std() if is_torch(x_M) else x_M.std(ddof=1, dtype="float64").astype(x_M.dtype))
