"""Walkers in minutes of a whole machine: greedy return by the clock of the wall, ours without a critic and SB3's PPO.

    python bench/walkers_minutes.py                                    # 24 jobs of 5 minutes: 2 hours
    python bench/walkers_minutes.py --tasks hopper --methods ours --seeds 100 --minutes 5
    python bench/walkers_minutes.py --table

One job at a time has all cores. `ours` is the preset with what OURS says: 64 streams, stepped by MuJoCo's own
threads, or in processes where a task has none. `sb3` is PPO with rl-zoo's settings in as many processes as there are
cores (SubprocVecEnv; a rollout stays as long as rl-zoo's, divided among them). A look is the mean greedy return of
ten episodes on starts that nobody trains on, every `--every` seconds; what looking costs is not on the clock, nor are
imports and the start of processes. The figure is the mean of the last three looks. No setting was chosen on the seeds
from 100 on. Writes bench/results/walkers_minutes.json after every job; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import control
import control_peers as peers
import walkers

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "walkers_minutes.json"
AIMS = {"hopper": 2500, "walker2d": 3500, "halfcheetah": 4000, "ant": 3500}
STREAMS = {"groups_per_step": 64, "group_size": 64, "decisions_per_minibatch": 512, "learning_rate": 7e-4}
OURS: dict[str, dict[str, Any]] = {
    "hopper": STREAMS | {"vector": "mujoco"},
    "walker2d": STREAMS | {"vector": "mujoco"},
    "halfcheetah": STREAMS | {"vector": "mujoco"},
    "ant": STREAMS,
}
IDS = {"hopper": "Hopper-v5", "walker2d": "Walker2d-v5", "halfcheetah": "HalfCheetah-v5", "ant": "Ant-v5"}
ZOO = {
    "walker2d": {
        "normalize": True, "n_steps": 512, "batch_size": 32, "gamma": 0.99, "learning_rate": 5.05041e-05,
        "ent_coef": 0.000585045, "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.95, "max_grad_norm": 1,
        "vf_coef": 0.871923,
    },
    "ant": {"normalize": True},
}  # fmt: skip
"""RL Baselines3 Zoo's for Walker2d-v4; for Ant it has PPO's defaults. The others' are in `walkers.zoo`."""


class Clock:
    """Seconds of the wall less what looking took, and the looks."""

    def __init__(self, seconds: float, every: float) -> None:
        self._limit, self._every, self._next, self._aside = seconds, every, every, 0.0
        self.curve: list[tuple[int, float, float]] = []
        self._begun = time.perf_counter()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._begun - self._aside

    def look(self, steps: int, evaluate: Any) -> bool:
        """After an update: look where it is due; whether the time is over."""
        spent, over = self.spent, self.spent >= self._limit
        if spent >= self._next or over:
            self._next = (spent // self._every + 1) * self._every
            before = time.perf_counter()
            self.curve.append((steps, round(spent, 1), round(float(evaluate()), 1)))
            self._aside += time.perf_counter() - before
            print(f"  {steps:,} steps {spent:.0f} s {self.curve[-1][2]:.0f}", file=sys.stderr, flush=True)
        return over


def starts() -> range:
    return range(walkers.STARTS, walkers.STARTS + walkers.EPISODES)


def train_ours(task: str, seed: int, args: argparse.Namespace) -> Clock:
    """The preset, with more streams."""
    from grpo.app.builders import configs
    from grpo.app.settings import flag_layer, preset_layer, resolve
    from grpo.control import make_trainer
    from grpo.control.play import play
    from grpo.envs.make import make_fleet

    changes = OURS[task] | dict(item.split("=", 1) for item in args.set)
    config = resolve([preset_layer(task), flag_layer([*changes.items(), ("seed", seed)])], configs()).config
    judge = make_fleet(IDS[task], walkers.EPISODES, kind="serial" if task == "ant" else "mujoco")
    trainer = make_trainer(config)
    source = trainer.source

    def evaluate() -> float:
        source.policy.eval()
        return float(play(judge, source.policy, source.scaling, list(starts()), None).return_N.mean())

    clock = Clock(60 * args.minutes, args.every)
    while True:
        trainer.step()
        if clock.look(source.env_steps, evaluate):
            source.close()
            return clock


def train_sb3(task: str, seed: int, args: argparse.Namespace) -> Clock:
    """PPO of Stable-Baselines3 in processes."""
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

    settings = dict((walkers.zoo() | ZOO)[task])
    for name in ("n_envs", "n_timesteps", "normalize"):
        settings.pop(name, None)
    count = os.cpu_count() or 1
    length = settings.pop("n_steps", 2048)
    env = SubprocVecEnv([lambda s=s: gym.make(IDS[task]) for s in range(count)], start_method="fork")
    env.seed(seed)
    scaled = VecNormalize(env, gamma=settings.get("gamma", 0.99))
    model = PPO("MlpPolicy", scaled, seed=seed, device="cpu", n_steps=max(length // count, 32), **settings)
    judge = gym.make(IDS[task])

    def evaluate() -> float:
        totals = []
        for start in starts():
            seen, _ = judge.reset(seed=start)
            total, over = 0.0, False
            while not over:
                action, _ = model.predict(scaled.normalize_obs(seen), deterministic=True)
                seen, reward, terminated, truncated, _ = judge.step(action)
                total, over = total + float(reward), terminated or truncated
            totals.append(total)
        return statistics.mean(totals)

    clock = Clock(60 * args.minutes, args.every)

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return clock.spent < 60 * args.minutes

        def _on_rollout_start(self) -> None:
            clock.look(self.num_timesteps, evaluate)

    model.learn(10**9, callback=Look())
    if not clock.curve or clock.curve[-1][0] < model.num_timesteps:
        clock.curve.append((model.num_timesteps, round(clock.spent, 1), round(evaluate(), 1)))
    scaled.close()
    return clock


def job(args: argparse.Namespace) -> None:
    """One job, in this process; its row on the last line."""
    task, method, seed = args.job.split(",")
    clock = (train_sb3 if method == "sb3" else train_ours)(task, int(seed), args)
    row = {"task": task, "method": method, "seed": int(seed), "minutes": args.minutes, "curve": clock.curve}
    row |= {"cores": os.cpu_count(), "load": os.getloadavg()[0], "machine": platform.machine(), "set": args.set}
    print(json.dumps(row | {"versions": control.versions("sb3" if method == "sb3" else "ours", None)}))


def ended_at(row: dict[str, Any]) -> float:
    """Mean of its last three looks."""
    return statistics.mean(look[2] for look in row["curve"][-3:])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line a task and a method."""
    lines = [
        "| task | aim | method | minutes, cores | return, a seed each | reached | steps, median |",
        "|---" * 7 + "|",
    ]
    for task, aim in AIMS.items():
        for key in sorted({(r["method"], r["minutes"], r["cores"]) for r in rows if r["task"] == task}):
            mine = [r for r in rows if (r["task"], r["method"], r["minutes"], r["cores"]) == (task, *key)]
            ends = [ended_at(row) for row in mine]
            steps = statistics.median(row["curve"][-1][0] for row in mine)
            shown = ", ".join(f"{end:,.0f}" for end in ends)
            lines.append(
                f"| {task} | {aim:,} | {key[0]} | {key[1]:g}, {key[2]} | {shown} | "
                f"{sum(end >= aim for end in ends)} of {len(ends)} | {steps:,.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(AIMS))
    parser.add_argument("--methods", default="ours,sb3")
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between looks")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of ours, beside OURS")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        peers.ZOO.update(walkers.zoo())
        return job(args)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["jobs"] if RESULTS.exists() else []
    told = ["--minutes", str(args.minutes), "--every", str(args.every), "--set", *args.set]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for seed in [] if args.table else map(int, args.seeds.split(",")):
        for task in args.tasks.split(","):
            for method in args.methods.split(","):
                key = {"task": task, "method": method, "seed": seed, "minutes": args.minutes, "cores": os.cpu_count()}
                if any({name: row[name] for name in key} == key for row in rows):
                    continue
                command = [sys.executable, __file__, "--job", f"{task},{method},{seed}", *told]
                env = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    print(f"{task} {method} {seed}: failed with {done.returncode}", flush=True)
                    continue
                rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(f"{task} {method} {seed}: {ended_at(rows[-1]):,.0f}", flush=True)
                lines = ",\n".join(map(json.dumps, rows))
                RESULTS.write_text(f'{{"jobs": [\n{lines}\n]}}\n', encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
