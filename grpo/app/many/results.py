"""What runs have reached: read from their folders, as a table and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo.app.many.crew import last_words
from grpo.run.files import FolderError, write_atomic
from grpo.run.folder import RunFolder
from grpo.statistics import bootstrap

ENDED = ("done", "stopped")
"""Reasons with which there is nothing left to do."""


@dataclass(frozen=True)
class Goal:
    """What a run is judged by: the best value of a metric; of those that reach `stop_at`, the one that is sooner."""

    metric: str
    """With a leading minus the lowest is best."""
    stop_at: float | None = None

    @property
    def name(self) -> str:
        """The metric's own name."""
        return self.metric.removeprefix("-")

    @property
    def sign(self) -> float:
        """−1 where the lowest is best."""
        return -1.0 if self.metric.startswith("-") else 1.0

    def score(self, reached: Reached) -> float | None:
        """Higher is better; None: nothing was measured."""
        if reached.value is None:
            return None
        value = self.sign * reached.value
        if self.stop_at is None or value < self.sign * self.stop_at:
            return value
        return self.sign * self.stop_at + 1 / (1 + reached.step)


@dataclass(frozen=True)
class Reached:
    """How far one run came."""

    folder: Path
    value: float | None
    """The best of the goal's metric."""
    step: int
    """At which that was, or the last one."""
    seconds: float
    reason: str
    """As the run's status says; "unfinished" where it does not."""
    why: str = ""
    """What a run said that failed."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.reason in ENDED


def reached(path: Path, goal: Goal, failed: bool = False) -> Reached:
    """What lies in a run's folder; a run that failed says why."""
    rows, seconds, reason = [], 0.0, "unfinished"
    with suppress(FolderError):
        if (path / "run.json").is_file():  # else it never began: no error that looks for a name like it
            folder = RunFolder.open(path)
            rows = [(row["step"], row.get(goal.name)) for row in folder.each_step()]
            seconds = sum(row.get("total") or 0.0 for row in folder.each_step("timing.jsonl"))
            reason = folder.status.get("reason") or "unfinished"
    known = [(goal.sign * value, -step, value) for step, value in rows if value is not None]
    _, step, value = max(known, default=(0.0, -rows[-1][0] if rows else 0, None))
    if failed and reason not in ENDED:
        return Reached(path, value, -step, seconds, "failed", last_words(path.with_name(f"{path.name}.log")))
    return Reached(path, value, -step, seconds, reason)


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def in_words(values: Sequence[float]) -> str:
    """Mean, spread and extent of what several runs reached."""
    value_M = np.array(values, float)
    if not len(value_M):
        return "nothing was measured"
    if len(value_M) == 1:
        return f"{value_M[0]:.4g} (one run)"
    low, high = bootstrap(value_M)
    spread = f"std {value_M.std(ddof=1):.3g}, from {value_M.min():.4g} to {value_M.max():.4g}"
    return f"mean {value_M.mean():.4g} [95 %: {low:.4g}, {high:.4g}], median {np.median(value_M):.4g}, {spread}"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """The table for other programs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    write_atomic(path, text.getvalue())
