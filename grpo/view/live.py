"""What changed since the last look, as events for the page."""

from __future__ import annotations

from typing import Any

from grpo.run.folder import Row
from grpo.run.inside import Gone
from grpo.view.files import shown
from grpo.view.library import Library

Events = list[tuple[str, Any]]


class Watch:
    """One page that looks at one run, or at the list of all."""

    def __init__(self, library: Library, run: str | None) -> None:
        self._library, self._run = library, run
        self.over = False
        """Nothing more will come."""
        self._step: float = -1.0
        self._generation = 0
        self._sampled = -1
        self._status: Row | None = None
        self._lines: dict[str, Row] = {}

    def hello(self) -> Events:
        """Where things stand; raises what `Library.answer` raises."""
        if self._run is None:
            self._lines = self._list()
            return [("hello", {})]
        with self._library.lock:
            run = self._library.run(self._run)
            self._step, self._generation = run.metrics.step or -1, run.metrics.generation
            self._sampled = max(run.sample_steps(), default=-1)
            self._status = run.live()
        return [("hello", {"generation": self._generation, "step": run.metrics.step}), ("status", self._status)]

    def poll(self) -> Events:
        """What is new."""
        try:
            return self._listed() if self._run is None else self._watched(self._run)
        except (Gone, LookupError, FileNotFoundError):
            self.over = True
            return [("gone", {})]
        except Exception:
            return []  # being written, or damaged: the page says so when it asks

    def _watched(self, name: str) -> Events:
        events: Events = []
        with self._library.lock:
            run = self._library.run(name)
            if run.metrics.generation != self._generation:
                self._generation = run.metrics.generation
                self._step, self._sampled = run.metrics.step or -1, max(run.sample_steps(), default=-1)
                events.append(("reset", {"generation": self._generation}))
            elif run.metrics.step is not None and run.metrics.step > self._step:
                table = run.table(run.metrics, self._step, 2000, None)
                timing = {column: shown(value) for column, value in run.timing.last().items()}
                events.append(("metrics", table | {"timing": timing}))
                self._step = run.metrics.step
            newest = max(run.sample_steps(), default=-1)
            if newest > self._sampled:
                self._sampled = newest
                events.append(("samples", {"step": newest}))
            status = run.live()
        if _still(status) != _still(self._status):
            events.append(("status", status))
        self._status = status
        return events

    def _listed(self) -> Events:
        lines = self._list()
        events: Events = [("runs", {})] if lines.keys() != self._lines.keys() else []
        events += [("status", line) for run, line in lines.items() if run in self._lines and line != self._lines[run]]
        self._lines = lines
        return events

    def _list(self) -> dict[str, Row]:
        return {line["run"]: line for line in self._library.answer("/api/runs")["runs"]}


def _still(status: Row | None) -> Row:
    """Without what changes all the time."""
    loud = ("memory", "updated")
    warned = [item["code"] for item in (status or {}).get("warnings", ())]
    return {name: value for name, value in (status or {}).items() if name not in (*loud, "warnings")} | {
        "codes": warned
    }
