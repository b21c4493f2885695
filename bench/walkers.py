"""Walkers of MuJoCo: learning curves of ours without a critic, ours with one, and SB3's PPO with rl-zoo's settings.

    python bench/walkers.py --jobs 2                    # all that is missing, into bench/results/walkers.json
    python bench/walkers.py --tasks hopper --methods variants --jobs 2
    python bench/walkers.py --table --draw docs/figures/walkers.png --page docs/control.md
    python bench/walkers.py --parts --jobs 2 --page docs/control.md    # what HalfCheetah owes to parts of the value

A job is one (task, method, seed): a process with one thread, until its CPU seconds or its environment steps are spent.
A look every 10,000 steps is the mean greedy return of ten episodes on starts that nobody trains on, the same for
everybody; what looking costs is not counted. After each look the job writes its curve into a file of its own
(`--folder`), so a job that is cut leaves what it had, and is begun again next time. Reached means: at two looks in a
row. `ours` is the preset of the task's name, `critic` the same with advantage=critic, a variant the same with what
VARIANTS says, for fewer steps. --parts plays some variants on HalfCheetah, five seeds of their own, equally many steps
each, into bench/results/walkers_parts.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import control
import control_peers as peers
from pages import put_into

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "walkers.json"
PARTS = {
    "ours": "the preset: a value that is solved for",
    "critic": "a learned critic instead",
    "lambda-1": "λ = 1: only what was paid",
    "features-0": "no random features: linear in what is seen",
    "memory-0": "no memory of earlier steps",
    "start-linear": "no value to bootstrap from: whole episodes against their group, linear baseline",
}
PARTS_RESULTS = RESULTS.with_name("walkers_parts.json")
METHODS = ("sb3", "ours", "critic")
"""The slowest first, so that all end together."""
VARIANTS: dict[str, dict[str, Any]] = {
    "start-linear": {"group_by": "start", "advantage": "linear", "group_size": 8, "groups_per_step": 1},
    "far-sighted": {},
    "lambda-1": {"gae_lambda": 1.0},
    "lambda-0.95": {"gae_lambda": 0.95},
    "features-0": {"baseline_features": 0},
    "features-1024": {"baseline_features": 1024},
    "memory-0": {"baseline_memory": 0.0},
    "state-scale": {},
    "unscaled": {"scale_observations": False},
    "windows-512": {"group_size": 512},
    "start-fitted": {"group_by": "start", "group_size": 8, "groups_per_step": 1},
    "start-linear-64": {"group_by": "start", "advantage": "linear", "group_size": 32, "groups_per_step": 2},
    "start-step": {"group_by": "start", "advantage": "step", "group_size": 8, "groups_per_step": 1},
    "branch-one-out": {"group_by": "branch", "advantage": "leave_one_out", "group_size": 8, "groups_per_step": 2},
    "branch-linear": {"group_by": "branch", "advantage": "linear", "group_size": 8, "groups_per_step": 2},
    "branch-fitted": {"group_by": "branch", "group_size": 8, "groups_per_step": 2},
}
"""What else was tried in place of the preset's choices; state-scale: each advantage over its state's own deviation.
start-linear, which has no value to bootstrap from, and far-sighted are compared at full length too."""
FAR: dict[str, Any] = {"gamma": 0.999, "gae_lambda": 0.99}
"""How far Hopper's preset looked when everything but `ours` was measured: all of it there has these."""
VARIANT_STEPS = 100_000
COMPARED = ("hopper", "halfcheetah")
"""Tasks of the comparison; on the others ours is measured alone, and the other variants on the first of these."""
STARTS = 3_000_003
"""No setting was chosen on these starts, nor on the seeds from FIRST on."""
FIRST = 100
EVERY, EPISODES = 10_000, 10
SHOWN = ("ours", "far-sighted", "start-linear", "critic", "sb3")
THRESHOLDS = (1000, 1500)
"""Of both compared tasks; a hopper that only stands is paid some 1,000."""

TASKS = {
    "hopper": peers.Task("Hopper-v5", 1000, EVERY, episodes=EPISODES, first=STARTS),
    "halfcheetah": peers.Task("HalfCheetah-v5", 1500, EVERY, episodes=EPISODES, first=STARTS),
    "walker2d": peers.Task("Walker2d-v5", 1000, EVERY, episodes=EPISODES, first=STARTS),
    "swimmer": peers.Task("Swimmer-v5", 100, EVERY, episodes=EPISODES, first=STARTS),
    "reacher": peers.Task("Reacher-v5", -8, EVERY, episodes=EPISODES, first=STARTS),
}


def zoo() -> dict[str, dict[str, Any]]:
    """PPO settings of RL Baselines3 Zoo for Hopper-v4 and HalfCheetah-v4; of Walker2d, Swimmer and Reacher too."""
    from torch import nn

    wide = {"log_std_init": -2, "ortho_init": False, "activation_fn": nn.ReLU}
    wide["net_arch"] = {"pi": [256, 256], "vf": [256, 256]}
    shared = {"normalize": True, "n_envs": 1, "n_timesteps": 1e6, "n_steps": 512}
    return {
        "hopper": shared | {
            "batch_size": 32, "gamma": 0.999, "learning_rate": 9.80828e-05, "ent_coef": 0.00229519, "clip_range": 0.2,
            "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671, "policy_kwargs": wide,
        },
        "halfcheetah": shared | {
            "batch_size": 64, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762, "clip_range": 0.1,
            "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096, "policy_kwargs": wide,
        },
    }  # fmt: skip


@dataclass
class Curve(peers.Meter):
    """A meter that goes on after the threshold, and writes what it has after each look."""

    most_steps: int = 0
    file: Path = Path()
    row: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps = 0

    @property
    def over(self) -> bool:
        """Whether its time or its steps are spent."""
        return self.cpu_s > self.cap or self._steps >= self.most_steps

    def look(self, steps: int, evaluate: Callable[[range], float], last: bool = False) -> bool:
        """After an update: evaluate where it is due, aside from the clock; whether to stop."""
        self._steps = steps
        if (self.curve and steps <= self.curve[-1][0]) or (steps < self._next and not last and not self.over):
            return self.over
        self._next = (steps // self.task.every + 1) * self.task.every
        cpu_s, before = self.cpu_s, time.process_time()
        self.curve.append((steps, round(cpu_s, 3), round(evaluate(self.task.seeds), 2)))
        self.write(done=False)
        self._aside += time.process_time() - before
        return self.over

    def write(self, done: bool) -> None:
        """The job's file, whole or not at all."""
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps({**(self.row or {}), "done": done, "curve": self.curve}), encoding="utf-8")
        temporary.replace(self.file)


def job(task: str, method: str, seed: int, folder: Path, cap: float, steps: int, changes: dict[str, Any]) -> None:
    """Learn, in this process."""
    import torch

    torch.set_num_threads(1)
    peers.warm_up()
    peers.ZOO.update(zoo())
    chosen = TASKS[task]
    row = {"task": task, "method": method, "seed": seed, "cap_cpu_s": cap}
    short = method in VARIANTS and method not in SHOWN
    steps = min(steps, VARIANT_STEPS) if short else 1_000_000 if method == "sb3" else steps
    changes = {"critic": {"advantage": "critic"}, **VARIANTS}.get(method, {}) | changes
    changes = FAR | changes if task == "hopper" and method not in ("ours", "sb3") else changes
    row |= {"most_steps": steps, "versions": control.versions("sb3" if method == "sb3" else "ours", None)}
    row |= {"machine": platform.machine(), "changes": changes}
    meter = Curve(
        chosen, chosen.threshold, cap, most_steps=steps, file=folder / f"{task}-{method}-{seed}.json", row=row
    )
    if method == "sb3":
        peers.train_sb3(chosen, task, seed, meter)
    else:
        if method == "state-scale":
            divide_by_state()
        train(meter, task, seed, changes)
    meter.write(done=True)


def train(meter: Curve, task: str, seed: int, changes: dict[str, Any]) -> None:
    """The preset with some settings changed; those that these make impossible are left out."""
    from grpo.app.builders import configs
    from grpo.app.settings import flag_layer, preset_layer, resolve
    from grpo.control import make_trainer
    from grpo.control.play import play
    from grpo.envs.make import make_fleet

    flags = flag_layer([*changes.items(), ("seed", seed)])
    config = resolve([preset_layer(task), flags], configs()).config
    judged = make_fleet(meter.task.id, EPISODES, kind="serial")
    meter.start()
    trainer = make_trainer(config)
    source = trainer.source

    def evaluate(seeds: range) -> float:
        source.policy.eval()
        return float(play(judged, source.policy, source.scaling, list(seeds), None).return_N.mean())

    while not meter.over:
        trainer.step()
        meter.look(source.env_steps, evaluate)


def divide_by_state() -> None:
    """Have advantages divided by what a ridge fit of their squares, on the other half, expects at each state."""
    import numpy as np

    from grpo.control.baselines import room
    from grpo.control.baselines.fitted import FittedValue
    from grpo.core.advantages import ridge_baselines
    from grpo.envs.spaces import take

    class Scaled(FittedValue):
        def baseline(self, episodes: Any, reward_NT: Any, return_NT: Any, half_N: Any) -> Any:
            gain_NT = return_NT - super().baseline(episodes, reward_NT, return_NT, half_N)
            mask_NT = episodes.mask_NT
            half_M = np.repeat(half_N[:, None], mask_NT.shape[1], 1)[mask_NT]
            square_M = gain_NT[mask_NT] ** 2
            expected_M = ridge_baselines(self.features(take(episodes.raw, mask_NT)), square_M, half_M, (0.1,))[0]
            gain_NT[mask_NT] /= np.sqrt(np.maximum(expected_M, 0.1 * square_M.mean()) + 1e-12)
            return return_NT - gain_NT

    room.FittedValue = Scaled  # type: ignore[misc]


# --- many jobs -----------------------------------------------------------------------------------------------------


def schedule(args: argparse.Namespace) -> None:
    """The missing jobs, so many at a time; one that fails is told and left."""
    args.folder.mkdir(parents=True, exist_ok=True)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    asked = [each for name in args.methods.split(",") for each in (VARIANTS if name == "variants" else (name,))]
    waiting = [
        (task, method, seed)
        for method in (*METHODS, *VARIANTS) if method in asked
        for seed in seeds
        for task in args.tasks.split(",")
        if args.parts
        or method == "ours"
        or task in (COMPARED if method in (*METHODS, "start-linear") else COMPARED[:1])
        if not finished(args.folder / f"{task}-{method}-{seed}.json")
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | control.THREADS | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    running: dict[tuple[str, str, int], subprocess.Popen[bytes]] = {}
    begun = time.monotonic()
    while waiting or running:
        while waiting and len(running) < args.jobs:
            key = waiting.pop(0)
            told_to = ["--job", ",".join(map(str, key)), "--folder", str(args.folder.resolve())]
            told_to += ["--cap-cpu", str(args.cap_cpu), "--steps", str(args.steps), "--set", *args.set]
            running[key] = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), *told_to], env=env)
        time.sleep(0.5)
        for key in [key for key, process in running.items() if process.poll() is not None]:
            code = running.pop(key).returncode
            print(
                f"{time.monotonic() - begun:6.0f} s  {' '.join(map(str, key))}: {told(args.folder, key, code)}",
                flush=True,
            )


def finished(path: Path) -> bool:
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["done"]


def told(folder: Path, key: tuple[str, str, int], code: int) -> str:
    path = folder / f"{key[0]}-{key[1]}-{key[2]}.json"
    if not path.exists():
        return f"failed with {code}"
    steps, cpu_s, found = json.loads(path.read_text(encoding="utf-8"))["curve"][-1]
    return f"{found:.0f} after {steps:,} steps and {cpu_s:.0f} CPU-s" + (f", then failed with {code}" if code else "")


def merged(folder: Path, results: Path) -> list[dict[str, Any]]:
    """The rows of the file with those of the folder, which are newer; written back, a line a row."""
    rows = json.loads(results.read_text(encoding="utf-8"))["jobs"] if results.exists() else []
    rows += [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    kept = {(row["task"], row["method"], row["seed"]): row for row in rows}
    rows = sorted(kept.values(), key=lambda row: (list(TASKS).index(row["task"]), row["method"], row["seed"]))
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, rows))
    results.write_text(f'{{"jobs": [\n{lines}\n]}}\n', encoding="utf-8")
    return rows


# --- the table and the picture -------------------------------------------------------------------------------------


def reached(row: dict[str, Any], threshold: float) -> tuple[float, float]:
    """(environment steps, CPU seconds) at the second of two looks in a row at the threshold; infinite: never."""
    for before, now in itertools.pairwise(row["curve"]):
        if min(before[2], now[2]) >= threshold:
            return now[0], now[1]
    return math.inf, math.inf


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: medians with the smallest and the largest of the seeds."""
    lines = [
        "| task | method | reached | environment steps | CPU s | steps ÷ SB3 | CPU ÷ SB3 | best 5 looks | after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task, chosen in TASKS.items():
        of = {m: [r for r in rows if (r["task"], r["method"]) == (task, m)] for m in SHOWN}
        for threshold in THRESHOLDS if task in COMPARED else (chosen.threshold,):
            took = {m: [reached(row, threshold) for row in found] for m, found in of.items() if found}
            base = [[pair[i] for pair in took.get("sb3", [])] for i in (0, 1)]
            for method, pairs in took.items():
                steps, cpu = ([pair[i] for pair in pairs] for i in (0, 1))
                best = [statistics.mean(sorted(point[2] for point in row["curve"])[-5:]) for row in of[method]]
                spent = [statistics.median(row["curve"][-1][i] for row in of[method]) for i in (0, 1)]
                texts = [f"{threshold:g} by {sum(map(math.isfinite, steps))} of {len(pairs)}"]
                texts += [control.spread(steps, ",.0f"), control.spread(cpu, ".3g")]
                texts += [control.ratio(steps, base[0]), control.ratio(cpu, base[1]), control.spread(best, ",.0f")]
                lines.append(f"| {task} | {method} | {' | '.join(texts)} | {spent[0]:,.0f} steps, {spent[1]:.0f} s |")
    return "\n".join(lines) + "\n"


def variants_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean greedy return of the last five looks until VARIANT_STEPS, over the seeds; best first."""
    found = []
    for method in ("ours", "critic", "sb3", *VARIANTS):
        mine = [row for row in rows if (row["task"], row["method"]) == ("hopper", method)]
        looks = [[point for point in row["curve"] if point[0] < VARIANT_STEPS + EVERY] for row in mine]
        ends = [statistics.mean(point[2] for point in curve[-5:]) for curve in looks if curve]
        if ends:
            said = ", ".join(f"{name}={value}" for name, value in VARIANTS.get(method, {}).items())
            steps = statistics.median(curve[-1][0] for curve in looks if curve)
            text = f"{statistics.mean(ends):,.0f} ({min(ends):,.0f} – {max(ends):,.0f})"
            found.append((statistics.mean(ends), f"| {method} | {said} | {text} | {steps:,.0f} |"))
    head = ["| hopper | changed | return, last 5 looks | steps |", "|---|---|---|---|"]
    return "\n".join(head + [line for _, line in sorted(found, reverse=True)]) + "\n"


def parts_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: of each part the mean of the last five looks of every seed, and how the best look compares."""
    lines = [
        "| halfcheetah | last 5 looks, a seed each | median | best look, median | CPU s |",
        "|---|---|--:|--:|--:|",
    ]
    for method, told in PARTS.items():
        mine = [row for row in rows if row["method"] == method]
        ends = [statistics.mean(point[2] for point in row["curve"][-5:]) for row in mine]
        best, spent = ([pick(row["curve"]) for row in mine] for pick in (_best, lambda curve: curve[-1][1]))
        if mine:
            shown = ", ".join(f"{end:,.0f}" for end in ends)
            middles = (
                f"{statistics.median(ends):,.0f} | {statistics.median(best):,.0f} | {statistics.median(spent):.0f}"
            )
            lines.append(f"| {told} | {shown} | {middles} |")
    return "\n".join(lines) + "\n"


def _best(curve: list[Any]) -> float:
    return float(max(point[2] for point in curve))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Greedy return against environment steps and CPU seconds, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["method"] in SHOWN]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    colours = {
        "ours": "tab:blue",
        "far-sighted": "tab:cyan",
        "start-linear": "tab:purple",
        "critic": "tab:green",
        "sb3": "tab:orange",
    }
    names = {
        "ours": "ours, fitted value over windows",
        "far-sighted": "the same, γ 0.999",
        "start-linear": "ours, whole episodes, linear baseline",
    }
    names |= {"critic": "ours, critic over windows", "sb3": "SB3 PPO, rl-zoo"}
    figure = Figure(figsize=(9, 3.1 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    for line, task in zip(figure.subplots(len(tasks), 2, sharey="row", squeeze=False), tasks, strict=True):
        for axes, at, label in zip(line, (0, 1), ("thousand environment steps", "CPU seconds"), strict=True):
            for row in (row for row in rows if row["task"] == task):
                x, y = [point[at] / (1 if at else 1000) for point in row["curve"]], [point[2] for point in row["curve"]]
                axes.plot(x, y, color=colours[row["method"]], alpha=0.7, lw=1.1)
            axes.axhline(TASKS[task].threshold, color="black", lw=0.8, ls=":")
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
        line[1].set_xscale("log")
        line[1].xaxis.set_major_formatter("{x:g}")
        line[1].xaxis.set_minor_formatter("")
        line[0].set_ylabel(f"{TASKS[task].id}, greedy return")
    for method, colour in colours.items():
        if any(row["method"] == method for row in rows):
            figure.axes[0].plot([], [], color=colour, label=names[method])
    figure.axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(COMPARED), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"also variants, or some of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=FIRST)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--cap-cpu", type=float, default=600.0, help="CPU seconds of a job")
    parser.add_argument("--steps", type=int, default=400_000, help="environment steps of ours; SB3 has a million")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of ours to change")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "walkers", help="for the jobs' own files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--draw", type=Path, metavar="PNG")
    parser.add_argument("--page", type=Path, metavar="MD", help="write the tables into this page, between its marks")
    parser.add_argument("--parts", action="store_true", help=f"{', '.join(PARTS)} on HalfCheetah, five seeds")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parts:
        args.tasks, args.methods, args.seeds, args.first_seed = "halfcheetah", ",".join(PARTS), 5, 120
        args.steps, args.results = VARIANT_STEPS, PARTS_RESULTS
        args.folder = args.folder.with_name(f"{args.folder.name}-parts")
    if args.job:
        task, method, seed = args.job.split(",")
        changes = dict(item.split("=", 1) for item in args.set)
        job(task, method, int(seed), args.folder, args.cap_cpu, args.steps, changes)
        return
    if not args.table:
        schedule(args)
    rows = merged(args.folder, args.results)
    if args.parts:
        print(parts_table(rows), end="")
        if args.page:
            put_into(args.page, "walkers.py --parts", parts_table(rows))
        return
    tables = [table(rows)] + [variants_table(rows)] * any(row["method"] in VARIANTS for row in rows)
    print("\n".join(tables), end="")
    if args.page:
        picture = [f"![greedy return, a line a seed](figures/{args.draw.name})\n"] if args.draw else []
        put_into(args.page, "walkers.py", "\n".join(tables + picture))
    if args.draw:
        draw(rows, args.draw)


if __name__ == "__main__":
    main()
