"""What a person sees meanwhile: a live line on a terminal or in a notebook, else one `key=value` line a step."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from grpo.run.config import ENDLESS
from grpo.run.folder import Row
from grpo.run.output import Steady
from grpo.run.redaction import Redactor
from grpo.run.timing import in_words

if TYPE_CHECKING:
    from grpo.run.loop import Summary

SHOWN = ("reward", "kl", "entropy", "grad_norm")
"""Metrics that fit on a line."""


class Progress(Protocol):
    """Told what happens; shows it or not."""

    names: Sequence[str]
    """Metrics to show; the loop puts a source's own `headline` in front."""

    def start(self, path: Path | None, done: int, steps: int) -> None: ...
    def step(self, row: Row, seconds: float) -> None: ...
    def finish(self, summary: Summary) -> None: ...
    def close(self) -> None: ...


def make_progress(kind: str | None) -> Progress:
    """`auto` (live where there is somebody to look, else plain), `live`, `plain` or None."""
    if kind is None:
        return Silent()
    if kind == "plain":
        return Plain()
    if kind not in ("auto", "live"):
        raise ValueError(f"unknown progress {kind!r}; use auto, live, plain or None")
    try:
        from rich.console import Console  # here: a plain run needs no rich
    except ImportError:
        return Plain()
    console = Console()
    return Live(console) if kind == "live" or console.is_terminal or console.is_jupyter else Plain()


def printable(text: object) -> str:
    """Text from a model or a file, safe on a terminal: control and direction characters are dropped."""
    return "".join(c if c == " " or unicodedata.category(c)[0] != "C" else "�" for c in str(text))


def told(text: object) -> str:
    """What a command says of an error, line by line: it may quote a model, and it may end up in a log."""
    without = Redactor(argv=sys.argv, environ=os.environ).text(str(text))
    return "\n".join(printable(line) for line in without.split("\n"))


class Silent:
    """Shows nothing."""

    names: Sequence[str] = SHOWN

    def start(self, path: Path | None, done: int, steps: int) -> None:
        """Nothing."""

    def step(self, row: Row, seconds: float) -> None:
        """Nothing."""

    def finish(self, summary: Summary) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Plain(Silent):
    """One line every `every` steps: for logs, pipes and job schedulers."""

    def __init__(self, every: int = 1, file: TextIO | None = None) -> None:
        self._every, self._steps = every, 0
        self._file: Any = None if file is None else Steady(file, "the progress file")

    def start(self, path: Path | None, done: int, steps: int) -> None:
        """Where the results will be."""
        self._steps = steps
        self._print(" ".join([f"run={path or '-'}", f"step={done}", *([f"steps={steps}"] if steps < ENDLESS else [])]))

    def step(self, row: Row, seconds: float) -> None:
        """step=10/100 reward=0.5 kl=0.01 seconds=0.2"""
        if row["step"] % self._every == 0 or row["step"] == self._steps:
            of = f"/{self._steps}" if self._steps < ENDLESS else ""
            self._print(" ".join([f"step={row['step']}{of}", *_pairs(row, self.names), f"seconds={seconds:.3g}"]))

    def finish(self, summary: Summary) -> None:
        """One line for each thing worth knowing at the end."""
        for name, value in summary_rows(summary, self.names):
            self._print(f"{name.replace(' ', '_')}={value}")

    def _print(self, line: str) -> None:
        print(printable(line), file=self._file or sys.stdout, flush=True)


class Live:
    """A bar with step, reward, KL, speed and time left, and a table at the end."""

    names: Sequence[str] = SHOWN

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[speed]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task: Any = None

    def start(self, path: Path | None, done: int, steps: int) -> None:
        """Where the results will be, then the bar."""
        from rich.text import Text

        if path is not None:
            self._console.print(Text(printable(path)))
        self._bar.start()
        self._task = self._bar.add_task("", total=steps if steps < ENDLESS else None, completed=done, speed="")

    def step(self, row: Row, seconds: float) -> None:
        """Move the bar."""
        text = printable(" ".join(_pairs(row, self.names)))
        self._bar.update(self._task, completed=row["step"], description=text, speed=f"{1 / max(seconds, 1e-9):.3g}/s")

    def finish(self, summary: Summary) -> None:
        """The table."""
        from rich.table import Table
        from rich.text import Text

        self.close()
        table = Table(show_header=False)
        for name, value in summary_rows(summary, self.names):
            table.add_row(Text(name), Text(printable(value)))
        self._console.print(table)

    def close(self) -> None:
        """Give the terminal back."""
        self._bar.stop()


def summary_rows(summary: Summary, names: Sequence[str] = SHOWN) -> list[tuple[str, str]]:
    """What is worth knowing at the end, and where the results are."""
    rows = [("ended", summary.reason), *([("why", summary.why)] if summary.why else [])]
    rows += [("steps", str(summary.step)), ("seconds", f"{summary.seconds:.1f}")]
    rows += [("time", in_words(summary.time_split))] if summary.time_split else []
    rows += [tuple(pair.split("=", 1)) for pair in _pairs(summary.metrics, names)]  # type: ignore[misc]
    rows += [(f"event {name}", str(count)) for name, count in sorted(summary.events.items())]
    rows.append(("checkpoint", str(summary.checkpoint.name) if summary.checkpoint else "none"))
    if summary.folder is None:
        return rows
    files = {"curve": summary.folder / "curve.png", "video": summary.folder / "video.mp4"}
    rows += [(name, str(path)) for name, path in files.items() if path.exists()]
    return [*rows, ("results", str(summary.folder))]


def _pairs(row: Row, names: Sequence[str]) -> list[str]:
    found = [name for name in dict.fromkeys(names) if row.get(name) is not None]
    return [f"{name}={_short(row[name])}" for name in found]


def _short(value: float) -> str:
    """Counts whole, measurements to four digits."""
    return f"{value:.0f}" if abs(value) >= 1000 and float(value).is_integer() else f"{value:.4g}"
