"""Meta-World from a few shown episodes: success of each task after imitation and after minutes of GRPO, a seed a cell.

    python bench/mt10.py --seeds 0,1                          # MT10, 15 minutes a seed, all cores
    python bench/mt10.py --tasks window-open-v3 --seconds 120 --seeds 0 --set group_size=4
    python bench/mt10.py --table

A cell is the preset `metaworld-mt10`, whose only reward is success. Exactly `--shown` (5) episodes a task that
succeeded are recorded from Meta-World's scripts first, and are all that is imitated. The clock is of the wall,
imitation included, evaluations not. Success is of greedy episodes on `--episodes` (20) starts a task that nobody
trains on, with Wilson's 95 % interval over all of them. Cells that are in the file already are not run again. Writes
bench/results/mt10.json. Needs metaworld and a MuJoCo before 3.12.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.app.builders import configs
from grpo.app.look import FRESH
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.control import GRPOTrainer
from grpo.control.config import ControlConfig
from grpo.control.play import play
from grpo.envs.fleet import Fleet
from grpo.envs.make import make_fleet
from grpo.envs.metaworld import expert, names
from grpo.seeding import start_seeds
from grpo.statistics import wilson

PATH = Path(__file__).resolve().parent / "results" / "mt10.json"
ENV = "grpo.envs.metaworld:MetaWorld"


def alone(task: str, copies: int, config: ControlConfig) -> Fleet:
    """A task by itself, as the preset plays it."""
    kwargs = config.env_kwargs | {"tasks": [task]}
    return make_fleet(ENV, copies, kind="serial", kwargs=kwargs, horizon=config.max_episode_steps)


def shown(tasks: list[str], episodes: int, config: ControlConfig, seed: int, path: Path) -> Path:
    """A file with so many episodes of each task in which its script succeeded."""
    seen, done, number, at = [], [], [], 0
    for task in tasks:
        fleet = alone(task, 1, config)
        kept = 0
        for start in start_seeds([seed, tasks.index(task)], 20 * episodes, held_out=False):
            now, rows, over, won = fleet.reset([0], [start]).observation[0], [], False, False
            while not over:
                action = expert(now)
                rows.append((now, action))
                stepped = fleet.step([0], action[None])
                now, won = stepped.observation[0], bool(stepped.success_M is not None and stepped.success_M[0] == 1.0)
                over = won or not stepped.going_M[0]
            if won:
                seen += [row[0] for row in rows]
                done += [row[1] for row in rows]
                number += [at] * len(rows)
                at, kept = at + 1, kept + 1
            if kept == episodes:
                break
        fleet.close()
    np.savez(path, observation=np.array(seen), action=np.array(done), episode=np.array(number))
    return path


def judged(trainer: GRPOTrainer, tasks: list[str], episodes: int, seed: int) -> dict[str, Any]:
    """Share of each task, and of all with an interval."""
    shares, every = {}, []
    for task in tasks:
        fleet = alone(task, 4, trainer.config)
        starts = start_seeds([seed + FRESH, len(shares)], episodes, held_out=True)
        played = play(fleet, trainer.policy, trainer.source.scaling, starts, None, trainer.config.rules)
        won = (played.success_N == 1.0).astype(float)
        shares[task], every = float(won.mean()), [*every, *won.tolist()]
        fleet.close()
    low, high = wilson(np.array(every))
    return {"success": float(np.mean(every)), "low": low, "high": high, "tasks": shares}


def cell(args: argparse.Namespace, tasks: list[str], seed: int) -> dict[str, Any]:
    """Record, imitate, learn until the time is over."""
    with tempfile.TemporaryDirectory() as folder:
        preset = resolve([preset_layer("metaworld-mt10")], configs()).config
        file = shown(tasks, args.shown, preset, seed, Path(folder) / "shown.npz")
        kwargs = preset.env_kwargs | {"tasks": tasks}
        flags = [("warm_start", str(file)), ("env_kwargs", kwargs), ("seed", seed), ("eval_episodes", 10)]
        flags += [tuple(item.split("=", 1)) for item in args.set]
        config = resolve([preset_layer("metaworld-mt10"), flag_layer(flags)], configs()).config
        trainer = GRPOTrainer(config=config)
        begun = time.perf_counter()
        trainer.source.warm_up()
        aside, imitated = 0.0, time.perf_counter()
        found: dict[str, Any] = {"imitating": judged(trainer, tasks, args.episodes, seed)}
        print(f"seed {seed}: {found['imitating']['success']:.0%} after imitation", flush=True)
        aside += time.perf_counter() - imitated
        curve, step, due = [], 0, args.every
        while (spent := time.perf_counter() - begun - aside) < args.seconds:
            step += 1
            report = trainer.step()
            if spent >= due:
                due += args.every
                before = time.perf_counter()
                curve.append([step, report["env_steps"], round(spent, 1), report.get("success")])
                print(f"  {step} {report['env_steps']:,.0f} steps {spent:.0f} s {report.get('success')}", flush=True)
                aside += time.perf_counter() - before
        found |= {"trained": judged(trainer, tasks, args.episodes, seed), "steps": step, "seconds": spent}
        found |= {"env_steps": trainer.source.env_steps, "curve": curve}
        trainer.source.close()
    print(f"seed {seed}: {found['trained']['success']:.0%} after {step} steps", flush=True)
    return found


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: a line a cell."""
    lines = ["| tasks | seed | after imitation | after GRPO | environment steps | seconds | cores |", "|---" * 7 + "|"]
    for one in cells:
        shares = [
            f"{part['success']:.0%} [{100 * part['low']:.0f}, {100 * part['high']:.0f}]"
            for part in (one["imitating"], one["trained"])
        ]
        tasks = "MT10" if len(one["tasks"]) == 10 else ", ".join(one["tasks"])
        lines.append(
            f"| {tasks} | {one['seed']} | {' | '.join(shares)} | {one['env_steps']:,} | {one['seconds']:.0f} | "
            f"{one['cores']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="", help="some of MT10's, with commas; none: all ten")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two lines of the curve")
    parser.add_argument("--shown", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=20, help="of each task, at an evaluation")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"] if PATH.exists() else []
    if not args.table:
        torch.set_num_threads(1)
        tasks = args.tasks.split(",") if args.tasks else names("MT10")
        for seed in map(int, args.seeds.split(",")):
            key = {"tasks": tasks, "seed": seed, "limit_s": args.seconds, "shown": args.shown, "set": args.set}
            if any({name: kept[name] for name in key} == key for kept in cells):
                continue
            versions = {name: metadata.version(name) for name in ("metaworld", "mujoco", "torch")}
            about = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "machine": platform.machine()}
            cells.append(key | cell(args, tasks, seed) | about | {"versions": versions})
            lines = ",\n".join(map(json.dumps, cells))
            PATH.write_text(f'{{"cells": [\n{lines}\n]}}\n', encoding="utf-8")
    print(table(cells))


if __name__ == "__main__":
    main()
