"""How well the preset `shapes` answers: a small image-text model from scratch learns where a shape is in a picture.

    python bench/vision.py --seeds 0,1,2 --jobs 2

A seed draws the model's weights and everything that is sampled. Looked at before the first step (after the supervised
warm start, which teaches to write a digit) and every so many steps: 300 held-out pictures, greedy answers; chance is a
ninth. Written to bench/results/vision.json after every seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import yaml

from grpo.language import GRPOConfig, GRPOTrainer

RESULTS = Path(__file__).parent / "results" / "vision.json"
PRESET = Path(__file__).parents[1] / "grpo" / "app" / "presets" / "shapes.yaml"
HELD_OUT, EVERY = 300, 25


def preset() -> tuple[dict[str, Any], int]:
    """The settings, and how many steps."""
    told = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    return {name: told[name] for name in told if name not in ("description", "task", "run")}, told["run"]["steps"]


def learned(seed: int, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Accuracy by step, and what it cost."""
    started = time.process_time()
    trainer = GRPOTrainer(args=GRPOConfig(**settings | {"seed": seed, "preflight": False, "device": "cpu"}))
    trainer.schedule(steps)
    drawn, curve = [], []
    try:
        for _ in range(steps):
            drawn.append(round(float(trainer.step()["rewards/exact/mean"]), 3))
            if trainer.steps_done in (1, steps) or trainer.steps_done % EVERY == 0:
                curve.append((trainer.steps_done, round(float(trainer.evaluate().metrics()["accuracy"] or 0.0), 4)))
                print(f"seed {seed} {curve[-1]} {time.process_time() - started:.0f} s", flush=True)
    finally:
        trainer.source.close()
    return {"curve": curve, "drawn": drawn, "cpu_seconds": round(time.process_time() - started, 1)}


def prepare() -> None:
    """Every process: one core, no warnings."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    """Several seeds beside each other."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seeds", default="0,1,2")
    asked.add_argument("--jobs", type=int, default=1)
    asked.add_argument("--steps", type=int)
    asked.add_argument("--but", type=json.loads, default={}, help="settings that differ from the preset's, as JSON")
    asked.add_argument("--to", type=Path, default=RESULTS)
    args = asked.parse_args()
    settings, steps = preset()
    settings |= {"eval_prompts": HELD_OUT, **args.but}
    steps = args.steps or steps
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), prepare) as pool:
        running = {pool.submit(learned, int(seed), settings, steps): seed for seed in args.seeds.split(",")}
        for done in as_completed(running):
            found[running[done]] = done.result()
            last = [one["curve"][-1][1] for one in found.values()]
            told = {
                "what": "accuracy of greedy answers on held-out pictures, chance 1/9",
                "settings": settings,
                "steps": steps,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, one a seed",
                "seeds": dict(sorted(found.items())),
                "last": {"lowest": min(last), "median": statistics.median(last), "highest": max(last)},
            }
            args.to.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
