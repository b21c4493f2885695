"""`kill -9` anywhere, then resume: the same weights, optimizer, metrics and samples, byte for byte."""

import random
import signal

import pytest

from grpo.run.checkpoint import POINTS
from grpo.run.folder import RunFolder
from tests.faults.tiny import fingerprint

KILL = signal.SIGKILL.value


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point_of_a_save(point, nth, forge, whole, tmp_path):
    path = tmp_path / "run"
    assert forge(path, hurt=[[point, nth, KILL]])["code"] == -KILL
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]
    assert not [left.name for left in (path / "checkpoints").iterdir() if left.name.startswith(("tmp", "aside"))]


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point_of_a_save_by_time(point, forge, whole, tmp_path):
    """Each step is saved; the eighth is not among the planned ones, nor is the one that it replaces."""
    path, often = tmp_path / "run", {"checkpoint_minutes": 1e-9, "keep_last": None}
    assert forge(path, hurt=[[point, 8, KILL]], options=often)["code"] == -KILL
    assert forge(path, options=often)["code"] == 0
    assert fingerprint(path) == whole[1]
    assert sorted(left.name for left in (path / "checkpoints").iterdir()) == [
        "latest", *(f"step-{step:08d}" for step in (3, 6, 9, 12))
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random_moments(seed, forge, whole, tmp_path):
    path, moment = tmp_path / "run", whole[2] * random.Random(seed).random()
    assert forge(path, kill_after=moment)["code"] in (0, -KILL)
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]


def test_killed_again_and_again(forge, whole, tmp_path):
    """Each life gets two steps further; no life reaches a checkpoint of its own but the save it dies after."""
    path = tmp_path / "run"
    for _ in range(4):
        assert forge(path, hurt=[["rename", 1, KILL]])["code"] == -KILL
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]


def test_killed_inside_a_step_without_any_checkpoint(forge, whole, tmp_path):
    path = tmp_path / "run"
    assert forge(path, hurt=[["step", 3, KILL]])["code"] == -KILL
    assert len(RunFolder.open(path).metrics()) == 2
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]


def test_a_different_seed_is_a_different_run(whole, tmp_path):
    """The fingerprint can tell runs apart: the tests above compare something."""
    from tests.faults.tiny import QUICK, make_folder, make_trainer, run

    run(make_trainer(seed=8), 12, make_folder(tmp_path / "run"), **QUICK)
    assert fingerprint(tmp_path / "run") != whole[1]


def test_the_same_seed_twice_is_the_same_file(forge, whole, tmp_path):
    forge(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()
    assert b"seconds" not in (whole[0] / "metrics.jsonl").read_bytes()


def test_a_second_process_is_refused_and_named(forge, tmp_path):
    assert forge(tmp_path / "run", second=True)["code"] == 77
    assert forge(tmp_path / "run")["code"] == 0  # the lock went with the process that held it


# --- a language run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language(forge, tmp_path_factory):
    """The model, and the run that nothing happened to."""
    from tests.faults.tiny_language import save_model

    place = tmp_path_factory.mktemp("language")
    save_model(place / "model")
    assert forge(place / "whole", 4, model=str(place / "model"))["code"] == 0
    return place


@pytest.mark.parametrize(("point", "nth"), [("reward", 3), ("told", 3)], ids=["inside a step", "before its save"])
def test_a_killed_language_run_resumes_to_the_same_weights_and_metrics(point, nth, language, forge, tmp_path):
    job = {"model": str(language / "model")}
    assert forge(tmp_path / "cut", 4, hurt=[[point, nth, signal.SIGKILL]], **job)["code"] == -signal.SIGKILL
    metrics = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == (2 if point == "reward" else 3), "it was not killed where it should be"
    assert forge(tmp_path / "cut", 4, **job)["code"] == 0
    for name in ("metrics.jsonl", "checkpoints/step-00000004/arrays.safetensors", "model/model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (language / "whole" / name).read_bytes(), name
