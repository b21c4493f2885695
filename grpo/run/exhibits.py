"""A step's groups as rows and arrays to look at later; what a row shows is the source's affair."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo.capabilities import TellsEntropy
from grpo.core.arrays import Array, is_torch
from grpo.credit import trajectory_reward
from grpo.objective import per_decision
from grpo.protocols import RolloutSource
from grpo.recipes import Recipe
from grpo.report import StepReport
from grpo.rollouts import Rollouts, Scores, Status
from grpo.run.folder import number

_LARGEST = float(np.finfo(np.float16).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


def exhibit(
    report: StepReport, source: RolloutSource, groups: int | None, recipe: Recipe | None = None
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Rows and per-decision arrays of the first `groups` groups (None: all) of a step.

    `logp` is of the last pass: in the first one every ratio is 1 and nothing is clipped. With the recipe, also what
    the objective made of each decision, and its entropy where the source can tell it.
    """
    experience = report.experience
    names = host(experience.rollouts.group_N).tolist()
    wanted = set(list(dict.fromkeys(names))[:groups])
    index = [row for row, name in enumerate(names) if name in wanted]
    rollouts = experience.rollouts.select(index)
    arrays = {
        "mask": rollouts.mask_NT,
        "old_logp": rollouts.old_logp_NT,
        "logp": report.scores.logp_NT[index],
        "ref_logp": None if experience.ref_logp_NT is None else experience.ref_logp_NT[index],
        "advantage": experience.advantage_NT[index],
        "gate": experience.mask_NT[index],
        "sampled_logp": rollouts.sampled_logp_NT,
        "weight": rollouts.weight_NT,
    }
    if rollouts.sampled_logp_NT is not None:
        arrays["sampler"] = host(rollouts.old_logp_NT) - host(rollouts.sampled_logp_NT)
    reward_N = None
    if recipe is not None:
        with_objective = per_decision(Scores(report.scores.logp_NT[index]), experience.select(index), recipe)
        # float16 has few digits near 1, and fewer for the difference of two of its numbers.
        with_objective["log_ratio"] = np.log(np.maximum(host(with_objective.pop("ratio")), _SMALLEST))
        arrays |= with_objective
        arrays["entropy"] = source.entropies(rollouts) if isinstance(source, TellsEntropy) else None
        if rollouts.reward_parts_NK is not None:
            reward_N = host(trajectory_reward(rollouts, recipe)[0])
    kept = {name: _compact(array) for name, array in arrays.items() if array is not None}
    status = None if rollouts.status_N is None else host(rollouts.status_N).tolist()
    advantage_N = _row_mean(host(experience.advantage_NT[index]), kept["mask"])
    signal_N = np.abs(np.where(kept["gate"] & kept["mask"], host(experience.advantage_NT[index]), 0.0)).max(
        1, initial=0.0
    )
    rows = [
        {
            "row": row,
            "group": names[row],
            "reward": _reward(rollouts, i, reward_N),
            "advantage": float(advantage_N[i]),
            **_parts(rollouts, i),
            "decisions": int(kept["mask"][i].sum()),
            "teaching": int((kept["gate"][i] & kept["mask"][i]).sum()),
            "signal": float(signal_N[i]),
            "status": Status(status[i]).name.lower() if status else "ok",
            **shown,
        }
        for i, (row, shown) in enumerate(zip(index, source.show(rollouts), strict=True))
    ]
    return rows, kept


def host(array: Array) -> np.ndarray:
    """Any array as a NumPy one; bfloat16, which NumPy lacks, as float32."""
    if is_torch(array):
        array = array.detach().cpu()
        array = array.float() if array.is_floating_point() else array
        return np.asarray(array.numpy())
    return np.asarray(array)


def _compact(array: Array) -> np.ndarray:
    """Booleans as they are, numbers as float16, cut to its range: enough to look at, a quarter of the space."""
    found = host(array)
    return found if found.dtype == bool else np.clip(found.astype(np.float32), -_LARGEST, _LARGEST).astype(np.float16)


def _row_mean(values_NT: np.ndarray, mask_NT: np.ndarray) -> np.ndarray:
    total_N = np.where(mask_NT, values_NT.astype(np.float32), 0.0).sum(1)
    return np.asarray(total_N / np.maximum(mask_NT.sum(1), 1))


def _reward(rollouts: Rollouts, row: int, reward_N: np.ndarray | None) -> float | None:
    """What the trajectory got, in sum, its parts weighted; None where it failed or only its parts are known."""
    if not bool(host(rollouts.scored_N)[row]):
        return None
    if reward_N is not None:
        return number(reward_N[row])
    total = [host(rollouts.reward_N)[row]] if rollouts.reward_N is not None else []
    if rollouts.reward_NT is not None:
        total.append(np.where(host(rollouts.mask_NT)[row], host(rollouts.reward_NT)[row], 0.0).sum())
    return float(np.sum(total)) if total else None


def _parts(rollouts: Rollouts, row: int) -> dict[str, Any]:
    """The reward's parts where it has some; None = no opinion."""
    if rollouts.reward_parts_NK is None:
        return {}
    return {"reward_parts": [number(value) for value in host(rollouts.reward_parts_NK)[row]]}
