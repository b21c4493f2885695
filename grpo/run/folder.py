"""What a run leaves on disk, and the reader of it. Imports no framework: the viewer needs only this file.

run.json           schema, task, when, versions, seed, command line (secrets taken out)
config.json        the resolved settings (secrets taken out)
metrics.jsonl      one line a step, nothing that depends on the clock, null where a value is missing; older steps are
                   thinned (`keep_metrics`)
timing.jsonl       one line a step: seconds by phase; thinned alike
status.json        steps asked for, the recipe, and how it ended: no reason = it runs, or was cut
events.jsonl       what was skipped, failed or odd: named, counted; a log, never cut back; of an event that has come
                   MANY times every hundredth is written, with its count
samples/           step-00000010.jsonl (a row a try) and .npz (its per-decision arrays, float16); step-00000010-….mp4
                   or .png where rows name films of themselves: see `grpo.run.films`; thinned (`keep_samples`)
checkpoints/       step-00000010/ and the pointer `latest`: see `grpo.run.checkpoint`
curve.png · lock
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from grpo.errors import nearest, warn
from grpo.run.files import (
    DAMAGE,
    RESTORE,
    FolderError,
    Row,
    dumps,
    field,
    read_json,
    read_lines,
    write_atomic,
)
from grpo.run.inside import descriptor_inside, names_inside, open_inside, remove_inside, write_inside
from grpo.run.redaction import Redactor
from grpo.run.thinning import stays

__all__ = ["SCHEMA", "FolderError", "Row", "RunFolder", "metric_name", "number", "run_path", "versions"]

SCHEMA = 1
"""Version of the layout above. Readers refuse a newer one."""
_NUMBERS = (float, int, type(None))
_SAMPLES = re.compile(r"step-(\d{1,15})(-.*)?\.\w+")
"""A file of the samples: its step, and what a film is called besides."""
MANY = 1000
"""Events of one name of which every one is written."""


@dataclass(frozen=True)
class Elsewhere:
    """A run's folder as all ranks but the chief know it: that one alone reads and writes it."""

    path: Path
    config: Mapping[str, Any]
    """As config.json says."""


def nearest_run(path: Path) -> str:
    """ "; did you mean …?" with the run beside a path that is closest to it in name, or nothing."""
    return nearest(path, [str(path.parent / one.parent.name) for one in path.parent.glob("*/run.json")])


class RunFolder:
    """One run's folder. Opening it reads; the loop writes, holding the lock."""

    def __init__(self, path: str | os.PathLike[str], redactor: Redactor | None = None) -> None:
        self.path = Path(path)
        self.redactor = redactor or Redactor(environ=os.environ)
        self.counts: Counter[str] = Counter()
        """Events of this process, by name."""
        self._open: dict[str, int] = {}

    # --- beginning --------------------------------------------------------------------------------------------------

    @staticmethod
    def create(
        path: str | os.PathLike[str],
        *,
        task: str,
        config: Mapping[str, Any],
        created: str,
        seed: int,
        argv: Sequence[str] = (),
    ) -> RunFolder:
        """A new run's folder. Whatever is already there is left alone: only an absent or empty folder is taken."""
        path = Path(path).absolute()
        path = path.resolve() if path.is_symlink() else path  # the folder as a whole may be a link, to an empty one
        redactor = Redactor(config, argv, os.environ)
        about = {
            "schema": SCHEMA,
            "task": task,
            "created": created,
            "seed": seed,
            "versions": versions(),
            "argv": redactor.argv(argv),
        }
        # Complete under another name first, so that a folder with a run.json always has all of it.
        made = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                what = "already holds a run" if (path / "run.json").exists() else "is there already and not empty"
                ways = f" (grpo train --resume {path}, or begin anew with --overwrite)" if "holds" in what else ""
                raise FolderError(f"{path} {what}; resume it, or choose another folder{ways}")
            for name in ("samples", "checkpoints"):
                (made / name).mkdir(parents=True)
            write_atomic(made / "config.json", dumps(redactor.tree(_plain(config)), indent=2))
            write_atomic(made / "run.json", dumps(redactor.tree(about), indent=2))
            made.rename(path)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            raise FolderError(f"cannot write to {path} ({error.strerror}); choose a folder you may write to") from error
        return RunFolder(path, redactor)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> RunFolder:
        """An existing run's folder, to read or to go on with."""
        folder = RunFolder(path, Redactor(argv=sys.argv, environ=os.environ))
        if not (folder.path / "run.json").is_file():
            raise FolderError(f"{path} is no run folder: it has no run.json{nearest_run(folder.path)}")
        expect_schema(folder.about, folder.path / "run.json")
        return folder

    def write_config(self, config: Mapping[str, Any]) -> None:
        """The settings that a resumption is to start from."""
        write_inside(self.path, "config.json", dumps(self.redactor.tree(_plain(config)), indent=2))

    def carried_out_otherwise(self, config: Mapping[str, Any]) -> bool:
        """Whether these settings say something else about how the run is carried out than config.json does."""
        plan = json.loads(dumps(self.redactor.tree(_plain(config.get("run", {})))))
        return bool(plan != self.config.get("run"))

    def write_status(self, status: Mapping[str, Any]) -> None:
        """How the run is doing, for whoever looks from outside. Never raises: nothing of the run depends on it."""
        with suppress(OSError, FolderError):
            write_inside(self.path, "status.json", dumps(self.redactor.tree(_plain(status)), indent=2))

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def about(self) -> Row:
        """run.json."""
        return read_json(self.path / "run.json")

    @property
    def config(self) -> Row:
        """The settings the run was started with."""
        return read_json(self.path / "config.json")

    @property
    def status(self) -> Row:
        """How it stands, as status.json says; empty where it was never written."""
        return read_json(self.path / "status.json") if (self.path / "status.json").exists() else {}

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints live."""
        return self.path / "checkpoints"

    def metrics(self) -> list[Row]:
        """One row a step."""
        return list(self.each_step())

    def timing(self) -> list[Row]:
        """Seconds by phase, one row a step."""
        return list(self.each_step("timing.jsonl"))

    def each_step(self, name: str = "metrics.jsonl") -> Iterator[Row]:
        """The rows of a file with a line a step, one after the other: its number, and numbers by name."""
        for at, row in enumerate(read_lines(self.path / name), 1):
            field(row, "step", int, f"{self.path / name}:{at}")
            for key, value in row.items():
                if type(value) not in _NUMBERS:
                    wrong = f"{self.path / name}:{at}: {key} is {value!r:.60}, not a number"
                    raise FolderError(f"{wrong}; delete the line, or {RESTORE}")
            yield row

    def events(self) -> list[Row]:
        """What was skipped, failed or odd."""
        return list(read_lines(self.path / "events.jsonl"))

    def sample_steps(self) -> list[int]:
        """Steps whose groups were kept."""
        found = (_SAMPLES.fullmatch(path.name) for path in (self.path / "samples").glob("step-*.jsonl"))
        return sorted(int(named[1]) for named in found if named and not named[2])

    def film_steps(self) -> set[int]:
        """Steps of which there are films beside the samples."""
        found = (_SAMPLES.fullmatch(path.name) for path in (self.path / "samples").glob("step-*-*"))
        return {int(named[1]) for named in found if named and named[2]}

    def samples(self, step: int) -> tuple[list[Row], dict[str, np.ndarray]]:
        """The kept groups of one step: a row a try, and arrays with one row a try."""
        path = self.path / "samples" / f"step-{step:08d}"
        rows = list(read_lines(path.with_suffix(".jsonl")))
        with open_inside(self.path, f"samples/{path.name}.npz") as file:
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    return rows, dict(arrays)
            except DAMAGE as error:
                raise FolderError(f"{path}.npz is damaged ({error!s:.200}); {RESTORE}") from error

    # --- writing ----------------------------------------------------------------------------------------------------

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> Row:
        """One step's line. Names are made safe, what is not a finite number becomes null. Returns what was written."""
        row: Row = {"step": step}
        for name, value in metrics.items():
            row[_unused(metric_name(self.redactor.text(name)), row)] = number(value)
        self._append("metrics.jsonl", row)
        return row

    def append_timing(self, step: int, seconds: Mapping[str, float], total: float) -> None:
        """One step's seconds by phase."""
        self._append("timing.jsonl", {"step": step, "total": total, **seconds})

    def event(self, step: int, name: str, message: str, **details: Any) -> Row:
        """Log something worth knowing. Never raises: an event about a full disk must not be a second failure."""
        self.counts[name] += 1
        row = {"step": step, "event": name, "count": self.counts[name], "message": message, **details}
        row = self.redactor.tree(row)
        if self.counts[name] > MANY and self.counts[name] % 100:
            return row
        try:
            self._append("events.jsonl", row)
        except (OSError, FolderError) as error:
            self.counts["events_lost"] += 1
            if self.counts["events_lost"] == 1:
                warn(f"{self.path}/events.jsonl cannot be written ({error})")
        return row

    def alarm(self, step: int, name: str, message: str) -> None:
        """An event that a person should hear of at once, also where the folder cannot be written to."""
        told = self.event(step, name, message)
        warn(f"{self.path}: {told['message']}")

    def write_samples(
        self, step: int, rows: Sequence[Row], arrays: Mapping[str, np.ndarray], kind: str = "step"
    ) -> None:
        """Keep one step's groups to look at: `kind` is part of the file name."""
        path = f"samples/{kind}-{step:08d}"
        lines = "".join(dumps(self.redactor.tree(row)) for row in rows)
        write_inside(self.path, f"{path}.npz", lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))
        write_inside(self.path, f"{path}.jsonl", lines)  # last: a listed step is complete

    def truncate_after(self, step: int) -> None:
        """Drop what steps after `step` left, so that doing them again gives the files of an uninterrupted run."""
        self.close()
        for left in (*self.path.rglob(".*.tmp"), *self.path.rglob(".*.tmp.mp4")):  # a write that was cut
            remove_inside(self.path, str(left.relative_to(self.path)))
        self._sift(lambda row: row["step"] <= step)
        self.drop_samples(lambda at: at > step)

    def drop_samples(self, going: Callable[[int], bool]) -> None:
        """Remove groups and films of some steps."""
        for name in names_inside(self.path, "samples"):
            if (named := _SAMPLES.fullmatch(name)) and going(int(named[1])):
                remove_inside(self.path, f"samples/{name}")

    def thin_lines(self, now: int, keep: int, evaluate_every: int | None) -> int:
        """Let lines of older steps go, but for every so many; evaluations are counted by themselves. How many went."""

        def stay(row: Row) -> bool:
            judged = any(name.startswith("eval/") for name in row)
            return stays(row["step"], now, (evaluate_every if judged else None) or 1, keep)

        self.close()
        return self._sift(stay)

    def thin_samples(self, now: int, every: int, keep: int) -> int:
        """Let groups of older steps go, but for the first, every so many, and those with films. How many went."""
        staying = {1, *self.film_steps()}
        going = [step for step in self.sample_steps() if not stays(step, now, every, keep) and step not in staying]
        for step in going:
            for suffix in (".jsonl", ".npz"):  # in this order: a listed step is complete
                remove_inside(self.path, f"samples/step-{step:08d}{suffix}")
        return len(going)

    def _sift(self, stay: Callable[[Row], bool]) -> int:
        """Rewrite the files that have a line a step, line by line: they may be long. How many lines went."""
        gone = 0

        def staying(name: str) -> Iterator[bytes]:
            nonlocal gone
            for row in self.each_step(name):
                if stay(row):
                    yield dumps(row).encode()
                else:
                    gone += 1

        for name in ("metrics.jsonl", "timing.jsonl"):
            if (self.path / name).exists():
                write_inside(self.path, name, lambda file, name=name: file.writelines(staying(name)))
        return gone

    def sync(self) -> None:
        """Wait until the lines written so far are on the disk: a checkpoint must not be newer than its metrics."""
        for descriptor in list(self._open.values()):  # a copy: another thread may wait here while lines are added
            os.fsync(descriptor)

    def close(self) -> None:
        """Close the files that were appended to."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _append(self, name: str, row: Row) -> None:
        """One line in one write; a line that did not fit is taken back."""
        if name not in self._open:
            self._open[name] = descriptor_inside(self.path, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        line, descriptor = dumps(row).encode(), self._open[name]
        before = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(f"{self.path / name}: the disk took only part of a line")
        except OSError:
            os.ftruncate(descriptor, before)
            raise


# --- names, numbers, files ------------------------------------------------------------------------------------------


def run_path(root: str | os.PathLike[str], name: str) -> Path:
    """The folder for a run of this name under `root`; a name that is a path or hides itself is refused."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}", name):
        raise FolderError(f"run name {name!r:.120} is refused; use letters, digits and . _ - + = only, at most 100")
    return Path(root) / name


def metric_name(name: str) -> str:
    """A name that is safe as a tag, a key and a file name in any tracker: `rewards/length`, `clip_ratio/low_mean`."""
    parts = [re.sub(r"[^A-Za-z0-9_.@=+-]", "_", part) for part in name.split("/")]
    parts = [part if part.strip(".") else "_" * len(part) for part in parts if part]
    return "/".join(parts)[:100].rstrip("/") or "_"


def _unused(name: str, row: Row) -> str:
    """`name`, or `name_2`, … where two names became the same."""
    tries = (name if n == 1 else f"{name}_{n}" for n in range(1, len(row) + 2))
    return next(candidate for candidate in tries if candidate not in row)


def number(value: Any) -> float | None:
    """A finite float, else None: JSON has no NaN."""
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else None


@cache
def versions() -> dict[str, str]:
    """Versions a result depends on; our own as the code has it, since what an editable install says may be older."""
    found = {"python": platform.python_version(), "anygrpo": str(vars(sys.modules["grpo"])["__version__"])}
    for package in ("torch", "numpy", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def expect_schema(about: Mapping[str, Any], path: Path) -> None:
    """Refuse what a newer version wrote."""
    schema = about.get("schema")
    if not isinstance(schema, int):
        raise FolderError(f"{path} names no schema version; it was not written by this library")
    if schema > SCHEMA:
        raise FolderError(
            f"{path} was written by a newer version (schema {schema}, this one reads up to {SCHEMA}); "
            "pip install -U anygrpo"
        )


def _plain(tree: Any) -> Any:
    """Settings as JSON-able values; what JSON does not know (paths, enums) as text."""
    return json.loads(json.dumps(tree, default=str))
