"""What a checkpoint after every step costs the training: written beside it, against written before it goes on.

A policy of 25 million weights (100 MB; 300 MB with AdamW's moments) is trained for a few steps by `grpo.run.loop`, on
the CPU, three ways in turn: without checkpoints, with each waited for, and as the library does it. What is compared is
the time from one step to the next, everything in between included. The files that are left must hold the same weights.
Writes bench/results/checkpoint_overlap.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from grpo import GRPOConfig, GRPOTrainer
from grpo.run import checkpoint
from grpo.run.folder import RunFolder
from grpo.run.loop import run
from grpo.run.session import Session

RESULTS = Path(__file__).parent / "results" / "checkpoint_overlap.json"
WIDTH, LAYERS, ARMS, GROUP, STEPS, ROUNDS = 1568, 10, 16, 256, 7, 5
WAYS = ("none", "waited for", "beside")


class Wide(torch.nn.Module):
    """A multilayer perceptron that reads a state's number and chooses an arm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        inside = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        self.embed = torch.nn.Embedding(4, WIDTH)
        self.layers = torch.nn.Sequential(*inside, torch.nn.Linear(WIDTH, ARMS))

    def logits(self, states):
        return self.layers(self.embed(torch.tensor(states)))

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return torch.multinomial(self.logits(states).softmax(-1), num_actions_per_state, replacement=True).tolist()

    def get_log_probabilities(self, states, actions):
        return self.logits(states).log_softmax(-1)[range(len(states)), actions]

    def get_parameters(self):
        return dict(self.named_parameters())


class Match:
    def compute_rewards(self, states, actions):
        return torch.tensor([float(a % 4 == s) for s, a in zip(states, actions, strict=True)])

    def train(self): ...
    def eval(self): ...
    def to(self, device): ...


def measured(way: str, place: Path) -> tuple[list[float], str]:
    """Seconds from the beginning of each step to that of the next, and a name for the weights that are left."""
    config = GRPOConfig(
        group_size=GROUP, groups_per_step=4, num_iterations=2, learning_rate=1e-5, beta=0.0, device="cpu"
    )
    trainer = GRPOTrainer(config, Wide(), None, Match(), states=[0, 1, 2, 3])
    folder = RunFolder.create(place, task="bench", config={}, created="", seed=0)
    begun: list[float] = []
    former, Session.save = Session.save, _waiting if way == "waited for" else Session.save
    try:
        run(
            trainer,
            STEPS,
            folder,
            checkpoint_every=None if way == "none" else 1,
            sample_every=None,
            progress=None,
            curve=False,
            at=lambda point: begun.append(time.perf_counter()) if point == "step" else None,
        )
    finally:
        Session.save = former
    manifest = checkpoint.load(checkpoint.steps(folder)[-1]).manifest
    return [after - before for before, after in pairwise(begun)][1:], manifest["sha256"]["arrays.safetensors"]


def _waiting(self: Session, last: bool = False, save=Session.save) -> None:
    save(self, last)
    self.settle()


def main() -> dict:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    left = set()
    for _ in range(ROUNDS):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=RESULTS.parent) as place:
                found, weights = measured(way, Path(place) / "run")
            seconds[way].append(statistics.median(found))
            left.add(weights)
            print(f"{way:12} {seconds[way][-1]:.3f} s a step", flush=True)
    assert len(left) == 1, "the weights differ: the times compare nothing"
    return summary(seconds)


def summary(seconds: dict[str, list[float]]) -> dict:
    """What a checkpoint adds to a step without one, in each round."""
    added = {
        way: sorted(with_it / none - 1 for with_it, none in zip(seconds[way], seconds["none"], strict=True))
        for way in WAYS[1:]
    }
    return {
        "measures": "time a checkpoint adds to a step, one after every step, 100 MB of weights, AdamW, CPU, one thread",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rounds": ROUNDS,
        "steps": STEPS - 2,
        "parameters": sum(p.numel() for p in Wide().parameters()),
        "seconds_a_step": seconds,
        "added": {way: {"median": statistics.median(x), "low": x[0], "high": x[-1]} for way, x in added.items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = main()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for way, x in results["added"].items():
        print(f"{way}: a checkpoint adds {x['median']:.0%} to a step ({x['low']:.0%} – {x['high']:.0%})")
