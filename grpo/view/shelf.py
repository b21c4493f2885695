"""Which runs there are below a folder, those that were looked at last, and what several differ in."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.run.folder import Row
from grpo.view.patience import Patience
from grpo.view.runs import Run, run_id

DEPTH = 3
"""How deep below the runs folder a run may lie."""
MOST_RUNS = 5_000


def find_runs(root: Path, only: str | None = None) -> tuple[dict[str, str], list[str]]:
    """Id → path relative to `root` of every run below it, and what was left out."""
    found: dict[str, str] = {}
    linked = 0
    waiting = [("", 0)] if only is None else []
    if only is not None and os.path.exists(root / only / "run.json"):
        found[run_id(only)] = only
    while waiting and len(found) < MOST_RUNS:
        path, depth = waiting.pop()
        try:
            with os.scandir(root / path) as entries:
                inside = list(entries)
        except OSError:
            continue
        if path and any(entry.name == "run.json" for entry in inside):
            found[run_id(path)] = path
        elif depth < DEPTH:
            for entry in inside:
                inner = f"{path}/{entry.name}" if path else entry.name
                if entry.is_symlink():
                    linked += os.path.exists(os.path.join(entry.path, "run.json"))
                elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    waiting.append((inner, depth + 1))
    notes = [f"{linked} left out: links that leave the runs folder are not followed"] if linked else []
    return found, notes


class Shelf:
    """The runs that were looked at last; columns of a run that nobody looks at are let go."""

    def __init__(self, root: Path, only: str | None = None, cells: int = 8_000_000) -> None:
        self.root, self._only, self._cells = root, only, cells
        self._open: OrderedDict[str, Run] = OrderedDict()
        self._lines: dict[str, tuple[tuple[Any, ...], Row]] = {}

    def find(self) -> tuple[dict[str, str], list[str]]:
        """Which runs there are now."""
        return find_runs(self.root, self._only)

    def run(self, run: str, path: str | None = None) -> Run:
        """An open run, or one that is there now; `path` where it is known: looking for it goes through all."""
        if run not in self._open:
            path = path or self.find()[0].get(run)
            if path is None:
                raise LookupError(f"there is no run {run!r:.120}")
            self._open[run] = Run(self.root, run, path)
        self._open.move_to_end(run)
        self._let_go()
        return self._open[run]

    def forget(self, run: str) -> None:
        """A run that is no longer there."""
        self._open.pop(run, None)
        self._lines.pop(run, None)

    def line(self, run: str, path: str, patience: Patience) -> Row:
        """A run's line in the list; read again only when something of it changed, and in part if time is up."""
        mark = tuple(
            _mark(self.root / path / name)
            for name in ("metrics.jsonl", "timing.jsonl", "events.jsonl", "status.json", "config.json")
        )
        kept = self._lines.get(run)
        if kept is not None and kept[0] == mark and kept[1]["state"] != "running":
            return kept[1]
        if kept is None and not patience.more():
            return self.run(run, path).line(read=False)
        self._lines[run] = mark, self.run(run, path).line()
        return self._lines[run][1]

    def _let_go(self) -> None:
        while len(self._open) > 1 and sum(self._size(run) for run in self._open.values()) > self._cells:
            self._open.popitem(last=False)

    @staticmethod
    def _size(run: Run) -> int:
        return sum(len(series) * (1 + len(series.columns)) for series in (run.metrics, run.timing))


def compare(runs: Sequence[Run]) -> Row:
    """What several runs differ in, and which differ by nothing but their seed."""
    settings = [run.settings() for run in runs]
    keys = sorted({key for one in settings for key in one})
    different = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
    plain = [key for key in keys if not re.search(r"(^|\.)(seed|name|logdir|output_dir|run_name|steps|project)$", key)]
    alike: dict[str, list[str]] = {}
    for run, one in zip(runs, settings, strict=True):
        alike.setdefault(repr([(key, one.get(key)) for key in plain]), []).append(run.id)
    counts: dict[str, int] = {}
    for run in runs:
        for name in run.metrics.columns:
            counts[name] = counts.get(name, 0) + 1
    return {
        "differences": [{"key": key, "values": [one.get(key) for one in settings]} for key in different],
        "seeds": list(alike.values()),
        "metrics": [name for name, count in counts.items() if count >= min(2, len(runs))],
    }


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
