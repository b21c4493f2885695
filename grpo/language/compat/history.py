"""A run's metrics in the words of TRL's log_history: rows of steps, of evaluations, and one of the whole run."""

from __future__ import annotations

import math
import re
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
EVALUATED = re.compile(r"eval/(?:(?P<set>[^/]+)/)??(?:rewards/(?P<reward>.+)|(?P<other>accuracy|pass@\d+|length))")
"""What the metrics of a run call the parts of an evaluation, perhaps of one of several sets."""
LAST = ("num_tokens", "learning_rate", "epoch", "grad_norm")
"""Of several steps, TRL logs the last one's."""


def step_row(report: StepReport, recipe: Recipe) -> dict[str, float]:
    """The metrics of a step, floats alone; where no completion ended by itself TRL has lengths of 0."""
    found = {name: float(value) for name, value in report.metrics.items() if isinstance(value, int | float)}
    found |= {name: 0.0 for name in report.metrics if name.endswith(ENDED) and name not in found}
    if any(not bool(sample.made.all()) for sample in report.experience.rollouts.inputs):
        found |= _lengths(report.experience.rollouts.inputs)
    if "clip_ratio/low_mean" in found:
        found |= _extremes(report, recipe)
    return {name: value for name, value in found.items() if not name.startswith("eval/")}


def _lengths(samples: Sequence[Sample]) -> dict[str, float]:
    """As TRL counts them: what tools and environments answered is no part of a completion."""
    return {name: 0.0 if value is None else value for name, value in lengths_of(samples, chosen=True).items()}


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


def earlier_rows(
    steps: Iterable[Mapping[str, Any]], every: int, most: int, weights: Sequence[float] | None = None
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Rows of a run that goes on, from the metrics it wrote before, as TRL's trainer takes them from its checkpoint;
    and the last steps' own, which wait for those that their row is still to tell of. weights: of the rewards."""
    chunks: dict[int, list[dict[str, float]]] = {}
    evaluations: dict[int, dict[str, float]] = {}
    last = 0
    for row in steps:
        last = int(row["step"])
        chunks.setdefault(-(-last // every) * every, []).append(_as_logged(row))
        if judged := _as_evaluated(row, weights):
            evaluations[last] = judged
        for kept in (chunks, evaluations):
            if len(kept) > most + 1:
                del kept[next(iter(kept))]
    waiting = [row for step in list(chunks) if step > last for row in chunks.pop(step)]
    rows = [{**mean_row(some), "step": step} for step, some in chunks.items()]
    rows += [{**judged, "step": step} for step, judged in evaluations.items()]
    return sorted(rows, key=lambda row: row["step"])[-most:], waiting  # of one step, its own row comes first


def _as_evaluated(row: Mapping[str, Any], weights: Sequence[float] | None) -> dict[str, float]:
    """Of what `evaluation_row` says that which a line of metrics.jsonl has: means, neither loss nor spread nor time."""
    found: dict[str, float] = {}
    rewards: dict[str, list[float | None]] = {}
    for name, value in row.items():
        known = EVALUATED.fullmatch(name)
        if known is None:
            continue
        prefix = f"eval_{known['set']}_" if known["set"] else "eval_"
        if known["reward"] and value is None:  # it keeps its place, and its weight
            rewards.setdefault(prefix, []).append(None)
        elif not isinstance(value, int | float):
            continue
        elif known["reward"]:
            found[f"{prefix}rewards/{known['reward']}/mean"] = float(value)
            rewards.setdefault(prefix, []).append(float(value))
        else:
            found[prefix + {"length": "completions/mean_length"}.get(known["other"], known["other"])] = float(value)
    for prefix, values in rewards.items():
        weight_K = [*(weights or ())][: len(values)]
        weight_K += [1.0] * (len(values) - len(weight_K))
        told = [w * value for w, value in zip(weight_K, values, strict=True) if value is not None]
        if len(told) == len(values):
            found[f"{prefix}reward"] = sum(told)
    return found | ({"epoch": float(row["epoch"])} if found and row.get("epoch") is not None else {})


def _as_logged(row: Mapping[str, Any]) -> dict[str, float]:
    """What `step_row` says, of a line of metrics.jsonl."""
    found = {name: 0.0 if value is None and name.endswith(ENDED) else value for name, value in row.items()}
    kept = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    if kept.get("clip_ratio/region_mean") == 0.0:
        kept |= {"clip_ratio/low_min": 0.0, "clip_ratio/high_max": 0.0}
    return {
        name: value for name, value in kept.items() if not name.startswith("eval/") and name not in ("step", "samples")
    }


def mean_row(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of several steps' metrics, over those that have them; of what is counted or set, the last."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
        if values:
            found[name] = values[-1] if name in LAST else sum(values) / len(values)
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
    found |= _lengths(made.samples)
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
