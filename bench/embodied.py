"""Success on PointMaze before imitation, after it, and after GRPO; in chunks of several sizes; a seed a cell.

    python bench/embodied.py --seeds 0,1,2
    python bench/embodied.py --seeds 0,1,2 --chunks 1,5,10
    python bench/embodied.py --set warm_start=null --seeds 0

A cell is the preset `pointmaze` on one thread. Success is of greedy episodes on 200 starts that nobody has looked at
before, with Wilson's 95 % interval. Seconds are CPU seconds of the process, evaluations included. Cells that are in the
file already are not run again. Writes bench/results/embodied.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from grpo.app.builders import configs
from grpo.app.look import FRESH
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.control import GRPOTrainer

PATH = Path(__file__).parent / "results" / "embodied.json"
EPISODES, EVERY = 200, 5


def success(trainer: GRPOTrainer) -> dict[str, float | None]:
    """Share and interval, on fresh starts."""
    found = trainer.evaluate(EPISODES, seed=trainer.config.seed + FRESH).metrics()
    return {name: found[name] for name in ("success", "success_low", "success_high", "length")}


def cell(flags: list[tuple[str, str]], steps: int | None) -> dict[str, Any]:
    """Train one; what it came to."""
    resolved = resolve([preset_layer("pointmaze"), flag_layer(flags)], configs())
    config: Any = resolved.config
    trainer, used = GRPOTrainer(config=config), time.process_time()
    found: dict[str, Any] = {"untrained": success(trainer)}
    if trainer.source.cold:
        trainer._warmed()
        found |= {"imitating": success(trainer), "imitation_cpu_s": time.process_time() - used}
    curve = []
    for step in range(1, (steps or resolved.run.steps or 100) + 1):
        report = trainer.step()
        if step % EVERY == 0:
            judged = trainer.source.evaluate(step)["success"]
            cpu = time.process_time() - used
            curve.append({"step": step, "env_steps": report["env_steps"], "success": judged, "cpu_s": cpu})
            print(f"  {step:4d} {report['env_steps']:9.0f} steps  {judged:5.0%}  {cpu:5.0f} s", flush=True)
    found |= {"trained": success(trainer), "env_steps": report["env_steps"], "curve": curve}
    trainer.source.close()
    return found | {"cpu_s": time.process_time() - used}


def row(kept: dict[str, Any]) -> str:
    """A line for a person."""
    shown = (kept.get(name) for name in ("untrained", "imitating", "trained"))
    shares = "".join(
        f"{s['success']:8.0%} [{s['success_low']:.0%}, {s['success_high']:.0%}]" if s else "       –" for s in shown
    )
    settings = " ".join(f"{key}={value}" for key, value in kept["settings"].items())
    return f"seed {kept['seed']} {settings:<22}{shares}  {kept['env_steps']:9.0f} steps {kept['cpu_s']:5.0f} s"


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--chunks", default="", help="sizes of a chunk; the preset's own if none is given")
    parser.add_argument("--steps", type=int, help="instead of the preset's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the preset")
    a = parser.parse_args()
    torch.set_num_threads(1)
    flags = [(key, value) for key, _, value in (item.partition("=") for item in a.set)]
    sizes: list[list[tuple[str, str]]] = [[("action_chunk", size)] for size in a.chunks.split(",") if size] or [[]]
    for seed in map(int, a.seeds.split(",")):
        for size in sizes:
            settings = dict([*flags, *size])
            cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"] if PATH.exists() else []
            if any(kept["seed"] == seed and kept["settings"] == settings for kept in cells):
                continue
            print(f"seed {seed} {settings}", flush=True)
            found = cell([*settings.items(), ("seed", str(seed))], a.steps)
            cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"] if PATH.exists() else []
            document = {
                "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
                "versions": {n: metadata.version(n) for n in ("torch", "gymnasium", "gymnasium-robotics", "mujoco")},
                "cells": [*cells, {"seed": seed, "settings": settings, **found}],
            }
            PATH.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for kept in json.loads(PATH.read_text(encoding="utf-8"))["cells"]:
        print(row(kept))


if __name__ == "__main__":
    main()
