"""What a person sees meanwhile: a live line on a terminal or in a notebook, else one `key=value` line a step."""

from __future__ import annotations

import os
import shlex
import sys
import unicodedata
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, runtime_checkable

from grpo.run.config import ENDLESS
from grpo.run.folder import Row
from grpo.run.output import Steady
from grpo.run.redaction import Redactor
from grpo.run.signals import INTERRUPTED, PREEMPTED
from grpo.run.timing import in_words

if TYPE_CHECKING:
    from grpo.run.loop import Summary

SHOWN = ("reward", "kl", "teacher_kl", "entropy", "grad_norm")
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
    if console.is_jupyter and find_spec("ipywidgets") is None:  # rich would show a warning and nothing else
        return Plain()
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
        place = "-" if path is None else path.absolute()
        self._print(" ".join([f"run={place}", f"step={done}", *([f"steps={steps}"] if steps < ENDLESS else [])]))

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


WORDS = {"warm_start": "warm start", "evaluate": "evaluating", "checkpoint": "saving", "closing": "drawing"}
"""What takes its time beside steps, in words."""


@runtime_checkable
class ShowsPhases(Protocol):
    """Told, too, what takes its time beside steps."""

    def phase(self, name: str) -> None: ...


class Live:
    """One line that fits: step, bar, headline number, time left, what else there is room for; a table at the end."""

    names: Sequence[str] = SHOWN

    def __init__(self, console: Any) -> None:
        from rich.progress import Progress, ProgressColumn, TextColumn
        from rich.text import Text

        class Fitted(ProgressColumn):
            """The line as wide as the terminal is."""

            def render(_, task: Any) -> Any:
                """Of the last step, or of what is going on."""
                left = None if task.time_remaining is None else float(task.time_remaining)
                return Text(self.line(console.width, left), no_wrap=True, overflow="ellipsis")

        self._console, self._steps, self._phase, self._over = console, 0, "", False
        self._row: Row = {}
        columns = [Fitted()] if console.is_terminal else [TextColumn("{task.description}", markup=False)]
        self._bar = Progress(*columns, console=console, refresh_per_second=4)
        self._task: Any = None

    def start(self, path: Path | None, done: int, steps: int) -> None:
        """Where the results will be, then the bar."""
        from rich.text import Text

        if path is not None:
            self._console.print(Text(printable(path.absolute())))
        self._steps, self._row = steps, {"step": done}
        self._bar.start()
        self._task = self._bar.add_task("", total=steps if steps < ENDLESS else None, completed=done)

    def phase(self, name: str) -> None:
        """What goes on now; empty: nothing in particular."""
        self._phase = WORDS.get(name, "")
        self._over = self._over or name == "closing"

    def step(self, row: Row, seconds: float) -> None:
        """Move the bar."""
        self._row = dict(row)
        self._bar.update(self._task, completed=row["step"], description=self.line(self._console.width, None))

    def line(self, width: int, left: float | None) -> str:
        """What there is to say, the most important first, in at most `width` columns."""
        step, endless = self._row.get("step", 0), self._steps >= ENDLESS
        first, *rest = self._numbers() or ["first step …"]
        bar, wide = "", 20 if width >= 80 else 8
        if not endless:
            full = round(wide * min(step / max(self._steps, 1), 1.0))
            bar = "━" * full + "─" * (wide - full)
        going = [self._phase] if self._phase else []
        left = None if self._over or step >= self._steps else left
        time = [f"{int(left) // 3600}:{int(left) // 60 % 60:02d}:{int(left) % 60:02d} left"] if left is not None else []
        parts = [f"step {step}" if endless else f"step {step}/{self._steps}", bar, first, *time]
        line = "  ".join(part for part in parts if part)
        for part in [*going, *rest]:
            if len(line) + 2 + len(part) > width - 1:
                break
            line = f"{line}  {part}"
        return line

    def _numbers(self) -> list[str]:
        """Metrics of the last step, what was evaluated in front."""
        judged = [name for name in self.names if name.startswith("eval/")]
        return [printable(pair) for pair in _pairs(self._row, [*self.names[:1], *judged, *self.names])]

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
        """Give the terminal back, with a line that no time is left of."""
        self._over = True
        self._bar.stop()


AFTER = {
    "view": "look at curves and groups in the browser",
    "eval": "try it on what it has not seen",
    "chat": "talk to it",
    "export": "write it for other programs",
}
"""What commands make of a run's folder."""


def summary_rows(summary: Summary, names: Sequence[str] = SHOWN) -> list[tuple[str, str]]:
    """What happened, what is worth knowing of it, where the results are, and what to do with them."""
    notes = [("warning" if note.startswith("nothing was learned") else "note", note) for note in summary.notes]
    ended = [("ended", summary.outcome)]
    ended += [("why", summary.why.removeprefix(f"{summary.outcome}: "))] if summary.why else []
    if summary.folder is None:
        kept = ("not kept", "folder='runs/mine' keeps it, with a curve and groups to look at")
        return [*(ended if summary.why else []), *notes, kept]
    rows = [*ended, *notes]
    rows += [("steps", str(summary.step)), ("seconds", f"{summary.seconds:.1f}")]
    rows += [("time", in_words(summary.time_split))] if summary.time_split else []
    rows += [tuple(pair.split("=", 1)) for pair in _pairs(summary.metrics, names)]  # type: ignore[misc]
    rows.append(("checkpoint", str(summary.checkpoint.name) if summary.checkpoint else "none"))
    files = {"curve": summary.folder / "curve.png", "video": summary.folder / "video.mp4"}
    rows += [(name, str(path.absolute())) for name, path in files.items() if path.exists()]
    place = shlex.quote(_near(summary.folder))
    if summary.reason not in (INTERRUPTED, PREEMPTED):  # what comes next then is going on
        for command, _, needs in (word.partition(" ") for word in summary.after):
            rows.append(("next", f"grpo {command} {place}   {AFTER[command]} {needs}".rstrip()))
        rows += [("next", summary.instead)] if summary.instead else []
    return [*rows, ("results", str(summary.folder.absolute()))]


def _near(path: Path) -> str:
    """The path as one would type it from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else str(path)


def _pairs(row: Row, names: Sequence[str]) -> list[str]:
    """Those that were measured; a reward that is the return is told once."""
    found = [name for name in dict.fromkeys(names) if row.get(name) is not None]
    shown = {name: _short(row[name]) for name in found}
    return [f"{name}={text}" for name, text in shown.items() if name != "reward" or shown.get("return") != text]


def _short(value: float) -> str:
    """Counts whole, measurements to four digits."""
    return f"{value:.0f}" if abs(value) >= 1000 and float(value).is_integer() else f"{value:.4g}"
