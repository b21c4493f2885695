"""What the trainer costs: `GRPOTrainer.step` against the same mathematics written inline around the same policy.

4,096 samples a step (64 states × 64 tries), a softmax table as policy, two passes with clip and KL. Both ask the
policy and the reward equally often and end with the same weights. Writes bench/results/trainer_overhead.json.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from grpo import GRPOConfig, GRPOTrainer

RESULTS = Path(__file__).parent / "results" / "trainer_overhead.json"
STATES, GROUP, ARMS, PASSES, REPEATS = 64, 64, 16, 2, 30
EPSILON, BETA, RATE = 0.2, 0.04, 0.05


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(STATES, ARMS))

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return torch.multinomial(self.logits[states].softmax(-1), num_actions_per_state, replacement=True).tolist()

    def get_log_probabilities(self, states, actions):
        return self.logits.log_softmax(-1)[states, actions]

    def get_parameters(self):
        return dict(self.named_parameters())


class Match:
    def compute_rewards(self, states, actions):
        return torch.tensor([float(a == s % ARMS) for s, a in zip(states, actions, strict=True)])

    def train(self): ...
    def eval(self): ...
    def to(self, device): ...


def inline_step(policy, reference, reward_model, optimizer, starts):
    """One step as one would write it by hand: the same mathematics and the same reported numbers, no checks."""
    with torch.no_grad():
        groups = policy.generate_actions(starts, GROUP)
        states = [state for state in starts for _ in range(GROUP)]
        actions = [action for group in groups for action in group]
        old = policy.get_log_probabilities(states, actions)
        rewards = reward_model.compute_rewards(states, actions)
        ref = reference.get_log_probabilities(states, actions)
        by_group = rewards.view(len(starts), GROUP)
        advantage = (by_group - by_group.mean(1, keepdim=True)).flatten()
        report = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "frac_reward_zero_std": float((by_group.std(1) == 0).float().mean()),
        }
    for _ in range(PASSES):
        logp = policy.get_log_probabilities(states, actions)
        log_ratio = logp - old
        ratio = log_ratio.exp()
        surrogate = -torch.minimum(ratio * advantage, ratio.clip(1 - EPSILON, 1 + EPSILON) * advantage)
        kl = 0.5 * (logp - ref) ** 2
        loss = (surrogate + BETA * kl).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            low = (ratio < 1 - EPSILON) & (advantage < 0)
            high = (ratio > 1 + EPSILON) & (advantage > 0)
            report |= {
                "loss": float(loss),
                "policy_loss": float(surrogate.mean()),
                "kl": float(kl.mean()),
                "ratio": float(ratio.mean()),
                "approx_kl": float(-log_ratio.mean()),
                "clip_ratio/low_mean": float(low.float().mean()),
                "clip_ratio/high_mean": float(high.float().mean()),
                "clip_ratio/region_mean": float((low | high).float().mean()),
                "grad_norm": float(norm),
            }
    return report


def main() -> dict:
    torch.manual_seed(0)
    starts = list(range(STATES))
    ours, theirs = Table(), Table()
    config = GRPOConfig(
        group_size=GROUP, num_iterations=PASSES, epsilon=EPSILON, beta=BETA, kl_estimator="k2", kl_gradient="own"
    )
    trainer = GRPOTrainer(config, ours, copy.deepcopy(ours), Match(), torch.optim.SGD(ours.parameters(), lr=RATE))
    reference, optimizer = copy.deepcopy(theirs), torch.optim.SGD(theirs.parameters(), lr=RATE)
    reward_model = Match()
    times: dict[str, list[float]] = {"ours": [], "inline": []}
    for repeat in range(REPEATS + 3):
        for name in ("ours", "inline"):
            torch.manual_seed(repeat)
            start = time.perf_counter()
            if name == "ours":
                trainer.step(starts)
            else:
                inline_step(theirs, reference, reward_model, optimizer, starts)
            if repeat >= 3:  # the first few warm caches up
                times[name].append(time.perf_counter() - start)
    torch.testing.assert_close(ours.logits, theirs.logits)  # the same mathematics, or the ratio means nothing
    ratios = [a / b for a, b in zip(times["ours"], times["inline"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "measures": "GRPOTrainer.step against the same step inline, 4,096 samples, one thread, CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "repeats": REPEATS,
        "ours_ms": 1e3 * statistics.median(times["ours"]),
        "inline_ms": 1e3 * statistics.median(times["inline"]),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = main()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"ours / inline {results['ratio']:.2f} (quartiles {results['ratio_low']:.2f} – {results['ratio_high']:.2f})")
