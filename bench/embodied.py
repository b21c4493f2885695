"""Success of a robot before imitation, after it, and after GRPO; in chunks of several sizes; a seed a cell.

    python bench/embodied.py --seeds 0,1,2
    python bench/embodied.py --seeds 0,1,2 --chunks 1,4,8 --env-steps 300000
    python bench/embodied.py --preset rlinf_embodied --seeds 0
    python bench/embodied.py --set warm_start=null --seeds 0
    python bench/embodied.py --pong FOLDER        a run of the preset `pong`: its curve, drawn for the documents
    python bench/embodied.py --table              Markdown of what is there

A cell is a preset on one thread. Success is of greedy episodes on 200 starts that nobody has looked at before, with
Wilson's 95 % interval. Seconds are CPU seconds of the process, evaluations included. Cells that are in the file already
(preset, settings, seed and steps) are not run again. Writes bench/results/embodied.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from grpo.app.builders import configs
from grpo.app.look import FRESH
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.control import GRPOTrainer

HERE = Path(__file__).resolve().parent
PATH = HERE / "results" / "embodied.json"
FIGURE = HERE.parent / "docs" / "figures" / "control-pong.png"
PRESET = "pointmaze"
EPISODES, EVERY = 200, 5


def success(trainer: GRPOTrainer) -> dict[str, float | None]:
    """Share and interval, on fresh starts."""
    found = trainer.evaluate(EPISODES, seed=trainer.config.seed + FRESH).metrics()
    return {name: found[name] for name in ("success", "success_low", "success_high", "length")}


def planned(key: dict[str, Any], steps: int | None) -> tuple[Any, int | None]:
    """The configuration of a cell, and its steps: those asked for, or the preset's; None: the environment's count."""
    flags = [(name, value) for name, value in key["settings"].items() if name != "env_steps"]
    resolved = resolve(
        [preset_layer(key.get("preset", PRESET)), flag_layer([*flags, ("seed", str(key["seed"]))])], configs()
    )
    return resolved.config, None if "env_steps" in key["settings"] else steps or resolved.run.steps or 100


def made(kept: dict[str, Any]) -> int:
    """Steps of a cell that is there; the first ones have them in their curve alone."""
    return int(kept.get("steps") or kept["curve"][-1]["step"])


def is_there(key: dict[str, Any], steps: int | None, cells: list[dict[str, Any]]) -> bool:
    """Whether a cell need not be run again."""
    wanted = {"preset": None} | key
    return any({name: kept.get(name) for name in wanted} == wanted and steps in (None, made(kept)) for kept in cells)


def cell(config: Any, steps: int | None, env_steps: int | None) -> dict[str, Any]:
    """Train one, for so many steps or at least so many of the environment; what it came to."""
    trainer, used = GRPOTrainer(config=config), time.process_time()
    found: dict[str, Any] = {"untrained": success(trainer)}
    if trainer.source.cold:
        trainer.source.warm_up()
        found |= {"imitating": success(trainer), "imitation_cpu_s": time.process_time() - used}
    curve, step = [], 0
    while step < steps if steps is not None else trainer.source.env_steps < (env_steps or 0):
        step += 1
        report = trainer.step()
        if step % EVERY == 0:
            judged = trainer.source.evaluate(step)["success"]
            cpu = time.process_time() - used
            curve.append({"step": step, "env_steps": report["env_steps"], "success": judged, "cpu_s": cpu})
            print(f"  {step:4d} {report['env_steps']:9.0f} steps  {judged:5.0%}  {cpu:5.0f} s", flush=True)
    found |= {"trained": success(trainer), "steps": step, "env_steps": trainer.source.env_steps, "curve": curve}
    trainer.source.close()
    return found | {"cpu_s": time.process_time() - used, "mujoco": metadata.version("mujoco")}


def row(kept: dict[str, Any]) -> str:
    """A line of a table."""

    def share(name: str) -> str:
        found = kept.get(name)
        if not found:
            return "–"
        return f"{found['success']:.0%} [{100 * found['success_low']:.0f}, {100 * found['success_high']:.0f}]"

    settings = " ".join(f"{key}={value}" for key, value in kept["settings"].items() if key != "env_steps")
    shares = " | ".join(share(name) for name in ("untrained", "imitating", "trained"))
    named = f"{kept.get('preset', PRESET)} {settings}".strip()
    return f"| {named} | {kept['seed']} | {shares} | {made(kept)} | {kept['env_steps']:,.0f} | {kept['cpu_s']:.0f} |"


def table(document: dict[str, Any]) -> None:
    """Everything that is there."""
    names = ("cell", "seed", "untrained", "imitating", "trained", "steps", "environment steps", "CPU seconds")
    print(f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|")
    for kept in sorted(document["cells"], key=lambda kept: (kept.get("preset", PRESET), str(kept["settings"]))):
        print(row(kept))
    for run in document.get("pong", []):
        last = run["curve"][-1]
        best = max((look["eval"] for look in run["curve"] if look["eval"] is not None), default=None)
        print(
            f"pong, seed {run['seed']}: {last['env_steps']:,.0f} decisions, {last['seconds']:.0f} s ({run['ended']}), "
            f"last 20 games {last['return']}, best evaluation {best}"
        )


def pong(folder: Path) -> dict[str, Any]:
    """The curve that a run left: decisions, wall seconds, points of the last 20 games, and of an evaluation's."""
    lines, timing = (
        [json.loads(text) for text in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("metrics.jsonl", "timing.jsonl")
    )
    about, config, status = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("run", "config", "status")
    )
    seconds = dict(zip((one["step"] for one in timing), accumulate(one["total"] for one in timing), strict=True))
    curve = [
        {
            "step": one["step"],
            "env_steps": one["env_steps"],
            "seconds": seconds.get(one["step"]),
            "return": one["return"],
            "eval": one.get("eval/return"),
        }
        for one in lines
        if one["step"] % EVERY == 0 or "eval/return" in one or one is lines[-1]
    ]
    settings = {name.removeprefix("task."): value for name, value in config["resolved"].items()}
    kept = {name: settings[name] for name in ("seed", "eval_greedy", "eval_episodes", "device", "workers")}
    return kept | {"torch": about["versions"]["torch"], "ended": status["reason"], "curve": curve}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Points of a game over decisions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for run in runs:
        played = [(one["env_steps"] / 1e6, one["return"]) for one in run["curve"] if one["return"] is not None]
        judged = [(one["env_steps"] / 1e6, one["eval"]) for one in run["curve"] if one["eval"] is not None]
        (line,) = axes.plot(*zip(*played, strict=True), lw=1.2, label=f"seed {run['seed']}")
        if judged:
            axes.plot(*zip(*judged, strict=True), "o", ms=6, color=line.get_color())
    dots = {f"{run['eval_episodes']} {'greedy' if run['eval_greedy'] else 'drawn'} games" for run in runs}
    axes.set_title(f"pong: the last 20 games played (●: {' or '.join(sorted(dots))} on other starts)")
    axes.set(xlabel="million decisions (4 frames each)", ylabel="points of a game", ylim=(-21.5, 21.5))
    axes.axhline(0, color="0.8", lw=0.8, zorder=0)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def read() -> dict[str, Any]:
    """What is there."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {"cells": []}


def write(changes: dict[str, Any]) -> None:
    """Beside what is there."""
    about = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {n: metadata.version(n) for n in ("torch", "gymnasium", "gymnasium-robotics", "mujoco")},
    }
    PATH.write_text(json.dumps(about | read() | changes, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--chunks", default="", help="sizes of a chunk; the preset's own if none is given")
    long = parser.add_mutually_exclusive_group()
    long.add_argument("--steps", type=int, help="instead of the preset's")
    long.add_argument("--env-steps", type=int, help="instead of a number of steps")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the preset")
    parser.add_argument("--pong", type=Path, nargs="+", metavar="FOLDER", help="runs of the preset pong")
    parser.add_argument("--table", action="store_true", help="only show")
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.pong:
        write({"pong": [pong(folder) for folder in a.pong]})
        draw(read()["pong"], FIGURE)
    flags = [(key, value) for key, _, value in (item.partition("=") for item in a.set)]
    sizes: list[list[tuple[str, str]]] = [[("action_chunk", size)] for size in a.chunks.split(",") if size] or [[]]
    budget = {"env_steps": str(a.env_steps)} if a.env_steps else {}
    for seed in map(int, a.seeds.split(",")) if not (a.table or a.pong) else ():
        for size in sizes:
            key = {"seed": seed} | ({"preset": a.preset} if a.preset != PRESET else {})
            key["settings"] = dict([*flags, *size]) | budget
            config, steps = planned(key, a.steps)
            if is_there(key, steps, read()["cells"]):
                continue
            print(f"{a.preset} seed {seed} {key['settings']}", flush=True)
            write({"cells": [*read()["cells"], key | cell(config, steps, a.env_steps)]})
    table(read())


if __name__ == "__main__":
    main()
