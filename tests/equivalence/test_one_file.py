"""`examples/one_file_grpo.py` imports nothing of ours and learns the same weights as the library."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from grpo import Experience, Rollouts, recipe
from grpo.objective import objective
from grpo.rollouts import Scores

FILE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("one_file_grpo", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_imports_only_torch():
    tree = ast.parse(FILE.read_text(encoding="utf-8"))
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} == {"argparse", "copy", "torch"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_same_weights_as_the_library(script, seed):
    group_size = 16
    seen = {"reward": None}
    plain_advantages = script.advantages

    def remember(reward_N, size):
        seen["reward"] = reward_N
        return plain_advantages(reward_N, size)

    def library_loss(logp_NT, old_logp_NT, ref_logp_NT, advantage_N, mask_NT, epsilon, beta):
        variant = recipe("grpo", epsilon=epsilon, beta=beta)
        rows = len(mask_NT)
        rollouts = Rollouts(
            group_N=torch.arange(rows) // group_size,
            mask_NT=mask_NT,
            old_logp_NT=old_logp_NT,
            reward_N=seen["reward"],
        )
        return objective(Scores(logp_NT), Experience.build(rollouts, variant, ref_logp_NT), variant).loss

    quiet = {"seed": seed, "steps": 20, "group_size": group_size, "log": lambda line: None}
    alone = script.train(**quiet)
    script.advantages = remember
    try:
        ours = script.train(**quiet, loss=library_loss)
    finally:
        script.advantages = plain_advantages
    start = script.train(**quiet | {"steps": 0})
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
    moved = sum(
        float((a - b).detach().abs().sum()) for a, b in zip(alone.parameters(), start.parameters(), strict=True)
    )
    assert moved > 1.0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_it_learns(script, seed):
    """Greedy answers are right for nearly every prompt."""
    policy = script.train(seed=seed, log=lambda line: None)
    prompts = torch.arange(script.DIGITS)
    answers, _ = script.sample(policy, prompts, greedy=True)
    assert float(script.reward(prompts, answers).mean()) > 0.9
