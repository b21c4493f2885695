"""Learning when nobody can say how good an answer is, only which of two is better.

    python examples/preferences.py --steps 60 --seed 0

Sixteen shades are shown; for each of four targets the policy proposes one. A judge compares two proposals and says
which is nearer, sometimes wrongly. `PairwiseReward` turns those verdicts into each proposal's share of wins within
its group, which is all that GRPO needs.
"""

import argparse
import random

import torch

from grpo import GRPOConfig, GRPOTrainer, PairwiseReward

SHADES, TARGETS, GROUP = 16, {"night": 1, "dusk": 5, "dawn": 10, "noon": 14}, 8


class Proposals(torch.nn.Module):
    """A distribution over shades for each target."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(SHADES)) for name in TARGETS})

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        draw = torch.multinomial
        return [draw(self.logits[s].softmax(0), num_actions_per_state, replacement=True).tolist() for s in states]

    def get_log_probabilities(self, states, actions):
        return torch.stack([self.logits[s].log_softmax(0)[a] for s, a in zip(states, actions, strict=True)])

    def get_parameters(self):
        return dict(self.named_parameters())


def judge(target, a, b):
    """1 if a is nearer, 0 if b is, 0.5 for a draw; one verdict in ten is wrong."""
    near_a, near_b = abs(a - TARGETS[target]), abs(b - TARGETS[target])
    verdict = 0.5 if near_a == near_b else float(near_a < near_b)
    return 1.0 - verdict if random.random() < 0.1 else verdict


def main(steps: int, seed: int) -> dict[str, int]:
    random.seed(seed)
    torch.manual_seed(seed)
    policy = Proposals()
    config = GRPOConfig(group_size=GROUP, learning_rate=0.1, beta=0.01, num_iterations=2)
    trainer = GRPOTrainer(config, policy, reward_model=PairwiseReward(judge, GROUP))
    trainer.train((list(TARGETS) for _ in range(steps)), progress=None)
    return {name: int(policy.logits[name].argmax()) for name in TARGETS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn from noisy comparisons alone.")
    parser.add_argument("--steps", type=int, default=60, help="sampling-and-update steps")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same numbers")
    options = parser.parse_args()
    for name, shade in main(options.steps, options.seed).items():
        print(f"{name:5s}  learned shade {shade:2d}, target {TARGETS[name]:2d}")
