"""A run on several ranks: one folder, one line a step, and a checkpoint that any number of them goes on from."""

import json

import pytest
import torch

from grpo.run.folder import RunFolder
from tests.distributed import cases
from tests.distributed.test_same import expect_same

PLAIN = {"optimizer": "adamw", "double": True, "learning_rate": 0.1, "weight_decay": 0.0}


def lines(folder):
    """metrics.jsonl without what depends on the machine."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_resumed_on_two_then_three_then_one_rank(pool, tmp_path):
    whole = pool.run(cases.run, 1, folder=str(tmp_path / "whole"), steps=9, **PLAIN)[0]
    folder = str(tmp_path / "parts")
    for size, steps in ((2, 3), (3, 6), (1, 9)):
        found = pool.run(cases.run, size, folder=folder, steps=steps, **PLAIN)
        assert all(torch.equal(one[2], found[0][2]) and one[1] == steps for one in found)
    torch.testing.assert_close(found[0][2], whole[2], rtol=1e-12, atol=1e-12)
    assert [row["step"] for row in lines(tmp_path / "parts")] == list(range(1, 10))
    for one, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert one.keys() == other.keys()
        expect_same(([one], [], {}), ([other], [], {}), 1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


def test_cut_and_resumed_on_as_many_ranks_is_the_same_to_the_last_bit(pool, tmp_path):
    whole = pool.run(cases.run, 2, folder=str(tmp_path / "whole"), steps=6, **PLAIN)
    pool.run(cases.run, 2, folder=str(tmp_path / "parts"), steps=4, **PLAIN)
    found = pool.run(cases.run, 2, folder=str(tmp_path / "parts"), steps=6, **PLAIN)
    assert torch.equal(found[1][2], whole[0][2])
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


@pytest.mark.parametrize(("who", "step"), [({"asked": 1}, 3), ({"asked": 0}, 3), ({"stop": 1}, 4)], ids=str)
def test_whoever_is_asked_to_stop_stops_all_with_a_checkpoint(pool, tmp_path, who, step):
    found = pool.run(cases.run, 2, folder=str(tmp_path / "run"), steps=8, **who)
    assert [one[1] for one in found] == [step, step]
    folder = RunFolder.open(tmp_path / "run")
    assert (folder.checkpoints / "latest").read_text().strip() == f"step-{step:08d}"
    assert len(folder.metrics()) == step
