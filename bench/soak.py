"""Long lives: whether memory, open files, the time of a step and the run folder stay flat over very many steps.

`make soak` trains the bandit for 100,000 steps and a tiny language model for 10,000, each in a process of its own and
through the same door as the command, and looks twenty times: resident memory after a collection, open files, threads
and child processes, CPU time of a step, bytes and files in the folder. Writes bench/results/soak.json.
`--room bandit --steps 2000 --trace` prints one room's looks instead, with what Python's allocator holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "soak.json"
LOOKS = 20
STEPS = {"bandit": 100_000, "language": 10_000}
PLANS = {
    "bandit": {"checkpoint_every": 1000},
    "language": {"checkpoint_every": 1000, "evaluate_every": 500, "best_by": "eval/accuracy"},
}


def make(room: str):
    """A trainer as small as they come."""
    if room == "bandit":
        from grpo.bandit import BanditConfig, make_trainer

        return make_trainer(BanditConfig())
    from grpo.language import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        model="tiny", dataset="sort-digits", rewards=["grpo.language.tasks:exact", "grpo.language.tasks:in_place"],
        eval_by="exact", max_completion_length=6, group_size=4, groups_per_step=2, learning_rate=5e-4, preflight=False,
        eval_prompts=8, device="cpu",
    )  # fmt: skip
    return GRPOTrainer(args=config)


class Looks:
    """Called with each report; what it sees at every twentieth part of the run."""

    def __init__(self, steps: int, folder: Path, trace: bool) -> None:
        self.every, self.folder, self.rows, self._trace = max(steps // LOOKS, 1), folder, [], trace
        self._seconds, self._step = time.process_time(), 0

    def __call__(self, report) -> bool:
        if report.step % self.every == 0:
            if self._trace and not tracemalloc.is_tracing():  # not sooner: imports would take minutes
                tracemalloc.start()
            seconds = time.process_time() - self._seconds
            gc.collect()
            if not self.rows:
                gc.freeze()  # what imports made stays: looking through it takes longer than a hundred steps
            row = {
                "step": report.step,
                "ms": 1000 * seconds / (report.step - self._step),
                **held(),
                **left(self.folder),
            }
            self.rows.append(row)
            self._seconds, self._step = time.process_time(), report.step
            if len(self.rows) == LOOKS:
                tracemalloc.stop()  # before the curve is drawn
        return False


def held() -> dict[str, float]:
    """What the process holds now."""
    proc = Path("/proc/self")
    pages = int((proc / "statm").read_text().split()[1])
    tasks = (proc / "task").iterdir()
    found = {
        "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "files": len(list((proc / "fd").iterdir())),
        "threads": threading.active_count(),
        "children": sum(len((task / "children").read_text().split()) for task in tasks),
    }
    return found | ({"traced": tracemalloc.get_traced_memory()[0]} if tracemalloc.is_tracing() else {})


def left(folder: Path) -> dict[str, float]:
    """What the folder holds, without checkpoints, of which so many stay as the settings say."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    return {"folder_mb": sum(path.stat().st_size for path in paths) / 1e6, "folder_files": len(paths)}


def lived(room: str, steps: int, place: Path, plan: dict[str, object], trace: bool) -> dict[str, object]:
    """Train, and look."""
    from grpo.run.config import RunConfig
    from grpo.run.start import create, start

    trainer = make(room)
    how = RunConfig(steps=steps, logdir=str(place / "run"), **PLANS[room] | plan)
    folder = create(how, {"task": room}, name=room, task=room, seed=0)
    looks = Looks(steps, folder.path, trace)
    began = time.perf_counter()
    try:
        summary = start(trainer, how, folder, stop=looks, progress=None)
    finally:
        gc.unfreeze()
        trainer.source.close()
    return {
        "steps": summary.step, "reason": summary.reason, "seconds": time.perf_counter() - began, "looks": looks.rows
    }  # fmt: skip


def judged(found: dict) -> dict:
    """The line that memory follows, in MB over 10,000 steps, by least squares over all looks but the first two; how the
    last quarter's steps compare in time with those of the second; what grew meanwhile."""
    looks = found["looks"][2:]
    step, memory = [row["step"] for row in looks], [row["memory_mb"] for row in looks]
    mean = sum(step) / len(step)
    slope = sum((s - mean) * m for s, m in zip(step, memory, strict=True)) / sum((s - mean) ** 2 for s in step)
    quarter, last = found["looks"][5:10], found["looks"][15:]
    drift = median(row["ms"] for row in last) / median(row["ms"] for row in quarter)
    told = {"memory_mb_per_10000": 1e4 * slope, "drift": drift}
    for name in ("files", "threads", "children"):
        told[name] = [min(row[name] for row in looks), max(row[name] for row in looks)]
    return found | told | {"folder_mb": max(row["folder_mb"] for row in looks)}


def median(values) -> float:
    """The middle one."""
    found = sorted(values)
    return found[len(found) // 2]


def table(results: dict) -> str:
    """For docs/reliability.md."""
    if not results.get("rooms"):
        return "Not measured.\n"
    head = ("room", "steps", "MB in 10,000 steps", "step time, last quarter ÷ second", "files", "threads", "folder, MB")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for room, found in results["rooms"].items():
        files, threads = (" – ".join(map(str, found[name])) for name in ("files", "threads"))
        memory, drift = f"{found['memory_mb_per_10000']:+.2f}", f"{found['drift']:.2f}"
        cells = (room, f"{found['steps']:,}", memory, drift, files, threads, f"{found['folder_mb']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """All rooms, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", choices=list(STEPS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--place", type=Path, help="where the run goes; a temporary folder otherwise")
    parser.add_argument("--plan", type=json.loads, default={}, help="further settings of the run, as JSON")
    given = parser.parse_args()
    if given.room is not None:
        with tempfile.TemporaryDirectory() as temporary:
            place = given.place or Path(temporary)
            print(json.dumps(lived(given.room, given.steps, place, given.plan, given.trace)))
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rooms": {}}
    for room, steps in STEPS.items():
        command = [sys.executable, __file__, "--room", room, "--steps", str(given.steps or steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results["rooms"][room] = judged(json.loads(done.stdout.splitlines()[-1]))
        results["machine"] = {"platform": platform.platform(), "python": platform.python_version()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(room, {name: value for name, value in results["rooms"][room].items() if name != "looks"}, flush=True)


if __name__ == "__main__":
    main()
