"""A slot machine whose payoffs change every 20 steps: train some seeds, print a table, draw what happened.

    python examples/bandit.py --seeds 5 --noise 0 0.1 0.3 --out runs/bandit.png

The whole domain is `grpo/bandit.py`. Regret is what the policy that sampled is expected to lose against always pulling
the best arm, before it learns from the step; noise on the payoffs is not in it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from grpo import StepReport
from grpo.bandit import BanditConfig, make_trainer

STEPS = 100
Runs = list[list[StepReport]]


def train(seeds: range, **settings: float) -> Runs:
    """The reports of 100 steps for each seed."""
    return [make_trainer(BanditConfig(seed=seed, **settings)).train(steps=STEPS, progress=None) for seed in seeds]


def column(runs: Runs, name: str) -> np.ndarray:
    """One metric as (seeds, steps); NaN where there was none."""
    return np.array([[np.nan if report[name] is None else report[name] for report in run] for run in runs])


def row(name: str, regret: np.ndarray, best_arm: np.ndarray) -> str:
    """A line of the table, from one number a seed."""
    spread = f"{regret.std(ddof=1):5.2f}" if len(regret) > 1 else "    –"
    return f"{name:<16}{regret.mean():7.2f} ±{spread}{regret.max():9.2f}{best_arm.mean():12.1%}{best_arm.min():9.1%}"


def table(results: dict[float, Runs], config: BanditConfig) -> str:
    """Regret over 100 steps and probability of the best arm, for uniform play and each noise."""
    payoffs = np.array([config.payoffs[config.phase(step)] for step in range(STEPS)])
    uniform = np.array([(payoffs.max(1) - payoffs.mean(1)).sum()])
    lines = [
        f"{'':<16}{'regret':>7}  {'sd':>5}{'worst':>9}{'best arm':>12}{'worst':>9}",
        row("uniform play", uniform, np.array([1 / config.arms])),
    ]
    for noise, runs in results.items():
        best_arm = np.nanmean(column(runs, "best_arm_probability"), axis=1)
        lines.append(row(f"noise {noise:g}", column(runs, "regret").sum(1), best_arm))
    return "\n".join(lines)


def draw(runs: Runs, config: BanditConfig, title: str, path: Path) -> None:
    """Reward, best-arm probability, regret and arm probabilities over time: mean, and the range over seeds."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True, layout="constrained")
    steps = np.arange(STEPS)
    payoffs = np.array([config.payoffs[config.phase(step)] for step in steps])

    def band(axis: plt.Axes, values: np.ndarray, colour: str, label: str | None = None) -> None:
        axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
        axis.plot(steps, values.mean(0), color=colour, label=label)

    reward, best, regret, arms = axes.flat
    band(reward, column(runs, "reward"), "tab:blue", "policy, mean of the group")
    reward.plot(steps, payoffs.max(1), "k--", linewidth=1, label="best arm")
    reward.plot(steps, payoffs.mean(1), "k:", linewidth=1, label="uniform play")
    reward.set_title("reward")
    reward.set_ylim(0, 1.15)
    band(best, column(runs, "best_arm_probability"), "tab:green", "policy")
    best.axhline(1 / config.arms, color="k", linestyle=":", linewidth=1, label="uniform play")
    best.set_title("probability of the best arm, where there is one")
    band(regret, column(runs, "regret").cumsum(1), "tab:red", "policy")
    regret.plot(steps, (payoffs.max(1) - payoffs.mean(1)).cumsum(), "k:", linewidth=1, label="uniform play")
    regret.set_title("regret so far")
    for arm in range(config.arms):
        band(arms, column(runs, f"arm_probability/{arm}"), f"C{arm}", f"arm {arm}")
    arms.set_title("probability of each arm")
    for axis in axes.flat:
        for step in range(0, STEPS, config.phase_length):
            if np.ptp(payoffs[step]) == 0:
                axis.axvspan(step, step + config.phase_length, color="0.94", zorder=0)
        axis.set_xlim(0, STEPS - 1)
        axis.legend(fontsize="small", framealpha=0.9, ncols=3 if axis is reward else 1)
    for axis in axes[1]:
        axis.set_xlabel("step (grey: all arms pay the same)")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0], help="deviations; the first is drawn")
    parser.add_argument("--out", type=Path, default=Path("runs/bandit.png"))
    given = parser.parse_args()

    torch.set_num_threads(1)  # five logits: threads only cost
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    results = {noise: train(seeds, noise=noise) for noise in given.noise}
    print(f"{len(seeds)} seeds from {seeds[0]}, {STEPS} steps, group of {BanditConfig().group_size}\n")
    print(table(results, BanditConfig()))
    noise, runs = next(iter(results.items()))
    draw(runs, BanditConfig(), f"noise {noise:g}: mean and range over {len(seeds)} seeds", given.out)
    print(f"\ncurves: {given.out}")


if __name__ == "__main__":
    main()
