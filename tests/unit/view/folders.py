"""Run folders to look at, written with the run's own writer and without a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo.run.folder import RunFolder

RECIPE = {
    "name": "grpo",
    "surrogate": "clip",
    "ratio": "token",
    "epsilon": 0.2,
    "epsilon_high": 0.3,
    "beta": 0.0,
    "kl_estimator": "k3",
    "baseline": "group_mean",
    "scale": "group_std",
    "scale_eps": 1e-4,
    "reward_weights": [1.0, 0.5],
}
CONFIG = {
    "task": "language",
    "resolved": {"task.loss_type": "grpo", "task.model": "tiny", "task.seed": 0, "run.steps": 40},
}


def make_run(
    path: Path,
    steps: int = 20,
    *,
    task: str = "language",
    config: Mapping[str, Any] = CONFIG,
    seed: int = 0,
    **metrics: Any,
) -> RunFolder:
    """A run that did so many steps; `metrics`: a number or a function of the step, by name."""
    folder = RunFolder.create(path, task=task, config=config, created=f"2026-11-15T10:00:{seed:02d}+00:00", seed=seed)
    usual = {"reward": lambda step: 0.1 * step, "reward_std": 0.5, "frac_reward_zero_std": 0.1, "grad_norm": 1.0}
    for step in range(1, steps + 1):
        row = {name: value(step) if callable(value) else value for name, value in (usual | metrics).items()}
        folder.append_metrics(step, row)
        folder.append_timing(step, {"collect": 0.5, "update": 0.25}, 1.0)
    folder.close()
    return folder


def end(folder: RunFolder, reason: str | None = "done", steps: int = 20) -> None:
    """How the run says that it ended; None: it has not said so."""
    folder.write_status({"steps": steps, "recipe": RECIPE, "reason": reason})


def try_row(row: int, group: int, completion: str, parts: Sequence[float | None], **more: Any) -> dict[str, Any]:
    """One completion as the language room shows it."""
    return {
        "row": row,
        "group": group,
        "reward": None,
        "advantage": 0.0,
        "reward_parts": list(parts),
        "status": "terminated",
        "prompt": f"prompt number {group}",
        "completion": completion,
        "stop": "eos",
        "rewards": dict(zip(("right", "short"), parts, strict=True)),
        "tokens": [f"{word} " for word in completion.split()],
        **more,
    }


def add_samples(folder: RunFolder, step: int, rows: Sequence[Mapping[str, Any]], **arrays: np.ndarray) -> None:
    """Keep some tries; arrays that are not given are plain."""
    length = max((len(row.get("tokens", row.get("actions", [0]))) for row in rows), default=1)
    shape = (len(rows), length)
    usual = {
        "mask": np.ones(shape, bool),
        "gate": np.ones(shape, bool),
        "old_logp": np.full(shape, -1.0, np.float16),
        "logp": np.full(shape, -1.0, np.float16),
        "advantage": np.zeros(shape, np.float16),
    }
    folder.write_samples(step, [dict(row) for row in rows], usual | arrays)


def two_groups(folder: RunFolder, step: int) -> None:
    """One group that teaches, one that does not."""
    rows = [
        try_row(0, 0, "the answer is four", [1.0, 0.5], advantage=1.0),
        try_row(1, 0, "no idea", [0.0, 1.0], advantage=-1.0, status="truncated", stop="length"),
        try_row(2, 1, "the same", [0.0, 0.0]),
        try_row(3, 1, "the same", [0.0, 0.0]),
    ]
    advantage = np.array([[1, 1, 1, 1], [-1, -1, 0, 0], [0] * 4, [0] * 4], np.float16)
    ratio = np.array([[1.5, 1.0, 1.2, 0.5], [0.5, 1.5, 1, 1], [1] * 4, [1] * 4], np.float16)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]], bool)
    add_samples(folder, step, rows, advantage=advantage, ratio=ratio, mask=mask)
