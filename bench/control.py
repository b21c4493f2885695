"""How fast control tasks are learned: ours against SB3's PPO, CleanRL's PPO and a plain loop. One thread each.

    python bench/control.py --tasks cartpole,acrobot --seeds 5 --cleanrl path/to/cleanrl
    python bench/control.py --table

A cell is one (task, peer, seed), in a process of its own: CPU seconds and environment steps until the mean greedy
return over 20 starts (FrozenLake 200), the same for everybody and never trained on, has reached the task's threshold
at two looks in a row. Imports and evaluations are not counted. Ours are the presets of the same names; `ours-64` is
ours with hidden layers as wide as SB3's. Cells run seed by seed, so that a noisy hour hits all peers alike. `rollout`
is a task of another kind: environment steps a CPU second while only playing.

Raw rows go to bench/results/control.json; cells that are there are kept unless --again. --table makes the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "control.json"
PEERS = ("ours", "ours-64", "sb3", "cleanrl", "tutorial")
ROLLOUT = "rollout"
TIER_A = ("cartpole", "acrobot", "inverted-pendulum", "pendulum", "frozenlake", "minigrid-empty")
TIER_B = ("lunarlander", "taxi", "mountaincar", "minigrid-doorkey")
ORDER = (*TIER_A, *TIER_B)
"""Tasks as they are shown."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


# --- ours ----------------------------------------------------------------------------------------------------------


def train_ours(meter: Any, task: str, seed: int, **changes: Any) -> None:
    """Learn with the preset of this name until the threshold or the cap."""
    from grpo.app.builders import configs
    from grpo.app.settings import preset_layer, resolve
    from grpo.control import make_trainer
    from grpo.control.play import play
    from grpo.envs.make import make_fleet
    from grpo.envs.rules import EpisodeRules

    config = resolve([preset_layer(task)], configs()).config.but(seed=seed, **changes)
    judged = make_fleet(meter.task.id, 100, kind="serial")
    meter.start()
    trainer = make_trainer(config)
    source = trainer.source

    def evaluate(seeds: range) -> float:
        source.policy.eval()
        played = play(judged, source.policy, source.scaling, list(seeds), None, EpisodeRules(config.action_repeat))
        return float(played.return_N.mean())

    while not meter.over:
        trainer.step()
        meter.look(source.env_steps, evaluate)


def rollout_ours(seed: int, repeats: int = 5, steps: int = 50_000, episodes: int = 512) -> list[float]:
    """Environment steps a CPU second of collecting alone: CartPole, a policy of 64-64, as many seats as by default."""
    import time

    from grpo.control import ControlConfig, make_trainer
    from grpo.protocols import CollectRequest

    config = ControlConfig(env="CartPole-v1", hidden=(64, 64), group_size=8, groups_per_step=episodes // 8, seed=seed)
    source = make_trainer(config).source
    rates = []
    for repeat in range(repeats + 1):
        start, before, call = time.process_time(), source.env_steps, 0
        while source.env_steps - before < steps:
            source.collect(CollectRequest(step=1000 * repeat + call))
            call += 1
        rates.append((source.env_steps - before) / (time.process_time() - start))
    return rates[1:]  # the first loads and builds


# --- one cell, in its own process ----------------------------------------------------------------------------------


def cell(task: str, peer: str, seed: int, cap: float, cleanrl: str | None) -> dict[str, Any]:
    """Run one peer on one task with one seed; the row."""
    import control_peers as peers
    import torch

    torch.set_num_threads(1)
    peers.warm_up()
    if task == ROLLOUT:
        rates = {"ours": rollout_ours, "sb3": peers.rollout_sb3}[peer](seed)
        return {"steps_per_cpu_s": statistics.median(rates), "repeats": rates}
    chosen = peers.TASKS[task]
    meter = peers.Meter(chosen, chosen.threshold, cap)
    if peer in ("ours", "ours-64"):
        train_ours(meter, task, seed, **({} if peer == "ours" else {"hidden": (64, 64)}))
    elif peer == "sb3":
        peers.train_sb3(chosen, task, seed, meter)
    elif peer == "cleanrl":
        peers.train_cleanrl(Path(cleanrl or ""), chosen, seed, meter)
    else:
        peers.train_tutorial(chosen, seed, meter)
    return meter.result() | {"threshold": chosen.threshold, "cap": cap}


def why_not(task: str, peer: str, cleanrl: str | None) -> str | None:
    """Why this cell cannot be run; None: it can."""
    if task == ROLLOUT:
        return None if peer in ("ours", "sb3") else "it has no rollout of its own to time"
    if peer == "ours-64" and task != "cartpole":
        return "it is measured on cartpole alone"
    if peer == "cleanrl":
        if cleanrl is None:
            return "give a checkout of it with --cleanrl PATH"
        if not (Path(cleanrl) / "cleanrl" / "ppo.py").exists():
            return f"{cleanrl} holds no cleanrl/ppo.py"
    if peer in ("cleanrl", "tutorial"):
        from control_peers import TASKS

        if not TASKS[task].discrete or not TASKS[task].flat or TASKS[task].wrap:
            return "it plays only discrete actions from a vector of numbers"
    return None


def run(task: str, peer: str, seed: int, cap: float, cleanrl: str | None) -> dict[str, Any]:
    """The cell's row from a fresh process; its error where it failed."""
    asked = json.dumps({"task": task, "peer": peer, "seed": seed, "cap": cap, "cleanrl": cleanrl})
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as aside:  # for logs that libraries leave where they run
        done = subprocess.run(
            [sys.executable, Path(__file__).resolve(), "--cell", asked],
            cwd=aside,
            env=os.environ | THREADS | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    row = {"task": task, "peer": peer, "seed": seed, "versions": versions(peer, cleanrl), "machine": platform.machine()}
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output"}
    return row | json.loads(done.stdout.splitlines()[-1])


def versions(peer: str, cleanrl: str | None) -> dict[str, str]:
    """Of everything that bears on a cell."""
    packages = ["torch", "numpy", "gymnasium"] + (["stable-baselines3"] if peer == "sb3" else [])
    found = {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    if peer == "cleanrl" and cleanrl:
        head = subprocess.run(["git", "-C", cleanrl, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        found["cleanrl"] = head.stdout.strip() or "unknown"
    return found


# --- the table -----------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown from the rows: medians with the smallest and largest, and the ratio of medians to SB3's."""
    rows = [row for row in rows if "error" not in row]
    learned = [row for row in rows if row["task"] != ROLLOUT]
    lines = []
    if learned:
        lines += [
            "| task | peer | reached | CPU seconds | environment steps | CPU ÷ SB3 | steps ÷ SB3 |",
            "|---|---|---|---|---|---|---|",
        ]
    for task in sorted({row["task"] for row in learned}, key=ORDER.index):
        of = {peer: [r for r in learned if (r["task"], r["peer"]) == (task, peer)] for peer in PEERS}
        for peer, cells in of.items():
            if not cells:
                continue
            reached = sum(row["reached"] for row in cells)
            texts = [f"{reached} of {len(cells)}"]
            texts += [spread(until(cells, key), form) for key, form in (("cpu_s", ".3g"), ("env_steps", ",.0f"))]
            texts += [ratio(until(cells, key), until(of["sb3"], key)) for key in ("cpu_s", "env_steps")]
            lines.append(f"| {task} | {peer} | {' | '.join(texts)} |")
    played = {peer: [r for r in rows if (r["task"], r["peer"]) == (ROLLOUT, peer)] for peer in PEERS}
    if any(played.values()):
        lines += [""] if lines else []
        lines += ["| playing alone | environment steps a CPU second | ÷ SB3 |", "|---|---|---|"]
        rates = {peer: [row["steps_per_cpu_s"] for row in cells] for peer, cells in played.items() if cells}
        lines += [f"| {peer} | {spread(r, ',.0f')} | {ratio(r, rates.get('sb3', []))} |" for peer, r in rates.items()]
    return "\n".join(lines) + "\n"


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """In words: the threshold, what 100 further starts say, and where cells that never reached it stood."""
    rows = [row for row in rows if "error" not in row and row["task"] != ROLLOUT]
    if not rows:
        return []
    lines = [
        f"Threshold {rows[0]['threshold']:g}. On 100 further starts the policies that had reached it gave, on average:"
    ]
    for peer in PEERS:
        further = [row["confirmed_return"] for row in rows if row["peer"] == peer and row["reached"]]
        if further:
            lines.append(f"{peer} {statistics.mean(further):.4g} (least {min(further):.4g});")
    lines[-1] = lines[-1].replace(";", ".")
    for row in rows:
        if not row["reached"]:
            best = max(point[2] for point in row["curve"])
            lines.append(
                f"{row['peer']}, seed {row['seed']}, was stopped at {row['cap']:g} CPU-s; its best look was {best:.4g}."
            )
    return [" ".join(lines), ""]


def figures(rows: list[dict[str, Any]], folder: Path) -> None:
    """A picture a task: greedy return against environment steps and CPU seconds, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    colours = dict(zip(PEERS, ("tab:blue", "tab:cyan", "tab:orange", "tab:green", "tab:red"), strict=True))
    for task in ORDER:
        cells = [row for row in rows if row["task"] == task and "curve" in row]
        if not cells:
            continue
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, at, label in zip(
            figure.subplots(1, 2, sharey=True), (0, 1), ("environment steps", "CPU seconds"), strict=True
        ):
            for row in cells:
                x, y = [p[at] for p in row["curve"]], [p[2] for p in row["curve"]]
                axes.plot(x, y, color=colours[row["peer"]], alpha=0.7, lw=1.2)
            axes.axhline(cells[0]["threshold"], color="black", lw=0.8, ls=":")
            axes.set_xscale("log")
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
        for peer in PEERS:
            if any(row["peer"] == peer for row in cells):
                figure.axes[0].plot([], [], color=colours[peer], label=peer)
        figure.axes[0].legend(fontsize=8)
        figure.axes[0].set_ylabel("greedy return")
        figure.suptitle(f"{task}: a line a seed, until the threshold was reached twice in a row", fontsize=10)
        figure.savefig(folder / f"control-{task}.png", dpi=80)


def until(cells: list[dict[str, Any]], key: str) -> list[float]:
    """What it took; infinitely much where the threshold was never reached."""
    return [row[key] if row["reached"] else math.inf for row in cells]


def spread(values: list[float], form: str) -> str:
    if not math.isfinite(min(values)):
        return "never"
    text = [
        format(v, form) if math.isfinite(v) else "never" for v in (statistics.median(values), min(values), max(values))
    ]
    return f"{text[0]} ({text[1]} – {text[2]})"


def ratio(values: list[float], base: list[float]) -> str:
    if not base or not math.isfinite(statistics.median(base)) or not math.isfinite(statistics.median(values)):
        return "–"
    return f"{statistics.median(values) / statistics.median(base):.2f}"


# --- the command ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="cartpole,acrobot", help="names of control_peers.TASKS, and rollout")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0, help="e.g. one that no preset was tuned on")
    parser.add_argument("--cap-cpu", type=float, default=120.0, help="CPU seconds after which a cell gives up")
    parser.add_argument(
        "--cleanrl", type=os.path.abspath, help="a checkout of CleanRL; without it that peer is left out"
    )
    parser.add_argument("--again", action="store_true", help="run cells that are in the results already")
    parser.add_argument("--table", action="store_true", help="run nothing: make the table from the results")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="also draw learning curves into this folder")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(cell(**json.loads(args.cell))))
        return
    rows = json.loads(args.results.read_text(encoding="utf-8"))["cells"] if args.results.exists() else []
    if not args.table:
        rows = measured(args, rows)
    text = table(rows)
    args.results.with_suffix(".md").write_text(text, encoding="utf-8")
    if args.figures:
        figures(rows, args.figures)
    print(text, end="")


def measured(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with those of the cells that were asked for and missing; written after each."""
    tasks, peers = args.tasks.split(","), args.peers.split(",")
    skipped = {(task, peer): why_not(task, peer, args.cleanrl) for task in tasks for peer in peers}
    for (task, peer), reason in skipped.items():
        if reason:
            print(f"{task} {peer}: left out, {reason}")
    cells = [
        (t, p, s)
        for s in range(args.first_seed, args.first_seed + args.seeds)
        for t in tasks
        for p in peers
        if not skipped[t, p]
    ]
    args.results.parent.mkdir(exist_ok=True)
    for at, (task, peer, seed) in enumerate(cells, 1):
        kept = {(row["task"], row["peer"], row["seed"]): row for row in rows}
        if (task, peer, seed) in kept and "error" not in kept[task, peer, seed] and not args.again:
            continue
        print(f"[{at}/{len(cells)}] {task} {peer} seed {seed}: ", end="", flush=True)
        row = kept[task, peer, seed] = run(task, peer, seed, args.cap_cpu, args.cleanrl)
        print(told(row), flush=True)
        rows = [kept[key] for key in sorted(kept)]
        temporary = args.results.with_suffix(".tmp")
        lines = ",\n".join(json.dumps(row) for row in rows)
        temporary.write_text(f'{{"cells": [\n{lines}\n]}}\n', encoding="utf-8")
        temporary.replace(args.results)
    return rows


def told(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed, {row['error']}"
    if row["task"] == ROLLOUT:
        return f"{row['steps_per_cpu_s']:,.0f} steps a CPU second"
    verb = "reached" if row["reached"] else "did not reach"
    took = f"{row['cpu_s']:.1f} CPU-s, {row['env_steps']:,} steps"
    return f"{verb} {row['threshold']:g} ({row['final_return']:.1f}) in {took}"


if __name__ == "__main__":
    main()
