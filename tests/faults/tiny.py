"""A run small enough to be killed a hundred times: a softmax over five arms, three states, real randomness."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo import GRPOTrainer
from grpo.config import GRPOConfig
from grpo.run.folder import RunFolder
from grpo.run.loop import Summary, run

STATES = [0, 1, 2]
ARMS = 5
NO_REFERENCE = {"ref_sync_steps": None, "ref_mixup_alpha": None}
QUICK: dict[str, Any] = {"checkpoint_every": 3, "sample_every": 5, "progress": None, "curve": False}


class Softmax(torch.nn.Module):
    """One row of logits a state. Draws from all three global generators, so that each must be seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(len(STATES), ARMS))

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        probs = self.logits[states].softmax(-1)
        groups = torch.multinomial(probs, num_actions_per_state, replacement=True).tolist()
        for group in groups:
            group[0] = random.randrange(ARMS)
            group[1] = int(np.random.randint(ARMS))
        return groups

    def get_log_probabilities(self, states, actions):
        return self.logits[states].log_softmax(-1)[range(len(states)), actions]

    def get_parameters(self):
        return dict(self.named_parameters())


class Payoff(torch.nn.Module):
    """Arm (state + 1) pays most; with noise."""

    def compute_rewards(self, states, actions):
        best = torch.tensor([float(a == s + 1) for s, a in zip(states, actions, strict=True)])
        return best + 0.1 * torch.rand(len(states))


def make_trainer(policy: Any = None, reward: Any = None, source: Any = None, **settings: Any) -> GRPOTrainer:
    usual = {"group_size": 4, "groups_per_step": 2, "num_iterations": 2, "groups_per_minibatch": 1, "device": "cpu"}
    usual |= {"learning_rate": 0.05, "beta": 0.05, "ref_sync_steps": 4, "ref_mixup_alpha": 0.5, "seed": 7}
    config = GRPOConfig(**{name: value for name, value in (usual | settings).items() if value is not None})
    return GRPOTrainer(config, policy or Softmax(), None, reward or Payoff(), source=source, states=STATES)


def make_folder(path: Path, **about: Any) -> RunFolder:
    trainer_config = make_trainer().config.model_dump(mode="json")
    about = {"task": "tiny", "config": trainer_config, "created": "2026-11-15T10:15:00Z", "seed": 7} | about
    return RunFolder.create(path, **about)


def train(path: Path, steps: int = 12, **options: Any) -> tuple[Summary, GRPOTrainer]:
    """Start a run in `path`, or go on with the one that is there."""
    trainer = make_trainer()
    there = (path / "run.json").exists()
    folder = RunFolder.open(path) if there else make_folder(path)
    return run(trainer, steps, folder, **QUICK | {"resume": there} | options), trainer


def fingerprint(path: Path) -> str:
    """Everything that must not depend on how often a run was cut: metrics, samples, last weights and optimizer."""
    digest = hashlib.sha256()
    files = [path / "metrics.jsonl", *sorted((path / "samples").iterdir())]
    last = (path / "checkpoints" / "latest").read_text().strip()
    files += [path / "checkpoints" / last / name for name in ("arrays.safetensors", "state.json")]
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
