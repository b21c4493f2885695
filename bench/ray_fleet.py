"""What a step of a fleet costs in actors of a Ray cluster, beside this process and processes of this machine.

    python bench/ray_fleet.py --json bench/results/ray_fleet.json

CartPole's step takes microseconds, so that what is measured is the way there and back. `restart` is what an actor that
is killed in the middle of an episode costs: another one started, and its members' episodes played again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from grpo.envs.make import make_fleet


def steps_of(fleet: Any, count: int, draw: np.random.Generator) -> list[float]:
    """Seconds of each step of all members."""
    size = fleet.size
    fleet.reset(range(size), list(range(size)))
    took: list[float] = []
    while len(took) < count:
        began = time.perf_counter()
        stepped = fleet.step(range(size), draw.integers(0, 2, size))
        took.append(time.perf_counter() - began)
        over = np.flatnonzero(~stepped.going_M)
        if len(over):
            fleet.reset(over, [int(draw.integers(10**6)) for _ in over])
    return took


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "load": round(os.getloadavg()[0], 1),
        "processors": os.cpu_count(),
        "steps": given.steps,
        "workers": given.workers,
        "milliseconds_a_step": {},
    }
    for size in given.sizes:
        row: dict[str, float] = {}
        for name, how in (
            ("serial", {"kind": "serial"}), ("processes", {"workers": given.workers}),
            ("ray", {"workers": f"ray:{given.workers}"}),
        ):  # fmt: skip
            began = time.perf_counter()
            fleet = make_fleet("CartPole-v1", size, **how)  # type: ignore[arg-type]
            row[f"{name}_start_seconds"] = round(time.perf_counter() - began, 2)
            took = steps_of(fleet, given.steps, np.random.default_rng(0))
            row[name] = round(1000 * statistics.median(took), 3)
            if name == "ray":
                row["restart"] = round(1000 * restart(fleet), 1)
            fleet.close()
        found["milliseconds_a_step"][str(size)] = row
        print(size, row, flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def restart(fleet: Any) -> float:
    """Seconds of a step before which an actor was killed."""
    import ray

    fleet.reset(range(fleet.size), list(range(fleet.size)))
    for _ in range(5):
        fleet.step(range(fleet.size), np.ones(fleet.size, int))
    os.kill(ray.get(fleet._actors[0].__ray_call__.remote(lambda actor: os.getpid())), signal.SIGKILL)
    began = time.perf_counter()
    assert not fleet.step(range(fleet.size), np.zeros(fleet.size, int)).errors
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
