"""A rank that is killed ends the job at once; what was saved is whole, and every step is in metrics.jsonl once."""

import json
import multiprocessing
from functools import cache

import pytest
import torch

from grpo import together
from grpo.protocols import Alone
from grpo.run.checkpoint import POINTS as SAVE
from grpo.run.checkpoint import load, steps
from grpo.run.folder import RunFolder
from tests.distributed import cases
from tests.distributed.kills import take_part

POINTS = [(point, victim) for point in ("collect", "gather", "pass", "sum", "optimizer", "agree") for victim in (0, 1)]
POINTS += [("taken", 1), *((point, 0) for point in SAVE)]
SHARED = [
    ("pass", 1, {"shard": "states"}),
    ("the weights", 0, {"shard": "states"}),
    ("taken", 1, {"shard": "states"}),  # the chief waits for what the others own
    ("sum", 0, {"shard": "gradients"}),
    ("a gradient", 1, {"shard": "gradients"}),
    ("the weights", 0, {"shard": "gradients"}),
    ("taken", 1, {"shard": "gradients"}),
    ("rename", 0, {"shard": "gradients"}),
    ("pass", 1, {"size": 3}),
    ("gather", 2, {"size": 3}),
    ("agree", 0, {"size": 3}),
    ("a gradient", 1, {"size": 3, "shard": "gradients"}),
]


@cache
def uncut():
    """Weights after as many steps that nobody has disturbed."""
    trainer = cases.bandit_trainer(Alone(), optimizer="adamw")
    for _ in range(5):
        trainer.step()
    return trainer.policy.logits_V.detach()


@pytest.mark.parametrize(("point", "victim", "given"), [(*case, {}) for case in POINTS] + SHARED)
def test_killed(tmp_path, pool, monkeypatch, point, victim, given):
    settings = {"optimizer": "adamw", "size": 2} | given
    size = settings["size"]
    start = multiprocessing.get_context("forkserver")
    place = (str(tmp_path / "meeting"), str(tmp_path / "run"), point, victim)
    ranks = [start.Process(target=take_part, args=(rank, *place), kwargs=settings) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [9 if rank == victim else 3 for rank in range(size)]

    folder = RunFolder.open(tmp_path / "run")
    saved = steps(folder)
    assert saved and load(saved[-1]).step >= 1
    monkeypatch.setattr(together, "here", Alone)
    trainer = cases.bandit_trainer(Alone(), optimizer="adamw")
    trainer.train(steps=5, folder=tmp_path / "run", progress=None)
    torch.testing.assert_close(trainer.policy.logits_V, uncut())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
