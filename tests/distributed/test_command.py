"""What somebody types: `grpo train … --ranks`, `--resume` on another number, and a script under torchrun."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANDIT = ["bandit", "--groups-per-step", "5", "--checkpoint-every", "2", "--logdir"]


def typed(folder, *words, **variables):
    """Exit code, output and errors of a command, one thread a process."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environ, text=True, capture_output=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def expect_same_steps(folder, one, other):
    """The same metrics to float32's rounding, a line a step."""
    mine, theirs = ([json.loads(line) for line in (folder / at / "metrics.jsonl").open()] for at in (one, other))
    assert len(mine) == len(theirs)
    for first, second in zip(mine, theirs, strict=True):
        assert first == pytest.approx(second, rel=1e-5, abs=1e-6)


def test_a_run_goes_on_with_two_then_three_ranks_then_alone(tmp_path):
    assert typed(tmp_path, "grpo", "train", *BANDIT, "alone", "--max-steps", "6")[0] == 0
    first = ["train", *BANDIT, "parts", "--max-steps", "2", "--ranks", "2"]
    then = ["train", "--resume", "parts", "--max-steps", "4", "--ranks", "3"]
    for words in (first, then, ["train", "--resume", "parts", "--max-steps", "6"]):
        code, out, err = typed(tmp_path, "grpo", *words)
        assert code == 0 and err == "" and out.count("ended=done") == 1, (words, err)
    expect_same_steps(tmp_path, "alone", "parts")


def test_what_cannot_be_gone_on_with_is_a_wrong_setting_on_every_rank(tmp_path):
    code, out, err = typed(tmp_path, "grpo", "train", "--resume", "nothing", "--ranks", "2")
    assert code == 2 and out == "" and list(tmp_path.iterdir()) == []
    assert all("nothing is no run folder" in line and line.startswith("grpo: rank ") for line in err.splitlines()), err


def test_the_doctor_names_a_rank_that_does_not_come_in_one_line(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    first = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    code, out, err = typed(tmp_path, "grpo", "doctor", "--rank-timeout", "1", **first)
    assert code == 1 and out == ""
    assert err.startswith("grpo: rank 1 of 2 did not come within 1 s") and err.count("\n") == 1


SCRIPT = """
import sys, torch
from grpo import GRPOConfig, GRPOTrainer
from tests.toys import Match, Softmax

torch.manual_seed(0)
config = GRPOConfig(group_size=4, groups_per_step=4, learning_rate=0.1)
trainer = GRPOTrainer(config, Softmax(), reward_model=Match(), states=[0, 1, 2, 3])
trainer.train(steps=3, folder=sys.argv[1], progress=None)
"""


def test_a_script_that_works_alone_works_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert typed(tmp_path, "script", "alone")[0] == 0
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "script", "two"]
    code, _, err = typed(tmp_path, *words)
    assert code == 0, err
    expect_same_steps(tmp_path, "alone", "two")
