"""Learn CartPole in imagination: play a little, learn what the world does, and try futures that never happened.

    python examples/worldmodel.py                         # until it balances
    python examples/worldmodel.py --steps 5               # a glance
    python examples/worldmodel.py --upright               # with rewards of your own

`grpo train dreamer --env CartPole-v1` does the same with checkpoints, evaluations, predictions and a video.
"""

from __future__ import annotations

import argparse

import torch

from grpo.worldmodel import GRPOTrainer

torch.set_num_threads(1)


def upright(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A reward for each imagined step: near 1 where the pole, as the model paints it, stands straight."""
    angle = batch["vector"][..., 2]
    return torch.exp(-((angle / 0.1) ** 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="at most (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--upright", action="store_true", help="pay for a straight pole instead of the env's reward")
    arguments = parser.parse_args()
    trainer = GRPOTrainer(
        env="CartPole-v1",
        group_size=8,
        reward_fn=upright if arguments.upright else None,
        seed=arguments.seed,
    )
    reports = trainer.train(steps=arguments.steps, stop_at=475, evaluate_every=10, progress=None)
    for report in reports:
        if report.get("eval/return") is not None:
            played, imagined = report["env_steps"], report["imagined/return"]
            print(f"{played:6.0f} environment steps: return {report['eval/return']:.0f}, imagined {imagined:.2f}")
    found = trainer.evaluate(20, seed=1_000_000).table()[0]
    print(f"greedy return on fresh starts: {found['mean']:.0f} (95 % {found['low']:.0f} to {found['high']:.0f})")
    trainer.source.close()


if __name__ == "__main__":
    main()
