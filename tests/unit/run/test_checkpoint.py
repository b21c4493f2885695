"""Checkpoints come back bit for bit; the right ones are kept."""

import re

import numpy as np
import pytest
import torch

from grpo.protocols import State
from grpo.run import checkpoint
from grpo.run.checkpoint import CheckpointError
from grpo.run.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", task="t", config={}, created="now", seed=0)


def state(**arrays):
    return State({"steps_done": 1}, arrays)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_arrays_round_trip_bit_for_bit(dtype, shape, folder):
    bits = torch.randint(0, 2, (*shape, 16), generator=torch.Generator().manual_seed(1)).sum(-1)
    array = bits.to(dtype) / 3 if dtype.is_floating_point else bits.to(dtype)
    found = checkpoint.load(checkpoint.save(folder, state(x=array), 1)).state.arrays["x"]
    assert found.dtype == dtype
    assert found.shape == array.shape
    assert found.contiguous().view(torch.uint8).equal(array.contiguous().view(torch.uint8)) if shape else found == array


def test_odd_numbers_survive(folder):
    array = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    values = {"a": [1, 2.5, None, "x", True, float("inf")], "b": {"c": 0.1 + 0.2}}
    found = checkpoint.load(checkpoint.save(folder, State(values, {"x": array}), 1)).state
    assert found.arrays["x"].numpy().tobytes() == array.numpy().tobytes()
    assert found.values == values


def test_numpy_comes_back_as_numpy_and_tied_weights_are_kept_twice(folder):
    weight = torch.arange(6.0).reshape(2, 3)
    saved = state(replay=np.arange(4, dtype=np.uint8), embed=weight, head=weight, turned=weight.T)
    found = checkpoint.load(checkpoint.save(folder, saved, 1)).state.arrays
    assert isinstance(found["replay"], np.ndarray) and found["replay"].dtype == np.uint8
    assert found["head"].equal(weight) and found["embed"].equal(weight) and found["turned"].equal(weight.T)


@pytest.mark.parametrize(
    "values, place",
    [({"a": {"b": [1, torch.ones(1)]}}, "state.a.b.1 is a Tensor"), ({"a": {3: 1}}, "state.a has the key 3")],
)
def test_what_would_not_come_back_is_refused(values, place, folder):
    with pytest.raises(CheckpointError, match=place):
        checkpoint.save(folder, State(values, {}), 1)


def kept(folder):
    return [int(path.name[5:]) for path in checkpoint.steps(folder)]


def test_the_last_ones_and_the_best_ones_stay(folder):
    for step, score in enumerate([0.1, 0.9, None, 0.5, 0.8, 0.2], 1):
        checkpoint.save(folder, state(), step, score=score, keep_last=2, keep_best=2)
    assert kept(folder) == [2, 5, 6]
    assert (folder.checkpoints / "latest").read_text() == "step-00000006\n"


def test_all_stay_unless_told_otherwise(folder):
    for step in (1, 2, 10):
        checkpoint.save(folder, state(), step)
    assert kept(folder) == [1, 2, 10]


def test_every_point_is_named_in_order(folder):
    seen = []
    checkpoint.save(folder, state(), 1, at=seen.append)
    assert tuple(seen) == checkpoint.POINTS


def test_saving_a_step_again_replaces_it(folder):
    for value in (1.0, 2.0):
        checkpoint.save(folder, state(x=torch.tensor(value)), 1)
    assert checkpoint.resume_point(folder).state.arrays["x"] == 2.0


def test_leftovers_are_swept(folder):
    checkpoint.save(folder, state(), 1)
    (folder.checkpoints / "tmp-step-00000002").mkdir()
    (folder.checkpoints / "latest").unlink()
    assert checkpoint.resume_point(folder).step == 1
    checkpoint.sweep(folder, after=1)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["latest", "step-00000001"]


def test_nothing_to_resume(folder):
    assert checkpoint.resume_point(folder) is None


def test_settings_are_compared_by_value(folder):
    path = checkpoint.save(folder, state(), 1, settings={"a": 1, "recipe": {"clip": (1, 2)}, "device": "cpu"})
    manifest = checkpoint.load(path).manifest
    checkpoint.expect_same_settings(manifest, {"a": 1, "recipe": {"clip": [1, 2]}, "device": "cuda"})
    with pytest.raises(CheckpointError, match=r"\(b: None → 2; recipe\.clip: \[1, 2\] → \[1, 3\]\)"):
        checkpoint.expect_same_settings(manifest, {"a": 1, "b": 2, "recipe": {"clip": [1, 3]}})


def test_a_setting_that_is_newer_than_the_checkpoint_was_at_its_default(folder):
    manifest = checkpoint.load(checkpoint.save(folder, state(), 1, settings={"a": 1, "recipe": {"beta": 0.1}})).manifest
    defaults = {"a": 0, "acting": "lockstep", "parts": (1, 2), "recipe": {}, "kwargs": {}}
    now = {"a": 1, "acting": "lockstep", "parts": (1, 2), "recipe": {"beta": 0.1}, "kwargs": {}}
    checkpoint.expect_same_settings(manifest, now, defaults=defaults)
    with pytest.raises(CheckpointError, match=r"other settings \(acting: 'lockstep' → 'beside'; kwargs\.n: None → 3\)"):
        checkpoint.expect_same_settings(manifest, now | {"acting": "beside", "kwargs": {"n": 3}}, defaults=defaults)
    with pytest.raises(CheckpointError, match=r"\(a: 1 → 0\)"):  # what it knows is no default
        checkpoint.expect_same_settings(manifest, now | {"a": 0}, defaults=defaults)


def test_a_setting_that_is_no_longer_there_is_named_with_the_version_that_had_it(folder):
    settings = {"a": 1, "speed": None, "style": {"x": 2}, "device": "cpu"}
    manifest = checkpoint.load(checkpoint.save(folder, state(), 1, settings=settings)).manifest
    made = manifest["versions"]["anygrpo"]
    with pytest.raises(CheckpointError, match=rf"\(speed=None, style={{'x': 2}}\).*\(anygrpo {re.escape(made)}\)"):
        checkpoint.expect_same_settings(manifest, {"a": 1}, defaults={"a": 0})
