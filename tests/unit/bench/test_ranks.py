"""The bench of ranks: the cost model's own numbers, medians of what was measured, and what is told of it."""

import argparse
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))  # its scripts import each other as scripts do

import ranks  # noqa: E402

from grpo import together  # noqa: E402
from grpo.distributed.group import Group  # noqa: E402
from grpo.language import source  # noqa: E402
from tests.distributed import cases  # noqa: E402

ASKED = argparse.Namespace(prompts=128, group=8, tokens=256, tiny=False, shape="qwen17", shared_gpu=True)


def test_the_model_s_step_is_the_sum_of_its_parts():
    alone = ranks.predicted(1, 128, 8, 256)
    assert alone["decode"] == pytest.approx(256 * (1.16e-3 + 10.8e-6 * 1024))
    assert alone["update"] == pytest.approx(22.3e-6 * 1024 * (256 + 16))
    assert alone["sum"] == alone["gather"] == 0.0
    assert alone["step"] == pytest.approx(9.37, abs=0.01)
    eight, many = (ranks.predicted(gpus, 128, 8, 256) for gpus in (8, 64))
    assert eight["sum"] == pytest.approx(2 * 7 / 8 * 4 * 1.72e9 / 350e9)
    assert many["sum"] == pytest.approx(2 * 63 / 64 * 4 * 1.72e9 / 300e9)  # between machines
    assert eight["gather"] == many["gather"] == pytest.approx(20 * 1024 * 272 / 1e9)  # everybody gets everything
    assert (eight["step"], many["step"]) == (pytest.approx(1.50, abs=0.01), pytest.approx(0.52, abs=0.01))


def test_the_model_s_gigabytes():
    assert [ranks.gigabytes(7.616, 8, kind) for kind in ("none", "states", "gradients", "weights")] == pytest.approx(
        [91.4, 38.1, 24.8, 11.4], abs=0.05
    )
    assert all(kind in ranks.memory().splitlines()[1] for kind in ("none", "states", "gradients", "weights"))
    assert "128x8x256          8     1.50       0.78" in ranks.table()


def step(collecting, comparing=0.0, gradients=0.0):
    """Of a step of one second: what was moved, and ten times that was waited."""
    moved = {"collecting": collecting, "comparing the step": comparing, "the gradients": gradients}
    return {name: {"calls": 2, "moving": x, "waiting": 10 * x} for name, x in moved.items() if x}


def run(*steps, seconds=1.0):
    """A rank for each."""
    rank = {"peak_gib": 1.5, "states_gib": 0.25}
    each = [{"seconds": [seconds] * len(some), "collectives": list(some), **rank} for some in steps]
    return {"ranks": each, "kind": "none", "length": 256.0}


def test_shares_are_medians_over_steps_of_the_rank_that_has_the_most():
    slow = step(0.03, 0.01), step(0.05, 0.02), step(0.9)  # the last has met something else
    found = ranks.figures(run(slow, (step(0.01),) * 3, seconds=2.0))
    assert found["gathers of records"] == {"moving": pytest.approx(0.035), "waiting": pytest.approx(0.35)}
    assert found["sum of gradients"] == {"moving": 0.0, "waiting": 0.0}
    assert found["each"]["comparing the step"]["moving"] == pytest.approx(0.005)
    assert found["each"]["collecting"]["calls"] == 2 and found["seconds"] == 2.0


def test_gradients_are_compared_with_the_largest_of_each_tensor_and_of_all():
    one = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.01]), "none": torch.zeros(2)}
    other = one | {"a": torch.tensor([1.0, 0.001]), "b": torch.tensor([0.011])}
    found = ranks.apart(one, other)
    assert (found["tensors"], found["without a gradient"], found["largest"]) == (3, 1, 1.0)
    assert found["of the same tensor"] == pytest.approx(0.1) and found["overall"] == pytest.approx(0.001)
    assert ranks.apart(one, one | {"none": torch.ones(2)})["of the same tensor"] == math.inf
    with pytest.raises(ValueError, match=r"other tensors: \['none'\]"):
        ranks.apart(one, {name: x for name, x in one.items() if name != "none"})


def test_what_is_told_of_a_measurement():
    alone = run((), seconds=9.0)
    alone["ranks"][0]["seconds"] = [9.0, 8.0, 9.5]
    alone["ranks"][0]["collectives"] = [{}, {}, {}]
    two = run((step(0.03, 0.01, 0.002),) * 3, (step(0.02, 0.01, 0.002),) * 3)
    off = {"tensors": 20, "of the same tensor": 5.2e-7, "overall": 1.3e-7}
    runs = {"1 rank": alone, "2 ranks": two | {"gradients": off}, "2 ranks, shard gradients": {"failed": 7}}
    for made in (alone, two):
        made["figures"] = ranks.figures(made)
    runs["2 ranks"]["figures"] = two["figures"]
    first, one, second, gathers, sums, *each, gradients, failed = ranks.told(ASKED, runs).splitlines()
    assert first == "128 x 8 x 256, qwen17, ranks share a GPU"
    assert one.startswith("1 rank: 9.00 s a step (model") and ": 9.37 s)" in one and "at most 1.5 GiB a rank" in one
    assert second.startswith("2 ranks: 1.00 s a step") and "states 0.25 GiB" in second
    assert gathers.split()[:4] == ["gathers", "of", "records", "4.00%"] and "40.00% more waiting" in gathers
    assert sums.split()[:4] == ["sum", "of", "gradients", "0.20%"]
    assert [line.split("  ")[2] for line in each] == ["collecting", "comparing the step", "the gradients"]
    assert "20 tensors) against 1 rank: 5.2e-07 of the largest of the same tensor" in gradients
    assert failed == "2 ranks, shard gradients: failed (7)"


def test_a_step_s_calls_are_timed_with_the_making_of_records(monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        for module, name in ((together, "here"), (together, "packed"), (together, "joined"), (source, "pack")):
            monkeypatch.setattr(module, name, getattr(module, name))  # so that they are put back
        eight = Group(dist.group.WORLD, dist.group.WORLD)
        trainer = cases.bandit_trainer(eight, groups_per_step=8)
        steps = [{}]
        ranks.timed_collectives(eight, steps)
        trainer.step()
        steps.append({})
        trainer.step()
    finally:
        dist.destroy_process_group()
    for told in steps:
        assert {name: entry["calls"] for name, entry in told.items()} == {
            "collecting": 2, "comparing the step": 2, "the passes": 2, "the gradients": 1,
        }  # fmt: skip
        assert all(entry["moving"] > 0 and entry["waiting"] > 0 for entry in told.values())
