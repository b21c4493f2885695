"""A task that needs memory: the same settings with a GRU and without one, a seed a cell.

    python bench/memory.py                            # T-mazes of 10, 20 and 50 steps, seeds 100, 101, 102
    python bench/memory.py --tasks minigrid-memory --cap-cpu 1800
    python bench/memory.py --table --page docs/control.md

A cell is the preset `tmaze` (or what TASKS says) on one thread, until 100 greedy episodes on starts that training never
uses succeed at two looks in a row (95 %), or its steps or CPU seconds are spent. The share at the end is of 200 further
starts, with Wilson's 95 % interval. No setting was chosen on the seeds from 100 on. Cells that are in the file already
are not run again. Writes bench/results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import put_into

from grpo.app.builders import configs
from grpo.app.look import FRESH
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.control import GRPOTrainer
from grpo.statistics import wilson

PATH = Path(__file__).resolve().parent / "results" / "memory.json"
MEMORY = {
    "env": "MiniGrid-MemoryS7-v0", "env_kwargs": {}, "hidden": [64], "memory": 64, "learning_rate": 1e-3,
    "entropy_coef": 0.01, "gamma": 0.99, "group_size": 8, "groups_per_step": 8, "num_iterations": 4,
}  # fmt: skip
TASKS: dict[str, tuple[dict[str, Any], int]] = {
    "tmaze-10": ({}, 60),
    "tmaze-20": ({"env_kwargs": {"length": 20}}, 60),
    "tmaze-50": ({"env_kwargs": {"length": 50}}, 60),
    "minigrid-memory": (MEMORY, 2000),
}
"""Name → what is changed of the preset, and the most steps. MiniGrid's gives a return and no success."""
SOLVED, EVERY, LOOK, JUDGED = 0.95, 5, 100, 200


def successes(trainer: GRPOTrainer, episodes: int, seed: int | None = None) -> np.ndarray:
    """1 where an episode succeeded: here all that fail return nothing or less, all that succeed at least 0.1."""
    return (trainer.evaluate(episodes, seed=seed).return_E > 0.05).astype(float)


def cell(task: str, memory: bool, seed: int, cap: float) -> dict[str, Any]:
    """Learn until it is solved or over."""
    changes, most = TASKS[task]
    flags = [*changes.items(), ("seed", seed), *([] if memory else [("memory", 0)])]
    trainer = GRPOTrainer(config=resolve([preset_layer("tmaze"), flag_layer(flags)], configs()).config)
    begun, aside, curve, step = time.process_time(), 0.0, [], 0
    while step < most and time.process_time() - begun - aside < cap:
        step += 1
        report = trainer.step()
        if step % EVERY == 0:
            before = time.process_time()
            seen = float(successes(trainer, LOOK).mean())
            aside += time.process_time() - before
            curve.append([step, report["env_steps"], round(time.process_time() - begun - aside, 2), seen])
            if len(curve) > 1 and min(point[3] for point in curve[-2:]) >= SOLVED:
                break
    cpu = time.process_time() - begun - aside
    judged = successes(trainer, JUDGED, seed + FRESH)
    low, high = wilson(judged)
    settings = {name: dict(trainer.config)[name] for name in ("env", "env_kwargs", "memory", "hidden")}
    trainer.source.close()
    return {
        "task": task, "memory": memory, "seed": seed, "success": float(judged.mean()), "low": low, "high": high,
        "steps": step, "env_steps": trainer.source.env_steps, "cpu_s": cpu, "settings": settings, "curve": curve,
        "versions": {name: metadata.version(name) for name in ("torch", "numpy", "gymnasium", "minigrid")},
        "machine": platform.machine(),
    }  # fmt: skip


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: a line a task and a policy."""
    lines = ["| task | policy | success, a seed each | environment steps | CPU seconds |", "|---|---|---|---|---|"]
    for task in TASKS:
        for memory in (True, False):
            mine = [one for one in cells if (one["task"], one["memory"]) == (task, memory)]
            if mine:
                shares = ", ".join(
                    f"{one['success']:.0%} [{100 * one['low']:.0f}, {100 * one['high']:.0f}]" for one in mine
                )
                steps = ", ".join(f"{one['env_steps']:,}" for one in mine)
                seconds = ", ".join(f"{one['cpu_s']:.1f}" for one in mine)
                lines.append(f"| {task} | {'GRU' if memory else 'none'} | {shares} | {steps} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="tmaze-10,tmaze-20,tmaze-50")
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--cap-cpu", type=float, default=120.0)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--page", type=Path, help="a page to write the table into")
    args = parser.parse_args()
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"] if PATH.exists() else []
    if not args.table:
        torch.set_num_threads(1)
        there = {(one["task"], one["memory"], one["seed"]) for one in cells}
        for task in args.tasks.split(","):
            for seed in map(int, args.seeds.split(",")):
                for memory in (True, False):
                    if (task, memory, seed) in there:
                        continue
                    cells.append(cell(task, memory, seed, args.cap_cpu))
                    print(f"{task} {'GRU' if memory else 'none'} {seed}: {cells[-1]['success']:.0%}", flush=True)
                    lines = ",\n".join(map(json.dumps, cells))
                    PATH.write_text(f'{{"cells": [\n{lines}\n]}}\n', encoding="utf-8")
    print(table(cells))
    if args.page:
        put_into(args.page, "memory.py", table(cells) + "\n")


if __name__ == "__main__":
    main()
