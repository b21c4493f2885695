"""curve.png: reward, or what the source names, with its spread, and the panels that say whether learning is healthy.

Drawn without a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grpo.run.files import write_atomic
from grpo.run.folder import RunFolder

PANELS = ("reward", "kl", "teacher_kl", "entropy", "clip_ratio/region_mean", "grad_norm")
"""Drawn where a run has them."""


def draw(folder: RunFolder, first: Sequence[str] = ()) -> Path:
    """Write the folder's curve.png, `first` on top. Figures are made directly: a notebook's own plotting stays."""
    rows = folder.metrics()
    if not rows:
        raise ValueError("there are no steps to draw")
    own = first or PANELS[:1]
    names = [name for name in (*own, *PANELS[1:]) if any(row.get(name) for row in rows)]
    evaluated = sorted({name for row in rows for name in row if name.startswith("eval/") and not name.endswith("_std")})
    names += [name for name in evaluated if name not in names][:3]
    figure = Figure(figsize=(7, 1.2 + 1.9 * max(len(names), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    step = np.array([row["step"] for row in rows])
    for axes, name in zip(
        figure.subplots(max(len(names), 1), 1, sharex=True, squeeze=False)[:, 0], names, strict=False
    ):
        value = _column(rows, name)
        known = np.isfinite(value)
        axes.plot(step[known], value[known], linewidth=1.2, marker="." if known.sum() < 40 else None)
        spread = np.nan_to_num(_column(rows, f"{name}_std"))[known]
        axes.fill_between(step[known], value[known] - spread, value[known] + spread, alpha=0.2, linewidth=0)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.set_xlabel("step" if name == names[-1] else "")
    path = folder.path / "curve.png"
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=110))
    return path


def _column(rows: list[dict[str, float | None]], name: str) -> np.ndarray:
    return np.array([np.nan if (value := row.get(name)) is None else value for row in rows])
