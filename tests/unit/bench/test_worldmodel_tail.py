"""The bench of horizon against tail: its tasks, what is told of groups without a reward, the real tasks' commands."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))

import worldmodel_learning as learning  # noqa: E402
import worldmodel_tail as tail  # noqa: E402


def walked(env, *ways):
    return [env.step(np.array([way], np.float32))[1] for way in ways]


def test_a_target_pays_while_one_is_near_it():
    env = tail.Reach()
    env.reset(seed=0)
    env.at, env.target = 0.0, 0.3
    assert walked(env, 1, 1, 1, -1, -1, -1) == [0, 1, 1, 1, 0, 0]
    np.testing.assert_allclose(env.seen(), [0.0, 0.3], atol=1e-6)


def test_the_right_end_pays_after_the_left_one():
    env = tail.Fetch()
    env.reset(seed=0)
    env.at, env.has = 0.6, False
    assert walked(env, 1) == [0]
    assert walked(env, *[-1] * 10) == [0] * 10 and env.has
    assert walked(env, *[1] * 10)[-1] == 1


def test_progress_is_told_of_blind_groups_alone(monkeypatch):
    """Two groups of two: the first sees no reward, and is judged by how far it came; the second is not looked at."""
    seen = torch.zeros(4, 3, 2)
    seen[..., 1] = 1.0
    seen[:, -1, 0] = torch.tensor([0.1, 0.3, 0.2, 0.1])
    monkeypatch.setattr(tail, "Futures", lambda *parts: {"vector": seen})
    paid = torch.zeros(4, 3)
    paid[2:] = 1.0
    source = SimpleNamespace(_last=SimpleNamespace(reward_NH=paid), model=None, policy=None)
    config = SimpleNamespace(group_size=2, horizon=3, discount=1.0)
    trainer = SimpleNamespace(source=source, config=config)
    for judged, wanted in (([0.0, 1.0, 5.0, 9.0], 1.0), ([1.0, 0.0, 5.0, 9.0], -1.0)):
        rows = SimpleNamespace(reward_NT=torch.tensor(judged)[:, None].repeat(1, 3) / 3)
        found = tail.told(trainer, SimpleNamespace(experience=SimpleNamespace(rollouts=rows)))
        assert found["blind"] == 0.5 and found["progress"] == pytest.approx(wanted, abs=1e-4)


def test_the_table_has_a_number_a_seed():
    cell = {"task": "reach", "horizon": 2, "tail": "fitted", "scale": "none", "blind": 0.5, "progress": 0.25}
    cells = [cell | {"seed": seed, "curve": [seed, 2.0, 3.0]} for seed in (0, 1)]
    lines = tail.table({"cells": cells}).splitlines()
    assert lines[2:] == ["| reach | 2 | fitted | none | 0.50, 0.50 | +0.25, +0.25 | 0.0, 1.0 | 2.0, 2.0 | 3.0, 3.0 |"]


def test_the_real_tasks_are_asked_for_with_settings_that_are_there(monkeypatch, tmp_path):
    """Every arm of every task is a configuration that can be made; only dm_control is left out."""
    commands = []
    monkeypatch.setattr(tail.subprocess, "run", lambda command, check: commands.append(command))
    tail.real(
        argparse.Namespace(real="reacher,cup", seeds="0,1,2", device="cuda", env_steps=20_000, out=tmp_path / "x")
    )
    assert len(commands) == 2 * 5
    for command in commands:
        task, actor = (command[command.index(word) + 1] for word in ("--task", "--actors"))
        given = dict(word.removeprefix("--set=").split("=") for word in command if word.startswith("--set="))
        layers = [("env", "CartPole-v1"), ("actor", actor), *(learning.SETTINGS[task] | given).items()]
        resolved = learning.resolve([learning.preset_layer("dreamer"), learning.flag_layer(layers)], learning.configs())
        assert resolved.config.size == "1m" and resolved.config.beyond == given.get("tail", "none")
