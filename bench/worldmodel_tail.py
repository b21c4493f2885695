"""What a group of imagined futures can tell where the reward lies beyond their last step: horizon against tail.

    python bench/worldmodel_tail.py                                    # minutes on one core
    python bench/worldmodel_tail.py --task fetch --updates 4000        # the same where the way to the reward leads away
    python bench/worldmodel_tail.py --page docs/worldmodel.md          # runs nothing, writes the table
    python bench/worldmodel_tail.py --real reacher,cup --device cuda   # the tasks themselves, 3 seeds; hours on one GPU

`reach`: a point on a line is paid 1 a step near a target: reacher's structure in one dimension, without MuJoCo.
`fetch`: it is paid at the right end, but only once it has been at the left end; half of the episodes begin as if it
had.

For each seed one world model is learned from a random walk and then left as it is (`train_ratio=0`), so that all arms
of a seed dream in the same world and neither exploration nor the model's learning differs. An arm is a horizon, a tail
and a scale; its actor learns for so many steps from groups of futures that begin in states that were seen.

`blind` is the share of groups none of whose futures earns anything before its end, `progress`, over those groups, the
correlation within a group between what a future is judged by and how far it came the right way: 0 is noise. Both are
means of the first ten steps. `curve` has the mean real return of 30 greedy episodes of 40 steps, on fresh starts, after
so many steps of the actor. Cells that are in the file already are not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from pages import put_into

from grpo.worldmodel import GRPOTrainer
from grpo.worldmodel.imagine import Futures

RESULTS = Path(__file__).parent / "results"
LIMIT, RADIUS, END = 40, 0.15, 0.7
"""Steps of an episode, the target's radius, and where the ends of the line begin, which goes from −1 to 1."""
ARMS = (
    *((2, tail, scale) for scale in ("batch", "none") for tail in ("none", "fitted", "critic")),
    *((8, tail, "batch") for tail in ("none", "fitted")),
)
"""Horizon, tail, scale."""
LOOKS = (15, 30, 60)
"""Steps of an actor after which it is judged."""
WORLD = {"size": "0.5m", "vector": "serial", "video": False, "films": False, "batch_size": 16, "batch_length": 16}
ACTOR = {"groups_per_step": 16, "group_size": 8, "train_ratio": 0, "prefill": 400, "learning_rate": 1e-3}
REAL = {"group": {}, "fitted": {"tail": "fitted"}, "critic": {"tail": "critic"}, "long": {"horizon": "48"}}
"""Arms of the real tasks, each a change of the group actor's settings; DreamerV3's own actor runs beside them."""


class Line(gym.Env[np.ndarray, np.ndarray]):
    """A point between −1 and 1; the action is which way to go and how far."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    speed = 0.1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Anywhere."""
        super().reset(seed=seed)
        self.steps, self.at = 0, float(self.np_random.uniform(-1, 1))
        self.begin()
        return self.seen(), {}

    def step(self, action: np.ndarray) -> Any:
        """Go there."""
        self.at = float(np.clip(self.at + self.speed * np.clip(action[0], -1, 1), -1, 1))
        self.steps += 1
        return self.seen(), self.paid(), False, self.steps >= LIMIT, {}


class Reach(Line):
    """The target is anywhere, too."""

    def begin(self) -> None:
        self.target = float(self.np_random.uniform(-1, 1))

    def paid(self) -> float:
        return float(abs(self.at - self.target) < RADIUS)

    def seen(self) -> np.ndarray:
        return np.array([self.at, self.target - self.at], np.float32)


class Fetch(Line):
    """Left end first, then the right one pays."""

    speed = 0.2

    def begin(self) -> None:
        self.has = bool(self.np_random.integers(2))

    def paid(self) -> float:
        self.has |= self.at < -END
        return float(self.has and self.at > END)

    def seen(self) -> np.ndarray:
        return np.array([self.at, 1.0 if self.has else -1.0], np.float32)


TASKS = {"reach": Reach, "fetch": Fetch}


def world(task: str, seed: int, folder: Path, walked: int, updates: int) -> dict[str, Any]:
    """Learn the world of a seed from a random walk; what its reward head makes of it."""
    began = time.process_time()
    trainer = GRPOTrainer(
        env=TASKS[task],
        seed=seed,
        prefill=walked,
        pretrain=updates,
        horizon=1,
        learning_rate=1e-9,
        device="cpu",
        **WORLD,
    )
    trainer.train(steps=1, folder=folder, progress=None, evaluate_every=None)
    kept = trainer.source.replay.peek(64, 0)
    cell = {
        "task": task,
        "seed": seed,
        "walked": walked,
        "updates": updates,
        "paid": float(kept.batch["reward"].mean()),
        "model_loss": trainer.source.metrics()["model/loss"],
        "cpu_s": time.process_time() - began,
    }
    trainer.source.close()
    return cell


def told(trainer: Any, report: Any) -> dict[str, float]:
    """Of the first futures: groups that see no reward, and whether what they are judged by tells progress there."""
    source, config = trainer.source, trainer.config
    imagined = source._last
    group, horizon = config.group_size, config.horizon
    seen = Futures(imagined, source.model, source.policy)["vector"]
    moved_N = seen[:, -1, 0] - seen[:, 0, 0]
    nearer_N = seen[:, 0, 1].sign() * moved_N  # towards the target, or the end that comes next
    rows = report.experience.rollouts
    gamma_H = config.discount ** torch.arange(horizon)
    judged_N = (rows.reward_NT * gamma_H).sum(1)
    blind_P = (imagined.reward_NH.sum(1).view(-1, group) < 0.5).all(1)
    nearer, judged = (x.view(-1, group)[blind_P] for x in (nearer_N, judged_N))
    nearer, judged = (x - x.mean(1, keepdim=True) for x in (nearer, judged))
    each = (nearer * judged).sum(1) / (nearer.norm(dim=1) * judged.norm(dim=1)).clamp(min=1e-12)
    spread = judged.std(1).mean() if len(judged) else torch.tensor(float("nan"))
    return {"blind": float(blind_P.float().mean()), "progress": float(each.mean()), "blind_std": float(spread)}


def arm(task: str, seed: int, folder: Path, horizon: int, tail: str, scale: str) -> dict[str, Any]:
    """One actor in the seed's world."""
    began = time.process_time()
    more = {} if scale == "batch" else {"scale": scale}
    trainer = GRPOTrainer(
        env=TASKS[task], seed=seed, horizon=horizon, tail=tail, entropy_coef=3e-4, init_from=str(folder), device="cpu",
        **WORLD | ACTOR | more,
    )  # fmt: skip
    first: dict[str, list[float]] = {}
    curve = []
    for number in range(LOOKS[-1]):
        report = trainer.step()
        if number < 10:  # while all arms act about alike; a tail knows a little by then
            for name, value in told(trainer, report).items():
                first.setdefault(name, []).append(value)
        if number + 1 in LOOKS:
            curve.append(float(trainer.evaluate(30, seed=seed + 1000).return_E.mean()))
    found = {name: float(np.nanmean(values)) for name, values in first.items()}
    trainer.source.close()
    cell = {"task": task, "seed": seed, "horizon": horizon, "tail": tail, "scale": scale}
    return {**cell, **found, "curve": curve, "cpu_s": time.process_time() - began}


# --- tables ---------------------------------------------------------------------------------------------------------


def table(kept: dict[str, Any]) -> str:
    """Markdown: what each arm came to, a number a seed."""
    looks = [f"after {look}" for look in LOOKS]
    names = ["task", "horizon", "tail", "scale", "blind groups", "progress in them", *looks]
    lines = [f"| {' | '.join(names)} |", "|---|--:|---|---|" + "--:|" * (len(names) - 4)]
    for task in TASKS:
        for horizon, tail, scale in ARMS:
            chosen = (task, horizon, tail, scale)
            cells = [c for c in kept["cells"] if (c["task"], c["horizon"], c["tail"], c["scale"]) == chosen]
            if not cells:
                continue
            columns = [", ".join(f"{c['blind']:.2f}" for c in cells), ", ".join(f"{c['progress']:+.2f}" for c in cells)]
            columns += [", ".join(f"{c['curve'][i]:.1f}" for c in cells) for i in range(len(LOOKS))]
            lines.append(f"| {task} | {horizon} | {tail} | {scale} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The file as it is."""
    found: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"worlds": [], "cells": []}
    )
    return found


def keep(path: Path, kept: dict[str, Any]) -> None:
    """Write it whole."""
    kept["cells"].sort(key=lambda c: (c["task"], c["scale"], c["horizon"], c["tail"], c["seed"]))
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    written.replace(path)


def real(a: argparse.Namespace) -> None:
    """The tasks of the control suite, each arm as a file of its own beside DreamerV3's actor."""
    beside = Path(__file__).with_name("worldmodel_learning.py")
    for task in a.real.split(","):
        for name, changed in {**REAL, "dreamer": {}}.items():
            flags = [f"--set={key}={value}" for key, value in ({"size": "1m"} | changed).items()]
            actor = "critic" if name == "dreamer" else "group"
            command = [sys.executable, str(beside), "--task", task, "--name", f"tail_{task}_{name}", "--actors", actor]
            command += ["--seeds", a.seeds, "--device", a.device, "--env-steps", str(a.env_steps)]
            command += ["--out", str(a.out.parent), *flags]
            print(" ".join(command), flush=True)
            subprocess.run(command, check=True)


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--task", choices=TASKS, default="reach")
    parser.add_argument("--walked", type=int, default=1500, help="steps of the random walk")
    parser.add_argument("--updates", type=int, default=500, help="of a world model")
    parser.add_argument("--arms", help="HORIZON:TAIL:SCALE,… (all); scale none or batch")
    parser.add_argument("--real", help="of reacher, cup, swingup: the tasks themselves instead")
    parser.add_argument("--env-steps", type=int, default=20_000, help="decisions of a real task")
    parser.add_argument("--device", default="cpu", help="for --real")
    parser.add_argument("--worlds", type=Path, help="keep the worlds in this folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "worldmodel_tail.json")
    parser.add_argument("--page", type=Path, metavar="MD", help="run nothing; write the table into this page")
    a = parser.parse_args()
    if a.page is not None:
        put_into(a.page, "worldmodel_tail.py", table(read(a.out)))
        return
    if a.real:
        real(a)
        return
    torch.set_num_threads(1)
    kept, chosen = read(a.out), list(ARMS)
    if a.arms:
        chosen = [(int(h), tail, scale) for h, tail, scale in (item.split(":") for item in a.arms.split(","))]
    with tempfile.TemporaryDirectory() as place:
        for seed in map(int, a.seeds.split(",")):
            folder = (a.worlds or Path(place)) / f"{a.task}-{seed}"
            if not folder.exists():
                kept["worlds"] = [w for w in kept["worlds"] if (w["task"], w["seed"]) != (a.task, seed)]
                kept["worlds"].append(world(a.task, seed, folder, a.walked, a.updates))
                print(kept["worlds"][-1], flush=True)
            for arm_of in chosen:
                done = {(c["task"], c["seed"], c["horizon"], c["tail"], c["scale"]) for c in kept["cells"]}
                if (a.task, seed, *arm_of) in done:
                    continue
                cell = arm(a.task, seed, folder, *arm_of)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in cell.items()}, flush=True)
                kept["cells"].append(cell)
                keep(a.out, kept)
    print(table(kept))


if __name__ == "__main__":
    main()
