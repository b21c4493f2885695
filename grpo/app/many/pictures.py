"""Pictures of several runs: their curves with the spread, and what each setting did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grpo.app.many.space import Range, Space
from grpo.run.files import FolderError, write_atomic
from grpo.run.folder import RunFolder


def draw_curves(path: Path, runs: Mapping[str, Path], names: Sequence[str]) -> bool:
    """Each run as a thin line, their median and the middle half of them on top; whether there was anything to draw."""
    found = {run: _metrics(folder) for run, folder in runs.items()}
    names = [name for name in dict.fromkeys(names) if any(name in columns for columns in found.values())]
    if not names:
        return False
    figure = Figure(figsize=(7, 0.8 + 2.4 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], names, strict=True):
        curves = [columns[name] for columns in found.values() if name in columns]
        for step_T, value_T in curves:
            axes.plot(step_T, value_T, color="tab:blue", alpha=0.25, linewidth=0.8)
        if len(curves) > 1:
            _spread(axes, curves)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.set_xlabel("step" if name == names[-1] else "")
    figure.suptitle(f"{len(runs)} runs: each, their median, the middle half", fontsize="medium")
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=110))
    return True


def draw_settings(
    path: Path, space: Space, trials: Sequence[tuple[Mapping[str, str], float | None]], name: str, sign: float
) -> bool:
    """What trials reached, against each setting that was gone over; whether there was anything to draw."""
    known = [(settings, sign * score) for settings, score in trials if score is not None]
    if not known:
        return False
    figure = Figure(figsize=(max(4, 3.2 * len(space)), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    score_K = np.array([score for _, score in known])
    best = int(np.argmax(sign * score_K))
    for axes, (key, one) in zip(
        figure.subplots(1, len(space), sharey=True, squeeze=False)[0], space.items(), strict=True
    ):
        words = [settings[key] for settings, _ in known]
        if isinstance(one, Range):
            at_K = np.array([float(word) for word in words])
            axes.set_xscale("log" if one.by_powers else "linear")
        else:
            at_K = np.array([one.words.index(word) for word in words], float)
            axes.set_xticks(range(len(one.words)), one.words)
        axes.scatter(at_K, score_K, alpha=0.6, s=22)
        axes.scatter(at_K[best], score_K[best], marker="*", s=150, color="tab:red", label="best")
        axes.set_xlabel(key)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(name)
    figure.axes[0].legend(fontsize="small")
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=110))
    return True


def _metrics(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and values of every metric of a run, where it was measured."""
    try:
        rows = RunFolder.open(folder).metrics()
    except FolderError:
        return {}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None and name != "step":
                pairs.setdefault(name, []).append((row["step"], value))
    return {name: (np.array(found)[:, 0], np.array(found)[:, 1]) for name, found in pairs.items()}


def _spread(axes: Any, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Median and quartiles at every step that some run measured; a run that has ended stays where it was."""
    step_T = np.unique(np.concatenate([steps for steps, _ in curves]))
    value_RT = np.array([
        np.where(step_T < steps[0], np.nan, np.interp(step_T, steps, values)) for steps, values in curves
    ])  # fmt: skip
    low_T, middle_T, high_T = np.nanpercentile(value_RT, [25, 50, 75], axis=0)
    axes.fill_between(step_T, low_T, high_T, color="tab:blue", alpha=0.2, linewidth=0)
    axes.plot(step_T, middle_T, color="tab:blue", linewidth=1.8)
