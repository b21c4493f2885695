"""Success of a robot before imitation, after it, and after GRPO; in chunks of several sizes; a seed a cell.

    python bench/embodied.py --seeds 0,1,2
    python bench/embodied.py --seeds 0,1,2 --chunks 1,4,8 --env-steps 300000
    python bench/embodied.py --preset rlinf_embodied --seeds 0
    python bench/embodied.py --set warm_start=null --seeds 0
    python bench/embodied.py --pong FOLDER        a run of the preset `pong`: its curve, drawn for the documents
    python bench/embodied.py --table              Markdown of what is there

A cell is a preset on one thread. Success is of greedy episodes on 200 starts that nobody has looked at before, with
Wilson's 95 % interval. Seconds are CPU seconds of the process, evaluations included. Cells that are in the file already
are not run again. Writes bench/results/embodied.json.
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


def cell(preset: str, flags: list[tuple[str, str]], steps: int | None, env_steps: int | None) -> dict[str, Any]:
    """Train one, for so many steps or at least so many of the environment; what it came to."""
    resolved = resolve([preset_layer(preset), flag_layer(flags)], configs())
    config: Any = resolved.config
    trainer, used = GRPOTrainer(config=config), time.process_time()
    found: dict[str, Any] = {"untrained": success(trainer)}
    if trainer.source.cold:
        trainer._warmed()
        found |= {"imitating": success(trainer), "imitation_cpu_s": time.process_time() - used}
    curve, step = [], 0
    while trainer.source.env_steps < env_steps if env_steps else step < (steps or resolved.run.steps or 100):
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
        low_high = () if not found else (round(100 * found["success_low"]), round(100 * found["success_high"]))
        return f"{found['success']:.0%} [{low_high[0]}, {low_high[1]}]" if found else "–"

    settings = " ".join(f"{key}={value}" for key, value in kept["settings"].items() if key != "env_steps")
    shares = " | ".join(share(name) for name in ("untrained", "imitating", "trained"))
    named = f"{kept.get('preset', PRESET)} {settings}".strip()
    return f"| {named} | {kept['seed']} | {shares} | {kept['env_steps']:,.0f} | {kept['cpu_s']:.0f} |"


def table(document: dict[str, Any]) -> None:
    """Everything that is there."""
    print("| cell | seed | untrained | imitating | trained | environment steps | CPU seconds |\n" + "|---" * 7 + "|")
    for kept in sorted(document["cells"], key=lambda kept: (kept.get("preset", PRESET), str(kept["settings"]))):
        print(row(kept))
    for run in document.get("pong", []):
        last = run["curve"][-1]
        best = max((look["eval"] for look in run["curve"] if look["eval"] is not None), default=None)
        print(
            f"pong: {last['env_steps']:,.0f} decisions, {last['seconds']:.0f} s, return {last['return']}, best {best}"
        )


def pong(folder: Path) -> dict[str, Any]:
    """The curve that a run left: decisions, wall seconds, points of a game while learning and of greedy ones."""
    lines, timing = (
        [json.loads(text) for text in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("metrics.jsonl", "timing.jsonl")
    )
    seconds = dict(zip((one["step"] for one in timing), accumulate(one["total"] for one in timing), strict=True))
    curve = [
        {
            "step": one["step"],
            "env_steps": one["env_steps"],
            "seconds": seconds.get(one["step"]),
            "return": one["return"],
            "eval": one.get("eval/return"),
            "explained": one.get("baseline_explained"),
        }
        for one in lines
    ]
    return {"seed": json.loads((folder / "run.json").read_text(encoding="utf-8"))["seed"], "curve": curve}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Points of a game over decisions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for run in runs:
        played = [(one["env_steps"] / 1e6, one["return"]) for one in run["curve"] if one["return"] is not None]
        judged = [(one["env_steps"] / 1e6, one["eval"]) for one in run["curve"] if one["eval"] is not None]
        (drawn,) = axes.plot(*zip(*played, strict=True), lw=1, alpha=0.5)
        if judged:
            axes.plot(
                *zip(*judged, strict=True), "o-", ms=3, color=drawn.get_color(), label=f"greedy, seed {run['seed']}"
            )
    axes.set(xlabel="million decisions (4 frames each)", ylabel="points of a game", ylim=(-21.5, 21.5), title="pong")
    axes.axhline(0, color="0.8", lw=0.8, zorder=0)
    axes.legend(frameon=False)
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
    parser.add_argument("--steps", type=int, help="instead of the preset's")
    parser.add_argument("--env-steps", type=int, help="instead of a number of steps")
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
            settings, same = (
                dict([*flags, *size]),
                {"seed": seed} | ({"preset": a.preset} if a.preset != PRESET else {}),
            )
            key = same | {"settings": settings | budget}
            if any(
                {name: kept.get(name) for name in (*key, "preset")} == {"preset": None} | key
                for kept in read()["cells"]
            ):
                continue
            print(f"{a.preset} seed {seed} {settings}", flush=True)
            found = cell(a.preset, [*settings.items(), ("seed", str(seed))], a.steps, a.env_steps)
            write({"cells": [*read()["cells"], key | found]})
    table(read())


if __name__ == "__main__":
    main()
