"""A run's metrics in the words of TRL's log_history: rows of steps, of evaluations, and one of the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from grpo.errors import ConfigError
from grpo.experience import Experience
from grpo.language.evaluate import Evaluation
from grpo.language.samples import Sample, lengths_of
from grpo.objective import objective
from grpo.recipes import Recipe
from grpo.report import StepReport
from grpo.rollouts import Rollouts, Scores, Status

ENDED = "_terminated_length"


def step_row(report: StepReport, recipe: Recipe) -> dict[str, float]:
    """The metrics of a step, floats alone; where no completion ended by itself TRL has lengths of 0."""
    found = {name: float(value) for name, value in report.metrics.items() if isinstance(value, int | float)}
    found |= {name: 0.0 for name in report.metrics if name.endswith(ENDED) and name not in found}
    if "clip_ratio/low_mean" in found:
        found |= _extremes(report, recipe)
    return {name: value for name, value in found.items() if not name.startswith("eval/")}


def _extremes(report: StepReport, recipe: Recipe) -> dict[str, float]:
    """Of the shares of clipped tokens in the last pass, that of the least and of the most clipped sequence."""
    columns = recipe.columns()
    low, high = columns.get("epsilon"), columns.get("epsilon_high")
    if not report.metrics["clip_ratio/region_mean"] or low is None:
        return {"clip_ratio/low_min": 0.0, "clip_ratio/high_max": 0.0}
    batch = report.experience
    mask_NT, advantage_NT = torch.as_tensor(batch.mask_NT), torch.as_tensor(batch.advantage_NT)
    count_N = mask_NT.sum(1).clip(min=1)
    gap_NT = (torch.as_tensor(report.scores.logp_NT) - batch.rollouts.old_logp_NT) * mask_NT
    if recipe.ratio == "sequence":
        gap_NT = (gap_NT.sum(1) / count_N)[:, None].expand_as(gap_NT)
    ratio_NT = gap_NT.exp()
    low_NT = mask_NT & (ratio_NT < 1 - low) & (advantage_NT < 0)
    high_NT = mask_NT & (ratio_NT > 1 + (low if high is None else high)) & (advantage_NT > 0)
    share_N, most_N = low_NT.sum(1) / count_N, high_NT.sum(1) / count_N
    return {"clip_ratio/low_min": float(share_N.min()), "clip_ratio/high_max": float(most_N.max())}


def mean_row(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of several steps' metrics, over those that have them; of what is counted or set, the last."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
        if values:
            found[name] = values[-1] if name in ("num_tokens", "learning_rate", "epoch") else sum(values) / len(values)
    return found


def evaluation_row(made: Evaluation, recipe: Recipe, prefix: str = "eval") -> dict[str, float]:
    """What TRL reports of an evaluation, and what is measured here besides (accuracy, pass@k)."""
    if made.named:
        each = {name: evaluation_row(one, recipe, f"{prefix}_{name}") for name, one in made.named.items()}
        return {key: value for row in each.values() for key, value in row.items()}
    total_PS = _totals(made, recipe)
    known = total_PS[~np.isnan(total_PS)]
    found: dict[str, float | None] = {"loss": _loss(made, recipe)}
    for name, value_PS in made.rewards.items():
        found |= {f"rewards/{name}/{what}": value for what, value in _spread(value_PS[~np.isnan(value_PS)]).items()}
    found |= {"reward": _spread(known).get("mean"), "reward_std": _spread(known).get("std")}
    found["frac_reward_zero_std"] = float(np.mean(np.ptp(np.nan_to_num(total_PS), axis=1) == 0.0))
    found |= {key: 0.0 if value is None else value for key, value in lengths_of(made.samples).items()}
    found |= {name: value for name, value in made.metrics().items() if name == "accuracy" or name.startswith("pass@")}
    found |= {"runtime": made.seconds, "samples_per_second": len(made.samples) / max(made.seconds, 1e-9)}
    return {f"{prefix}_{name}": float(value) for name, value in found.items() if value is not None}


def _totals(made: Evaluation, recipe: Recipe) -> np.ndarray:
    """(P, S): the weighted sum of the rewards; NaN where none has an opinion."""
    parts_KPS = np.array(list(made.rewards.values()))
    weight_K = np.ones(len(parts_KPS))
    weight_K[: len(recipe.reward_weights or ())] = recipe.reward_weights or ()
    total_PS: np.ndarray = np.nansum(parts_KPS * weight_K[:, None, None], axis=0)
    return np.where(np.isnan(parts_KPS).all(0), np.nan, total_PS)


def _spread(known: np.ndarray) -> dict[str, float]:
    if not len(known):
        return {}
    return {"mean": float(known.mean()), "std": float(known.std(ddof=1)) if len(known) > 1 else 0.0}


def _loss(made: Evaluation, recipe: Recipe) -> float:
    """The policy's part of the loss on held-out groups, by the policy that made them: its ratios are 1."""
    count = made.length_PS.shape[1]
    if count == 1:
        return 0.0  # nothing to compare with
    samples = made.samples
    steps = max(max(sample.length for sample in samples), 1)
    mask_NT = torch.zeros(len(samples), steps, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask_NT[row, : sample.length] = sample.made
    parts_NK = torch.tensor(np.array(list(made.rewards.values())).reshape(len(made.rewards), -1).T).float()
    rollouts = Rollouts(
        group_N=torch.arange(len(samples)) // count,
        mask_NT=mask_NT,
        old_logp_NT=torch.zeros(mask_NT.shape),
        reward_parts_NK=parts_NK,
        reward_names=list(made.rewards),
        inputs=list(samples),
        status_N=torch.tensor([int(_status(sample)) for sample in samples]),
    )
    plain = recipe.but(beta=0.0, entropy_coef=0.0, teacher_coef=0.0, drop_no_signal=False)
    return float(objective(Scores(torch.zeros(mask_NT.shape)), Experience.build(rollouts, plain), plain).policy_loss)


def _status(sample: Sample) -> Status:
    if sample.error is not None:
        return Status.FAILED
    return Status.TRUNCATED if sample.stop == "length" else Status.TERMINATED


def expect_known(control: Any) -> None:
    """Refuse the one wish of a callback that cannot be granted."""
    if control.should_epoch_stop:
        raise ConfigError(
            "control.should_epoch_stop: prompts follow from the number of a step, so that no epoch is cut short; set "
            "should_training_stop to end the run"
        )


def final_row(rows: Iterable[Mapping[str, float]], seconds: float, steps: int, samples: float) -> dict[str, float]:
    """What the last entry of log_history says of the whole run."""
    losses = [row["loss"] for row in rows if "loss" in row]
    return {
        "train_runtime": seconds,
        "train_samples_per_second": samples / max(seconds, 1e-9),
        "train_steps_per_second": steps / max(seconds, 1e-9),
        "total_flos": 0.0,
        "train_loss": sum(losses) / len(losses) if losses else 0.0,
    }
