"""Walkers in minutes of a whole machine: greedy return by the clock of the wall, ours without a critic and SB3's PPO.

    python bench/walkers_minutes.py                                    # 24 jobs of 5 minutes: 2 hours
    python bench/walkers_minutes.py --tasks hopper --methods ours --seeds 100 --minutes 5
    python bench/walkers_minutes.py --table

One job at a time has all cores that this process may use (`taskset -c 0-3 python bench/walkers_minutes.py`: four).
`ours` is the preset, its streams stepped by MuJoCo's own threads, or in processes where a task has none. `sb3` is PPO
with rl-zoo's settings in as many processes as there are cores (SubprocVecEnv; a rollout stays as long as rl-zoo's,
divided among them). A look is the mean greedy return of ten episodes on starts that nobody trains on, every `--every`
seconds; what looking costs is not on the clock, nor are imports and the start of processes. Two figures: what the
minutes leave, that is the policy of the best look, judged anew on twenty other starts, as `best_by` keeps it for a
user; and the mean of the last three looks, which says how steady it is. No setting was chosen on the seeds from 100 on.
Writes bench/results/walkers_minutes.json after every job; what is there is not run again. The table and the curves go
into docs/control.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import control
import control_peers as peers
import walkers
from pages import put_into

from grpo.processors import processors

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "walkers_minutes.json"
PAGE = ROOT / "docs" / "control.md"
FIGURE = ROOT / "docs" / "figures" / "walkers-minutes.png"
AIMS = {"hopper": 2500, "walker2d": 3500, "halfcheetah": 4000, "ant": 3500}
OURS: dict[str, dict[str, Any]] = {
    "hopper": {"vector": "mujoco"},
    "walker2d": {"vector": "mujoco"},
    "halfcheetah": {"vector": "mujoco"},
    "ant": {},
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


Judge = Callable[[range], float]
"""Mean greedy return on these starts."""


class Clock:
    """Seconds of the wall less what looking took, the looks, and the best of them."""

    def __init__(self, seconds: float, every: float, judge: Judge, policy: Any) -> None:
        self._limit, self._every, self._next, self._aside = seconds, every, every, 0.0
        self._judge, self._policy, self._best = judge, policy, (-float("inf"), None)
        self.curve: list[tuple[int, float, float]] = []
        self._begun = time.perf_counter()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._begun - self._aside

    def look(self, steps: int) -> bool:
        """After an update: look where it is due; whether the time is over."""
        spent, over = self.spent, self.spent >= self._limit
        if spent >= self._next or over:
            self._next = (spent // self._every + 1) * self._every
            before = time.perf_counter()
            found = self._judge(LOOKS)
            if found > self._best[0]:
                self._best = found, copy.deepcopy(self._policy())
            self.curve.append((steps, round(spent, 1), round(found, 1)))
            self._aside += time.perf_counter() - before
            print(f"  {steps:,} steps {spent:.0f} s {self.curve[-1][2]:.0f}", file=sys.stderr, flush=True)
        return over

    def kept(self) -> Any:
        """The policy of the best look."""
        return self._best[1]


LOOKS = range(walkers.STARTS, walkers.STARTS + walkers.EPISODES)
FRESH = range(LOOKS.stop, LOOKS.stop + 2 * walkers.EPISODES)


def train_ours(task: str, seed: int, args: argparse.Namespace) -> tuple[Clock, float]:
    """The preset, with more streams."""
    from grpo.app.builders import configs
    from grpo.app.settings import flag_layer, preset_layer, resolve
    from grpo.control import make_trainer
    from grpo.control.play import play
    from grpo.envs.make import make_fleet

    changes = OURS[task] | dict(item.split("=", 1) for item in args.set)
    config = resolve([preset_layer(task), flag_layer([*changes.items(), ("seed", seed)])], configs()).config
    kind = "serial" if task == "ant" else "mujoco"
    fleets = {starts: make_fleet(IDS[task], len(starts), kind=kind) for starts in (LOOKS, FRESH)}
    trainer = make_trainer(config)
    source = trainer.source

    def judge(starts: range) -> float:
        source.policy.eval()
        return float(play(fleets[starts], source.policy, source.scaling, list(starts), None).return_N.mean())

    def policy() -> Any:
        return source.policy.modules().state_dict(), source.scaling.count, source.scaling.arrays()

    clock = Clock(60 * args.minutes, args.every, judge, policy)
    while not clock.look(source.env_steps):
        trainer.step()
    module, count, arrays = clock.kept()
    source.policy.modules().load_state_dict(module)
    source.scaling.load(count, arrays)
    found = judge(FRESH)
    source.close()
    return clock, found


def train_sb3(task: str, seed: int, args: argparse.Namespace) -> tuple[Clock, float]:
    """PPO of Stable-Baselines3 in processes."""
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

    settings = dict((walkers.zoo() | ZOO)[task])
    for name in ("n_envs", "n_timesteps", "normalize"):
        settings.pop(name, None)
    length, count = settings.pop("n_steps", 2048), processors()
    env = SubprocVecEnv([lambda s=s: gym.make(IDS[task]) for s in range(count)], start_method="fork")
    env.seed(seed)
    scaled = VecNormalize(env, gamma=settings.get("gamma", 0.99))
    model = PPO("MlpPolicy", scaled, seed=seed, device="cpu", n_steps=max(length // count, 32), **settings)
    own = gym.make(IDS[task])

    def judge(starts: range) -> float:
        totals = []
        for start in starts:
            seen, _ = own.reset(seed=start)
            total, over = 0.0, False
            while not over:
                action, _ = model.predict(scaled.normalize_obs(seen), deterministic=True)
                seen, reward, terminated, truncated, _ = own.step(action)
                total, over = total + float(reward), terminated or truncated
            totals.append(total)
        return statistics.mean(totals)

    clock = Clock(60 * args.minutes, args.every, judge, lambda: (model.policy.state_dict(), scaled.obs_rms))

    class Look(BaseCallback):
        over = False

        def _on_step(self) -> bool:
            return not self.over

        def _on_rollout_start(self) -> None:
            self.over = clock.look(self.num_timesteps)

    model.learn(10**9, callback=Look())
    weights, scaled.obs_rms = clock.kept()
    model.policy.load_state_dict(weights)
    found = judge(FRESH)
    scaled.close()
    return clock, found


def job(args: argparse.Namespace) -> None:
    """One job, in this process; its row on the last line."""
    task, method, seed = args.job.split(",")
    clock, found = (train_sb3 if method == "sb3" else train_ours)(task, int(seed), args)
    row = {"task": task, "method": method, "seed": int(seed), "minutes": args.minutes, "best": round(found, 1)}
    row |= {
        "curve": clock.curve,
        "cores": processors(),
        "load": os.getloadavg()[0],
        "machine": platform.machine(),
        "set": args.set,
    }
    print(json.dumps(row | {"versions": control.versions("sb3" if method == "sb3" else "ours", None)}))


def ended_at(row: dict[str, Any]) -> float:
    """Mean of its last three looks."""
    return statistics.mean(look[2] for look in row["curve"][-3:])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line a task and a method."""
    lines = [
        "| task | aim | method | minutes, cores | best look's policy, each seed | reached | last three looks | steps |",
        "|---" * 8 + "|",
    ]
    for task, aim in AIMS.items():
        for key in sorted({(r["method"], r["minutes"], r["cores"]) for r in rows if r["task"] == task}):
            mine = [r for r in rows if (r["task"], r["method"], r["minutes"], r["cores"]) == (task, *key)]
            steps = statistics.median(row["curve"][-1][0] for row in mine)
            best, ends = (", ".join(f"{x:,.0f}" for x in xs) for xs in ([r["best"] for r in mine], map(ended_at, mine)))
            lines.append(
                f"| {task} | {aim:,} | {key[0]} | {key[1]:g}, {key[2]} | {best} | "
                f"{sum(row['best'] >= aim for row in mine)} of {len(mine)} | {ends} | {steps:,.0f} |"
            )
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]]) -> None:
    """Greedy return by the clock: a panel a task, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = [task for task in AIMS if any(row["task"] == task for row in rows)]
    figure, panels = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.2), squeeze=False, layout="constrained")
    for panel, task in zip(panels[0], tasks, strict=True):
        for row in rows:
            if row["task"] == task:
                _, seconds, returns = zip(*row["curve"], strict=True)
                ours = row["method"] == "ours"
                panel.plot([at / 60 for at in seconds], returns, color="C0" if ours else "C1", lw=1.2)
        panel.axhline(AIMS[task], color="0.6", lw=0.8, ls=":")
        panel.set_title(IDS[task], fontsize=10)
        panel.set_xlabel("minutes of one core")
    panels[0][0].set_ylabel("greedy return, the same 10 starts")
    for name, colour in (("ours, no critic", "C0"), ("Stable-Baselines3's PPO", "C1")):
        panels[0][0].plot([], [], color=colour, label=name)
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(FIGURE, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(AIMS))
    parser.add_argument("--methods", default="ours,sb3")
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between looks")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of ours, beside OURS")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        peers.ZOO.update(walkers.zoo())
        return job(args)
    rows = json.loads(args.results.read_text(encoding="utf-8"))["jobs"] if args.results.exists() else []
    told = ["--minutes", str(args.minutes), "--every", str(args.every), "--set", *args.set]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for seed in [] if args.table else map(int, args.seeds.split(",")):
        for task in args.tasks.split(","):
            for method in args.methods.split(","):
                key = {"task": task, "method": method, "seed": seed, "minutes": args.minutes, "cores": processors()}
                if any({name: row[name] for name in key} == key for row in rows):
                    continue
                command = [sys.executable, __file__, "--job", f"{task},{method},{seed}", *told]
                env = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    print(f"{task} {method} {seed}: failed with {done.returncode}", flush=True)
                    continue
                rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(
                    f"{task} {method} {seed}: {rows[-1]['best']:,.0f}, in the end {ended_at(rows[-1]):,.0f}", flush=True
                )
                lines = ",\n".join(map(json.dumps, rows))
                args.results.write_text(f'{{"jobs": [\n{lines}\n]}}\n', encoding="utf-8")
    print(table(rows))
    if args.results == RESULTS and rows:
        chart(rows)
        figure = f"![greedy return by the clock, a line a seed]({FIGURE.relative_to(PAGE.parent)})"
        put_into(PAGE, Path(__file__).name, f"{table(rows)}\n\n{figure}\n")


if __name__ == "__main__":
    main()
