"""Cells: one measurement, one JSON file; what has been measured stays, what failed is tried again.

    FOLDER/CELL.json    settings, raw figures, versions, machine; or `error`
    FOLDER.json         all of them, made from these files

A job is a process that measures several cells, for loading a model takes longer than measuring it. It writes every cell
as soon as it is measured, so that whatever ends it (a crash, a hang, Ctrl-C, a machine that is taken away) costs the
cell it was at.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]

BEGUN = "it was begun and did not end"
LIMIT = 240.0
"""Seconds that a job may take to start, and then for each cell."""
TAIL = 30
"""Lines of a failed job's output that are shown."""


# --- files -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Found | None:
    """What is in a cell's file; None: nothing that could be used."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write(path: Path, found: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def measured(found: Found | None, settings: Mapping[str, Any]) -> bool:
    """Whether a file holds the figures of these settings."""
    return found is not None and "error" not in found and found["settings"] == settings


def fail(path: Path, settings: Mapping[str, Any], run: str, error: str) -> None:
    """Note what went wrong; figures that are there for the same settings stay."""
    found = read(path)
    if measured(found, settings):
        write(path, {**found, "failed_since": error})  # type: ignore[dict-item]
    else:
        write(path, {"cell": path.stem, "settings": dict(settings), "run": run, "error": error})


def merge(folder: Path) -> dict[str, Found]:
    """All cells of a folder by name, and the one file with all of them."""
    found = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    cells = {name: cell for name, cell in found.items() if cell is not None}
    write(folder.with_suffix(".json"), {"cells": cells})
    return cells


# --- inside a job ----------------------------------------------------------------------------------------------------


def job() -> dict[str, Any]:
    """What this process was asked for. It ends with the one that asked, however that ends."""
    with contextlib.suppress(AttributeError, OSError):  # where there is such a thing: Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def measure(asked: Mapping[str, Any], figures: Callable[[dict[str, Any]], Found]) -> None:
    """Each cell's figures into its file, or what went wrong; none is begun after the job's time."""
    for cell in asked["cells"]:
        if asked["until"] is not None and time.time() > asked["until"]:
            return
        path = Path(asked["results"]) / f"{cell['name']}.json"
        fail(path, cell["settings"], asked["run"], BEGUN)
        try:
            found = figures(cell)
        except Exception as error:
            fail(path, cell["settings"], asked["run"], line(f"{type(error).__name__}: {error}"))
            print(f"{cell['name']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        about = {"cell": cell["name"], "settings": cell["settings"], "run": asked["run"]}
        write(path, {**about, "versions": versions(), "machine": machine(asked["device"]), **found})


def line(text: str) -> str:
    """An error in one line."""
    return " ".join(text.split())[:300]


def versions() -> dict[str, str]:
    """Of everything that bears on a figure and is there."""
    import platform
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "trl", "vllm", "accelerate", "datasets"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine(device: str) -> dict[str, Any]:
    """Which GPU, or how many threads of what."""
    import platform

    import torch

    if device != "cuda":
        return {"cpu": platform.machine(), "threads": torch.get_num_threads()}
    about = torch.cuda.get_device_properties(0)
    return {
        "gpu": about.name,
        "uuid": str(getattr(about, "uuid", "")),
        "memory_gib": about.total_memory / 2**30,
        "cuda": torch.version.cuda,
    }


def peak(device: str) -> dict[str, float]:
    """Gigabytes: the most that this process has held, and what the device has in use."""
    import torch

    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "device_in_use_gib": (total - free) / 2**30,
    }


# --- around a job ----------------------------------------------------------------------------------------------------


def run_job(
    script: Path,
    asked: dict[str, Any],
    *,
    python: str = sys.executable,
    path: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    limit: float = LIMIT,
) -> None:
    """Measure a job's cells in processes of their own; a cell that kills its process is left and the rest goes on."""
    folder = Path(asked["results"])
    before = {name: _stamp(folder / f"{name}.json") for name in _names(asked)}
    left = list(asked["cells"])
    while left:
        error = _process(script, {**asked, "cells": left}, python, path, env or {}, limit)
        touched = [cell for cell in left if _stamp(folder / f"{cell['name']}.json") != before[cell["name"]]]
        if error is None:
            return
        at = [cell for cell in touched if _begun(read(folder / f"{cell['name']}.json"))]
        for cell in at or [cell for cell in left if cell not in touched]:  # none was begun: it is the start that fails
            fail(folder / f"{cell['name']}.json", cell["settings"], asked["run"], error)
        left = [cell for cell in left if cell not in touched] if at else []


def _names(asked: Mapping[str, Any]) -> list[str]:
    return [cell["name"] for cell in asked["cells"]]


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _begun(found: Found | None) -> bool:
    return found is not None and BEGUN in (found.get("error"), found.get("failed_since"))


def _process(
    script: Path, asked: dict[str, Any], python: str, path: Sequence[str], env: Mapping[str, str], limit: float
) -> str | None:
    """Run it to its end, or to the end of a cell's time; what went wrong, in a line."""
    bench = Path(__file__).resolve().parent
    places = [*path, str(bench), str(bench.parent), os.environ.get("PYTHONPATH", "")]
    further = {"PYTHONPATH": os.pathsep.join(filter(None, places)), "PYTHONUNBUFFERED": "1", **env}
    with tempfile.TemporaryDirectory() as aside:
        order, log = Path(aside) / "job.json", Path(aside) / "log"
        order.write_text(json.dumps(asked), encoding="utf-8")
        with log.open("wb") as out:
            child = subprocess.Popen(
                [python, str(script), str(order)],
                cwd=aside,  # for what libraries leave where they run
                env={**os.environ, **further},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                over = _wait(child, [Path(asked["results"]) / f"{name}.json" for name in _names(asked)], limit)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # an engine's own processes too
                child.wait()
        if not over and child.returncode == 0:
            return None
        said = [text for text in log.read_text(encoding="utf-8", errors="replace").splitlines() if text.strip()]
        print("\n".join(["", *said[-TAIL:]]), flush=True)
        last = _reason(said)
        if over:
            return f"no result within {limit:g} s; last: {last}"
        return last if child.returncode == 1 else f"exit status {child.returncode}: {last}"


def _reason(said: Sequence[str]) -> str:
    """What went wrong, from a process's last words: the error's name with what follows it, else the last line."""
    at = [i for i, text in enumerate(said) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", text)]
    return line(" ".join(said[at[-1] :] if at else said[-1:])) or "it said nothing"


def _wait(child: subprocess.Popen[bytes], watched: Iterable[Path], limit: float) -> bool:
    """Until it has ended; true where nothing has come of it for too long."""
    watched = list(watched)
    seen, since = [_stamp(path) for path in watched], time.monotonic()
    while child.poll() is None:
        now = [_stamp(path) for path in watched]
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > limit:
            return True
        time.sleep(0.2)
    return False


@contextlib.contextmanager
def ending_tidily() -> Iterator[None]:
    """A request to end is a Ctrl-C: what was started is ended too."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
