"""curve.png: reward with its spread, and the panels that say whether learning is healthy. Drawn without a display."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grpo.run.files import write_atomic
from grpo.run.folder import RunFolder

PANELS = ("reward", "kl", "entropy", "clip_ratio/region_mean", "grad_norm")
"""Drawn where a run has them."""


def draw(folder: RunFolder) -> Path:
    """Write the folder's curve.png. Figures are made directly, so that a notebook's own plotting is left alone."""
    rows = folder.metrics()
    if not rows:
        raise ValueError("there are no steps to draw")
    names = [name for name in PANELS if any(row.get(name) for row in rows)]
    names += [name for name in sorted({name for row in rows for name in row}) if name.startswith("eval/")][:3]
    figure = Figure(figsize=(7, 1.2 + 1.9 * max(len(names), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    step = np.array([row["step"] for row in rows])
    for axes, name in zip(
        figure.subplots(max(len(names), 1), 1, sharex=True, squeeze=False)[:, 0], names, strict=False
    ):
        value = _column(rows, name)
        known = np.isfinite(value)
        axes.plot(step[known], value[known], linewidth=1.2, marker="." if known.sum() < 40 else None)
        if name == "reward":
            spread = np.nan_to_num(_column(rows, "reward_std"))
            axes.fill_between(step, value - spread, value + spread, alpha=0.2, linewidth=0)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.set_xlabel("step" if name == names[-1] else "")
    path = folder.path / "curve.png"
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=110))
    return path


def _column(rows: list[dict[str, float | None]], name: str) -> np.ndarray:
    return np.array([np.nan if (value := row.get(name)) is None else value for row in rows])
