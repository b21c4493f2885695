"""One run: how it is doing, and what the page shows of it."""

from __future__ import annotations

import os
import re
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo.run.folder import SCHEMA, FolderError, Row
from grpo.run.inside import Gone, names_inside, open_inside
from grpo.run.timing import time_split
from grpo.view.about import key_of
from grpo.view.advice import endings, warnings
from grpo.view.files import Stamp, Tail, finite, read_object, shown, shown_all, stamp
from grpo.view.objective import describe
from grpo.view.panels import headline, panels
from grpo.view.process import holder, resident_gib
from grpo.view.series import Series
from grpo.view.verdict import looked_at, verdict

MOST_EVENTS = 10_000
STOPPED = ("stopped", "interrupted", "preempted")
ENDINGS = {"done": "finished", **dict.fromkeys(STOPPED, "stopped")}
"""State by reason; any other reason is a crash."""
MEDIA = {".mp4": "video", ".webm": "video", ".png": "image", ".jpg": "image", ".jpeg": "image", ".gif": "image"}
ENDLESS = 10**8
"""A plan of so many steps is none: the run ends by other means."""
QUIET = 10.0
"""Seconds without a line after which a run whose process cannot be seen counts as ended, at least."""


def run_id(path: str) -> str:
    """A relative path as one part of a URL: every other character as ~XX."""
    keep = re.compile(rb"[A-Za-z0-9._+=-]")
    raw = path.encode(errors="surrogateescape")
    return "".join(chr(b) if keep.fullmatch(bytes([b])) else f"~{b:02X}" for b in raw)


class Run:
    """One run's folder, read as it grows."""

    def __init__(self, root: Path, run: str, path: str) -> None:
        self.root, self.id, self.path = root, run, path
        self.metrics = Series(root, f"{path}/metrics.jsonl")
        self.timing = Series(root, f"{path}/timing.jsonl")
        self._events = Tail(root, f"{path}/events.jsonl", spread=False)
        self.events: list[Row] = []
        self._objects: dict[str, tuple[Stamp, Row]] = {}
        self._steps: list[int] = []
        self._changed, self._listed = -1, 0.0

    # --- files ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what is new."""
        if not os.path.exists(self.root / self.path / "run.json"):
            raise Gone(f"the run {self.path} is no longer there: deleted or moved")
        self.metrics.refresh()
        self.timing.refresh()
        events = deque(self.events, MOST_EVENTS)
        if self._events.grow(events.append) is None:
            events.clear()
            self._events.grow(events.append)
        self.events = list(events)

    def object(self, name: str) -> Row:
        """A JSON file of the run, kept until it changes; empty where it is missing."""
        path = f"{self.path}/{name}"
        try:
            with open_inside(self.root, path) as file:
                now = stamp(file)
        except Gone:
            return {}
        if name not in self._objects or self._objects[name][0] != now:
            self._objects[name] = now, read_object(self.root, path)
        return self._objects[name][1]

    @property
    def about(self) -> Row:
        """run.json, refused where a newer version wrote it."""
        about = self.object("run.json")
        schema = about.get("schema")
        if not isinstance(schema, int):
            raise FolderError(f"{self.path}/run.json names no schema version; it was not written by this library")
        if schema > SCHEMA:
            raise FolderError(f"{self.path} was written by a newer version (schema {schema}); pip install -U anygrpo")
        return about

    @property
    def task(self) -> str:
        """language, control, …"""
        return _text(self.about.get("task")) or "unknown"

    def settings(self) -> Row:
        """Every setting by its dotted path: as resolved, where the folder says so."""
        config = self.object("config.json")
        resolved = config.get("resolved")
        return (
            dict(resolved)
            if isinstance(resolved, dict)
            else _flat({k: v for k, v in config.items() if k != "resolved"})
        )

    def recipe(self) -> Row:
        """The columns of the algorithm, by name; none where the files that say so are damaged."""
        try:
            told = self.object("status.json").get("recipe")
            settings = {} if isinstance(told, dict) else self.settings()
        except FolderError:
            return {}
        if isinstance(told, dict):
            return told
        columns = {
            name.removeprefix("algorithm."): value for name, value in settings.items() if name.startswith("algorithm.")
        }
        return {"name": settings.get("task.loss_type"), **columns}

    def sample_steps(self) -> list[int]:
        """Steps whose groups were kept."""
        try:
            changed = os.stat(self.root / self.path / "samples", follow_symlinks=False).st_mtime_ns
        except OSError:
            return []
        # Two files can come within one tick of the clock: a fresh listing is not trusted for long.
        settled, recent = self._listed > changed / 1e9 + 2.0, time.time() - self._listed < 0.5
        if self._changed != changed or not (settled or recent):
            names = names_inside(self.root, f"{self.path}/samples")
            found = [re.fullmatch(r"step-(\d{8}|[1-9]\d{8})\.jsonl", name) for name in names]
            self._steps = sorted(int(match[1]) for match in found if match)
            self._changed, self._listed = changed, time.time()
        return self._steps

    def has_samples(self, step: int) -> bool:
        """Whether this step is one of them."""
        steps = self.sample_steps()
        place = bisect_left(steps, step)
        return place < len(steps) and steps[place] == step

    # --- how it is doing --------------------------------------------------------------------------------------------

    def summary(self, read: bool = True) -> Row:
        """The line of the list; without `read`, what can be said before any curve was read."""
        try:
            if read:
                self.refresh()
            about, settings, status = self.about, self.settings(), self.object("status.json")
        except Gone:
            raise
        except FolderError as error:
            return self._unreadable(str(error))
        state, reason = self._state(status)
        ending = self._ending(settings) if reason == "stopped" else None
        name = self._score_name(settings)
        argv = [_text(word) or "" for word in about.get("argv") or ()] if isinstance(about.get("argv"), list) else []
        return {
            "run": self.id,
            "name": self.path,
            "task": self.task,
            "created": _text(about.get("created")),
            "seed": about.get("seed") if isinstance(about.get("seed"), int) else None,
            "preset": _preset(argv),
            "model": next(
                (text for key in ("model", "env", "task.model", "task.env") if (text := _text(settings.get(key)))), None
            ),
            "loss_type": _text(self.recipe().get("name")),
            "state": "finished" if ending else state,
            "reason": reason,
            "ending": ending,
            "resumed": sum(row.get("event") == "resumed" for row in self.events),
            "step": self.metrics.step,
            "steps": self._planned(status, settings),
            "updated": self._updated(),
            "score": self._score(name),
            "spark": self._spark(name),
            "error": None,
        }

    def _unreadable(self, why: str) -> Row:
        empty = dict.fromkeys(
            ("created", "seed", "preset", "model", "loss_type", "reason", "ending", "step", "steps", "score", "spark")
        )
        return {
            "run": self.id,
            "name": self.path,
            "task": "unknown",
            **empty,
            "state": "unreadable",
            "resumed": 0,
            "updated": self._updated(),
            "error": why,
        }

    def live(self) -> Row:
        """What changes while it trains: rate, time left, memory, warnings."""
        summary = self.summary()
        if summary["state"] == "unreadable":
            return summary
        rate, eta = self._rate(), None
        if rate is not None and summary["steps"] and summary["step"] is not None and summary["state"] == "running":
            eta = shown(max(summary["steps"] - summary["step"], 0) * rate)
        return summary | {
            "seconds_per_step": None if rate is None else shown(rate),
            "eta_seconds": eta,
            "elapsed_seconds": shown(self.timing.values("total").sum()),
            "memory": self._memory(summary["state"]),
            **self._judged(summary),
        }

    def line(self, read: bool = True) -> Row:
        """The line of the list, with whether it learned and how many warnings there are."""
        summary = self.summary(read)
        if not read or summary["state"] == "unreadable":
            return summary | {"verdict": None, "troubles": 0}
        judged = self._judged(summary)
        return summary | {name: judged[name] for name in ("verdict", "troubles")}

    def _judged(self, summary: Row) -> Row:
        """Whether it learns, what is wrong, and what was looked at."""
        # What arms pay may change during a run: regret is judged against what they pay then.
        imagined = self.task == "worldmodel"  # whose reward says what it dreams of
        names = ["-regret", self._score_name(self.settings()), "return", "" if imagined else "reward"]
        reached = str(summary["ending"]).startswith("reached")
        found = verdict(self.metrics, [name for name in names if name], summary["state"] == "running", reached)
        ended = self.object("status.json").get("error") if summary["state"] == "crashed" else None
        if ended is None and summary["reason"] == "failures":
            failed = [row.get("message") for row in self.events if row.get("event") == "samples_failed"]
            ended = failed[-1] if failed else None
        learned = found is not None and found["way"] == "up"
        told = [
            *endings(summary, self._rate(), _text(ended), self.object_text("checkpoints/latest") is not None),
            *warnings(self.metrics, self.task, self.events, self.recipe(), learned, reached),
        ]
        serious, checks = [one for one in told if one["level"] != "info"], looked_at(self.metrics, self.task, told)
        return {"warnings": told, "troubles": len(serious), "verdict": found, "checks": checks}

    def detail(self) -> Row:
        """Everything the page shows of one run but its curves and groups."""
        live = self.live()
        if live["state"] == "unreadable":
            return live
        about, steps = self.about, self.sample_steps()
        damaged = {
            "metrics.jsonl": self.metrics.damaged,
            "timing.jsonl": self.timing.damaged,
            "events.jsonl": self._events.damaged,
        }
        names, weights = self.rewards()
        return live | {
            "argv": about.get("argv"),
            "versions": about.get("versions"),
            "headline": headline(self.metrics.columns),
            "panels": panels(self.metrics.columns),
            "sample_steps": {
                "count": len(steps),
                "first": steps[0] if steps else None,
                "last": steps[-1] if steps else None,
                "list": steps[-20_000:],
            },
            "time_split": self._time_split(),
            "objective": describe(self.recipe()),
            "reward_names": names,
            "reward_weights": weights,
            "files": self._files(),
            "events": {"count": len(self.events), "last": self.events[-20:]},
            "notes": [f"{name}: {count} damaged lines were passed over" for name, count in damaged.items() if count]
            + [f"metrics.jsonl: {note}" for note in self.metrics.notes]
            + [f"timing.jsonl: {note}" for note in self.timing.notes]
            + ["events.jsonl: it is very long: only its end is shown"] * self._events.thinned,
        }

    def rewards(self) -> tuple[list[str], list[float] | None]:
        """Names of the reward functions as the metrics have them, and their weights; None: all 1."""
        names = [found[1] for name in self.metrics.columns if (found := re.fullmatch(r"rewards/(.+)/std", name))]
        weights = self.recipe().get("reward_weights")
        numbers = [w for w in map(finite, weights) if w is not None] if isinstance(weights, list) else []
        return names, numbers or None

    def table(self, series: Series, after: float | None, points: int, names: Sequence[str] | None) -> Row:
        """Curves, with the entry of the documentation that explains each."""
        table = series.table(after, points, names)
        keys = {name: key for name in table["columns"] if (key := key_of(name)) is not None}
        return table | {"about": keys, "clock": shown_all(self._clock(np.array(table["step"], float)))}

    def _clock(self, steps: np.ndarray) -> np.ndarray:
        """Seconds of training by the end of each step; steps whose line was thinned out took as long as the next."""
        at = np.array(self.timing.steps)
        total = np.array(self.timing.columns.get("total", ()))
        known = np.isfinite(total)
        if not known.any():
            return np.full(len(steps), np.nan)
        at, total = at[known], total[known]
        passed = np.cumsum(total * np.maximum(np.diff(at, prepend=0.0), 0.0))
        return np.interp(steps, at, passed, left=np.nan)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _state(self, status: Mapping[str, Any]) -> tuple[str, str | None]:
        """Running, or how it ended. The lock is only looked at: taking it could turn away a run that starts."""
        reason = _text(status.get("reason"))
        if holder(self.root, f"{self.path}/lock") is not None:
            return "running", None
        if reason is not None:
            return ENDINGS.get(reason, "crashed"), reason
        patience = max(QUIET, 3 * (self._rate() or 0.0))
        if time.time() - (self._updated() or 0.0) < patience:  # it may be training on another machine
            return "running", None
        done, planned = self.metrics.step, self._planned(status, self.settings())
        if "recipe" not in status and done is not None:  # an older folder does not say how it ended
            if planned is not None and done >= planned:
                return "finished", "done"
            latest = self.object_text("checkpoints/latest")
            if latest is not None and latest.strip().endswith(f"{done:08d}"):
                return "stopped", None
        return "crashed", None

    def _rate(self) -> float | None:
        """Seconds that a step takes now, usually."""
        seconds = self.timing.values("total", 20)
        return float(statistics.median(seconds)) if len(seconds) else None

    def _ending(self, settings: Mapping[str, Any]) -> str | None:
        """What a run that ended early was asked to reach, if that is why."""
        best = _text(settings.get("run.best_by")) or "reward"
        metric, sign = best.removeprefix("-"), -1.0 if best.startswith("-") else 1.0
        for name, aim, way, said in (
            (metric, finite(settings.get("run.stop_at")), sign, f"reached {metric.removeprefix('eval/')} {{}}"),
            ("env_steps", finite(settings.get("run.env_steps")), 1.0, "made {} environment steps"),
        ):
            last = self.metrics.values(name, 1)
            if aim is not None and len(last) and way * last[-1] >= way * aim:
                return said.replace("{}", f"{aim:,.10g}")
        return None

    def object_text(self, name: str) -> str | None:
        """A small text file of the run; None where there is none."""
        try:
            with open_inside(self.root, f"{self.path}/{name}") as file:
                return file.read(200).decode(errors="replace")
        except FolderError:
            return None

    def _memory(self, state: str) -> Row | None:
        """Of the training process: its resident memory while it runs here, its GPU's as it told."""
        last, found = self.timing.last(), {}
        pid = holder(self.root, f"{self.path}/lock") if state == "running" else None
        if pid is not None and (resident := resident_gib(pid)) is not None:
            found["host_gib"] = shown(resident)
        for key, name in (("host_gib", "memory/host_gib"), ("gpu_gib", "memory/gpu_gib"), ("kv_gib", "engine/kv_gib")):
            if name in last:
                found.setdefault(key, shown(last[name]))
        return found or None

    def _updated(self) -> float | None:
        times = []
        for name in ("metrics.jsonl", "timing.jsonl", "events.jsonl", "status.json", "run.json"):
            try:
                times.append(os.stat(self.root / self.path / name, follow_symlinks=False).st_mtime)
            except OSError:
                continue
        return max(times, default=None)

    def _planned(self, status: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
        for value in (status.get("steps"), settings.get("run.steps")):
            if isinstance(value, int) and not isinstance(value, bool) and value < ENDLESS:
                return value
        return None

    def _score_name(self, settings: Mapping[str, Any]) -> str | None:
        names = (
            _text(settings.get("run.best_by")),
            "eval/accuracy",
            "eval/return",
            "return",
            "reward",
            "-regret_total",
        )
        return next((name for name in names if name and len(self.metrics.values(name.removeprefix("-")))), None)

    def _spark(self, name: str | None) -> Row | None:
        """The shape of its score; of what was measured more than once, if that was not."""
        names = ((name or "").removeprefix("-"), "return", "reward")
        drawn = next((one for one in names if len(self.metrics.values(one)) > 1), None)
        return None if drawn is None else {"name": drawn, "values": self.metrics.spark(drawn)}

    def _score(self, name: str | None) -> Row | None:
        if name is None:
            return None
        lower, metric = name.startswith("-"), name.removeprefix("-")
        column = np.array(self.metrics.columns[metric])
        known = np.flatnonzero(np.isfinite(column))
        best = known[(column[known].argmin() if lower else column[known].argmax())]
        return {
            "name": metric,
            "best": shown(column[best]),
            "step": int(self.metrics.steps[best]),
            "last": shown(column[known[-1]]),
            "lower_is_better": lower,
        }

    def _time_split(self) -> dict[str, Any]:
        """Of the last 200 steps."""
        rows = [{} for _ in range(min(len(self.timing), 200))]  # type: list[dict[str, float]]
        for name, column in self.timing.columns.items():
            for row, value in zip(rows, column[-len(rows) :] if rows else (), strict=True):
                if np.isfinite(value):
                    row[name] = value
        return {name: shown(share) for name, share in time_split([row for row in rows if "total" in row]).items()}

    def _files(self) -> list[Row]:
        found = []
        for name in sorted(names_inside(self.root, self.path)):
            kind = MEDIA.get(os.path.splitext(name)[1].lower())
            path = self.root / self.path / name
            if kind and path.is_file() and not path.is_symlink():
                found.append(
                    {"name": name, "kind": kind, "url": f"media/{self.id}/{run_id(name)}", "bytes": path.stat().st_size}
                )
        return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Row:
    found: Row = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _preset(argv: Sequence[str]) -> str | None:
    """`grpo train gsm8k dr_grpo --beta …`: the words after the command."""
    if "train" not in argv:
        return None
    words = list(argv[list(argv).index("train") + 1 :])
    named = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return " ".join(words[:named]) or None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
