"""Environment steps until a task is learned in imagination: each kind of actor on the same world model, a seed a cell.

    python bench/worldmodel_learning.py --actors group,critic --seeds 0,1,2
    python bench/worldmodel_learning.py --env Pendulum-v1 --stop-at -300 --env-steps 10000

A cell is the preset `dreamer` on one thread. Every 250 environment steps twenty greedy episodes are played on starts
that training never uses; a cell is over when they return `--stop-at` and twenty episodes on starts that nobody has
looked at confirm it, or after `--env-steps`, prefill included. Seconds are CPU seconds of the process, evaluations
included. `control` is the control room's preset `cartpole`, judged the same way. Cells that are in the file already are
not run again. Writes bench/results/worldmodel_NAME.json and, beside it, the curves as a picture.
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

RESULTS = Path(__file__).parent / "results"
EVERY, EPISODES = 250, 20


def made(actor: str, env: str, seed: int, flags: list[tuple[str, str]]) -> Any:
    """The trainer of a cell."""
    if actor == "control":
        layers = [preset_layer("cartpole"), flag_layer([("seed", str(seed))])]
    else:
        own = [("env", env), ("actor", actor), ("seed", str(seed)), ("device", "cpu")]
        layers = [preset_layer("dreamer"), flag_layer([*own, *flags])]
    resolved = resolve(layers, configs())
    return configs()[resolved.task].trainer(resolved.config)


def learned(trainer: Any, env_steps: int, stop_at: float | None) -> dict[str, Any]:
    """Train one cell; its curve and what it came to."""
    began, used, due, solved = time.perf_counter(), time.process_time(), EVERY, None
    curve: list[dict[str, float]] = []
    while True:
        report = trainer.step()
        if report["env_steps"] < due and report["env_steps"] < env_steps:
            continue
        due = report["env_steps"] + EVERY
        found = trainer.evaluate(EPISODES).return_E.mean()
        cpu = time.process_time() - used
        curve.append({"env_steps": report["env_steps"], "return": float(found), "cpu_s": cpu})
        print(f"  {report['env_steps']:6.0f} steps  {found:8.1f}  {cpu:6.0f} s", flush=True)
        if stop_at is not None and found >= stop_at and solved is None:
            fresh = float(trainer.evaluate(EPISODES, seed=trainer.config.seed + FRESH).return_E.mean())
            if fresh >= stop_at:
                solved = {**curve[-1], "fresh": fresh}
        if solved is not None or report["env_steps"] >= env_steps:
            trainer.source.close()
            return {"solved": solved, "wall_s": time.perf_counter() - began, "curve": curve}


def called(cell: dict[str, Any]) -> str:
    """What a cell is about."""
    return " ".join([cell["actor"], *(f"{key}={value}" for key, value in cell["settings"].items())])


def draw(cells: list[dict[str, Any]], path: Path, env: str) -> None:
    """All curves in one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, kinds = figure.add_subplot(), list(dict.fromkeys(map(called, cells)))
    for cell in cells:
        kind = called(cell)
        points = [(point["env_steps"], point["return"]) for point in cell["curve"]]
        look = {"color": f"C{kinds.index(kind)}", "label": kind if cell["seed"] == 0 else None, "linewidth": 1}
        axes.plot(*zip(*points, strict=True), marker=".", **look)
    axes.set_xlabel("environment steps")
    axes.set_ylabel(f"greedy return, {env}")
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--name", help="of the result (the environment's)")
    parser.add_argument("--actors", default="group,critic", help="of group, bootstrap, critic, control")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--env-steps", type=int, default=10_000)
    parser.add_argument("--stop-at", type=float, default=475.0)
    parser.add_argument("--through", action="store_true", help="go on to the end, whatever is reached")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the preset")
    a = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / f"worldmodel_{a.name or a.env.split('-')[0].split('/')[-1].lower()}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": []}
    flags = [(key, value) for key, _, value in (item.partition("=") for item in a.set)]
    done = {(cell["actor"], cell["seed"]) for cell in kept["cells"] if cell["settings"] == dict(flags)}
    for seed in map(int, a.seeds.split(",")):
        for actor in a.actors.split(","):
            if (actor, seed) in done:
                continue
            print(f"{a.env}, {actor}, seed {seed}", flush=True)
            found = learned(made(actor, a.env, seed, flags), a.env_steps, None if a.through else a.stop_at)
            kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else kept
            kept |= {
                "env": a.env,
                "stop_at": a.stop_at,
                "env_steps": a.env_steps,
                "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
                "versions": {name: metadata.version(name) for name in ("torch", "gymnasium", "numpy")},
            }
            kept["cells"] = [*kept["cells"], {"actor": actor, "seed": seed, "settings": dict(flags), **found}]
            path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    draw(kept["cells"], path.with_suffix(".png"), a.env)
    for cell in kept["cells"]:
        solved = cell["solved"]
        said = f"{solved['env_steps']:.0f} steps, {solved['cpu_s']:.0f} s" if solved else "not reached"
        print(f"{called(cell)}, seed {cell['seed']}: {said}")


if __name__ == "__main__":
    main()
