"""CartPole with your own loop around the trainer: a few seeds, a line each, one picture of what was learned.

    python examples/cartpole.py --seeds 3 --out runs/cartpole.png

`grpo train cartpole` does the same with checkpoints, evaluation and a video.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from grpo.control import GRPOTrainer

torch.set_num_threads(1)  # the policy is tiny: threads only cost


def learn(seed: int, most: int = 60) -> tuple[list[float], list[float]]:
    """Environment steps and mean return of each step, until a greedy evaluation is above 475."""
    trainer = GRPOTrainer(env="CartPole-v1", seed=seed, gamma=0.99, group_size=4, groups_per_step=2)
    reports = trainer.train(steps=most, stop_at=475, evaluate_every=2, progress=None)
    found = trainer.evaluate(episodes=50).table()[0]
    between = f"{found['low']:.0f} to {found['high']:.0f}"
    steps = int(reports[-1]["env_steps"] or 0)
    print(f"seed {seed}: greedy return {found['mean']:.0f} (95 % {between}) after {steps:,} environment steps")
    return [report["env_steps"] or 0.0 for report in reports], [report["return"] or 0.0 for report in reports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    parser.add_argument("--out", type=Path, default=Path("runs/cartpole.png"), help="the picture")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for seed in range(arguments.seeds):
        axes.plot(*learn(seed), marker=".", label=f"seed {seed}")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean return while learning")
    axes.grid(alpha=0.3)
    axes.legend()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=120)
    print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
