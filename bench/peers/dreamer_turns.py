"""A worker of `worldmodel_speed.py`: it builds what it is asked for, and calls it whenever it is its turn.

Orders come as lines of JSON on standard input, answers go out the same way; whatever else a library prints goes to
standard error. Runs in every peer's interpreter, so it needs nothing but NumPy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

SHORT = 0.01
"""Share of steps that begin an episode."""


@dataclass(frozen=True)
class Built:
    """What can be timed, by name, and how many weights the world model has."""

    weights: int
    operations: dict[str, Callable[[], object]]


def batch(cell: dict[str, Any]) -> dict[str, np.ndarray]:
    """The sequences that everybody learns from; `choice` is the action as a number."""
    random, lead = np.random.default_rng(0), (cell["batch"], cell["length"])
    return {
        **observation(cell, random, lead),
        "choice": random.integers(0, cell["actions"], lead, dtype=np.int32),
        "reward": random.random(lead, dtype=np.float32),
        "is_first": random.random(lead) < SHORT,
        "is_terminal": random.random(lead) < SHORT,
    }


def observation(cell: dict[str, Any], random: np.random.Generator, lead: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Four numbers, or a picture of bytes."""
    if cell["observation"] == "vector":
        return {"vector": random.standard_normal((*lead, 4), dtype=np.float32)}
    return {"image": random.integers(0, 256, (*lead, 64, 64, 3), dtype=np.uint8)}


def serve(build: Callable[[dict[str, Any]], Built], packages: Sequence[str]) -> None:
    """Answer until there are no more orders."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    built = Built(0, {})
    for order in map(json.loads, sys.stdin):
        answer: dict[str, Any]
        try:
            if "cell" in order:
                built = build(order["cell"])
                about = {name: metadata.version(name) for name in packages}
                answer = {"weights": built.weights, "operations": list(built.operations), "versions": about}
            else:
                answer = timed(built.operations[order["operation"]], order["calls"])
        except Exception as error:
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def timed(operation: Callable[[], object], calls: int) -> dict[str, float]:
    """Seconds on the clock, and of all threads together."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        operation()
    return {"calls": calls, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
