"""The bench of learning in imagination: what is judged, what is kept, and what is not run again."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))

import worldmodel_learning as learning  # noqa: E402


def task(**given):
    limits = {"env_steps": 10, "every": 5, "episodes": 2, "stop_at": None, "success_above": None, "minutes": 1.0}
    limits["through"] = False
    return learning.Task(argparse.Namespace(**limits | given))


def test_a_score_is_the_return_or_the_share_of_successes():
    returns = np.array([0.0, 1.0, 0.5, 0.0])
    assert task().scored(returns).keys() == {"return", "return_std"} and not task().good(task().scored(returns))
    seen = task(success_above=0.0, stop_at=0.5)
    assert seen.scored(returns)["success"] == 0.5 and seen.good(seen.scored(returns))
    assert not task(stop_at=0.5).good(task().scored(returns))


def test_a_cell_takes_the_place_of_what_was_there_of_it(tmp_path):
    path = tmp_path / "new" / "worldmodel_task.json"
    cells = [{"actor": "group", "seed": seed, "settings": {}} for seed in (1, 0)]
    for cell in cells:
        learning.keep(path, {"env": "E"}, {**cell, "whole": False})
    learning.keep(path, {"env": "E"}, {**cells[0], "whole": True})
    learning.keep(path, {"env": "E"}, {**cells[0], "settings": {"horizon": "8"}, "whole": True})
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["env"] == "E"
    assert [(c["seed"], c["settings"], c["whole"]) for c in kept["cells"]] == [
        (0, {}, False), (1, {}, True), (1, {"horizon": "8"}, True),
    ]  # fmt: skip


def test_a_small_cell_is_learned_judged_and_not_run_again(tmp_path, monkeypatch, capsys):
    small = {"prefill": 40, "pretrain": 1, "horizon": 3, "train_ratio": 4, "batch_length": 8, "batch_size": 4}
    words = ["--actors", "random,group", "--seeds", "0", "--env-steps", "60", "--every", "40", "--episodes", "2"]
    words += ["--out", str(tmp_path), "--name", "x", *(f"--set={name}={value}" for name, value in small.items())]
    monkeypatch.setattr(sys, "argv", ["worldmodel_learning.py", *words])
    learning.main()
    first = learning.read(tmp_path / "worldmodel_x.json")["cells"]
    assert [cell["actor"] for cell in first] == ["group", "random"] and all(cell["whole"] for cell in first)
    assert first[0]["curve"][-1]["env_steps"] >= 60 and first[0]["final"]["return"] > 0
    assert "CartPole-v1, group, seed 0" in capsys.readouterr().out
    learning.main()
    assert "CartPole-v1, group, seed 0" not in capsys.readouterr().out
    assert learning.read(tmp_path / "worldmodel_x.json")["cells"] == first
