"""Promises of a run whose steps are a program: cut anywhere, damaged, diverged, a full disk; and of many seeds."""

from __future__ import annotations

import errno
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo.config import ConfigError
from grpo.control import GRPOTrainer
from grpo.errors import SamplesFailed
from grpo.run import checkpoint
from grpo.run.folder import RunFolder
from grpo.run.lock import locked
from grpo.run.loop import run
from grpo.trainer import Diverged

pytest.importorskip("jax")

from grpo.app.many import together
from grpo.cli import main
from grpo.control.compiled import seeds

SMALL = {"hidden": (8,), "group_size": 4, "groups_per_step": 2, "num_iterations": 2, "target_kl": None, "video": False}
POLE = {
    "env": "CartPole-v1", "compiled": True, "max_episode_steps": 20, "eval_episodes": 3, "advantage": "step", **SMALL,
}  # fmt: skip
HOW = {"checkpoint_every": 2, "evaluate_every": 2, "sample_every": None, "progress": None, "curve": False}
HOW |= {"best_by": "eval/return", "checkpoint_minutes": None, "keep_best": 1, "keep_last": 2}
STEPS = 5
LAST = f"checkpoints/step-{STEPS:08d}/arrays.safetensors"
WORDS = ["--env=CartPole-v1", "--compiled", "--max-episode-steps=20", "--eval-episodes=3", "--advantage=step"]
WORDS += ["--hidden=[8]", "--group-size=4", "--groups-per-step=2", "--num-iterations=2", "--target-kl=null"]
WORDS += ["--run.steps=5", "--run.evaluate-every=2", "--run.checkpoint-every=2", "--run.best-by=eval/return"]


class Cut(BaseException):
    """The process is gone."""


def trained(path: Path, at=None, **more) -> Path:
    trainer = GRPOTrainer(**POLE)
    opened = (path / "run.json").exists()
    made = {"task": "control", "config": {}, "created": "2026-11-15T10:15:00Z", "seed": 0}
    folder = RunFolder.open(path) if opened else RunFolder.create(path, **made)
    run(trainer, STEPS, folder, resume=opened, evaluate=trainer.evaluation, at=at, **HOW | more)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("compiled") / "whole")


def same(path: Path, whole: Path) -> bool:
    return all((path / name).read_bytes() == (whole / name).read_bytes() for name in ("metrics.jsonl", LAST))


def found(path: Path) -> dict[int, float | None]:
    return checkpoint.scores(RunFolder.open(path))


@pytest.mark.parametrize("point", ["step", *checkpoint.POINTS])
def test_cut_at_every_point_and_gone_on_with_exactly(point, whole, tmp_path) -> None:
    passed = []

    def cut(here: str) -> None:
        passed.append(here)
        if passed.count(point) == (4 if point == "step" else 2):
            raise Cut

    with pytest.raises(Cut):
        trained(tmp_path / "run", at=cut)
    assert not (tmp_path / "run" / LAST).exists()
    assert same(trained(tmp_path / "run"), whole)
    assert found(tmp_path / "run") == found(whole)


def test_a_damaged_checkpoint_is_passed_over(whole, tmp_path) -> None:
    passed = []

    def cut(here: str) -> None:
        passed.append(here)
        if here == "step" and passed.count("step") == STEPS:
            raise Cut

    with pytest.raises(Cut):
        trained(tmp_path / "run", at=cut)
    newest = checkpoint.steps(RunFolder.open(tmp_path / "run"))[-1]
    assert newest.name == "step-00000004"
    (newest / "state.json").write_text("{}")
    assert same(trained(tmp_path / "run"), whole)
    assert "checkpoint_damaged" in [event["event"] for event in RunFolder.open(tmp_path / "run").events()]


def test_a_full_disk_is_borne_and_told(whole, tmp_path, monkeypatch) -> None:
    real, failed = checkpoint.publish, []

    def full(folder, taken, **how):
        if taken.step == 2 and not failed:
            failed.append(taken.step)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, taken, **how)

    monkeypatch.setattr(checkpoint, "publish", full)
    with pytest.warns(UserWarning, match="step 2 was not saved, the older ones are kept"):
        trained(tmp_path / "run")
    assert same(tmp_path / "run", whole)


def test_three_steps_without_a_finite_update_end_the_run_with_what_it_looked_like(tmp_path, monkeypatch) -> None:
    trainer = GRPOTrainer(**POLE)
    program = trainer.compiled._step

    def lost(*given):
        made = program(*given)
        none_K = np.zeros_like(made.told.taken_K)
        told = made.told._replace(finite_K=none_K, taken_K=none_K, skipped_K=~none_K)
        return made._replace(told=told, adam=given[0])

    monkeypatch.setattr(trainer.compiled, "_step", lost)
    folder = RunFolder.create(tmp_path / "run", task="control", config={}, created="2026-11-15T10:15:00Z", seed=0)
    with pytest.raises(Diverged):
        run(trainer, 9, folder, evaluate=trainer.evaluation, **HOW)
    assert trainer.steps_done == 3 and "diverged" in [event["event"] for event in folder.events()]
    assert any((tmp_path / "run" / "samples").glob("diverged-*"))


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_that_are_no_numbers_are_told_at_the_next_step(compiled) -> None:
    trainer = GRPOTrainer(**POLE | {"compiled": compiled})
    trainer.optimizer.param_groups[0]["lr"] = math.nan
    trainer.step()
    with pytest.raises(ValueError, match="old_logp_NT: row 0, decision 0 is nan"):
        trainer.step()


def test_an_optimizer_that_a_program_does_not_have_is_refused() -> None:
    trainer = GRPOTrainer(**POLE)
    weights = trainer.optimizer.param_groups[0]["params"]
    trainer.optimizer = torch.optim.Adam(weights, lr=0.0)
    before = [p.clone() for p in weights]
    trainer.step()
    assert all(map(torch.equal, before, weights)) and trainer.optimizer.state[weights[0]]["step"] == 2
    trainer.load_state(trainer.state())
    trainer.step()
    for other, why in (
        (torch.optim.SGD(weights, lr=0.1), "is SGD"),
        (torch.optim.Adam(weights, betas=(0.5, 0.9)), r"has betas=\(0.5, 0.9\), not"),
        (torch.optim.Adam(weights, weight_decay=0.0, decoupled_weight_decay=True), "has decoupled_weight_decay=True"),
        (torch.optim.Adam([{"params": weights[:1]}, {"params": weights[1:]}]), "not all weights in one group"),
    ):
        trainer.optimizer = other
        with pytest.raises(ConfigError, match=f"trainer.optimizer .*{why}.*pass optimizer= to the trainer"):
            trainer.step()


# --- many seeds -----------------------------------------------------------------------------------------------------


def train(*words: str) -> int:
    return main(["train", *WORDS, "--parallel=1", *words])


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two seeds that nothing happens to; legs end because their policies are to be saved."""
    kept = pytest.MonkeyPatch()
    kept.setattr(together, "BLOCK", 2), kept.setattr(seeds, "KEPT", 2)
    seeds.forget()
    path = tmp_path_factory.mktemp("seeds") / "whole"
    assert train("--seeds=2", f"--logdir={path}", "--run.keep-last=1") == 0
    yield path
    kept.undo()
    seeds.forget()


def test_checkpoints_of_seeds_are_those_of_a_run_alone(both, tmp_path) -> None:
    assert train("--seeds=1", f"--logdir={tmp_path / 'all'}", "--run.keep-last=null") == 0
    for ours, keep_last in ((both, 1), (tmp_path / "all", None)):
        alone, of_seed = found(trained(tmp_path / f"alone-{keep_last}", keep_last=keep_last)), found(ours / "seed-0")
        assert [*of_seed] == [*alone] == ([4, 5] if keep_last else [2, 4, 5])
        for step, score in alone.items():
            assert of_seed[step] == (None if score is None else pytest.approx(score))


def test_a_learning_rate_that_falls_has_seeds_played_one_by_one(tmp_path) -> None:
    assert train("--seeds=1", "--lr-schedule=linear", f"--logdir={tmp_path / 'falls'}") == 0
    rows = map(json.loads, (tmp_path / "falls" / "seed-0" / "metrics.jsonl").read_text().splitlines())
    told = [row["learning_rate"] for row in rows if "learning_rate" in row]
    assert told == pytest.approx([told[0] * (STEPS - step) / STEPS for step in range(STEPS)])


def test_what_is_kept_of_seeds_does_not_depend_on_the_clock(both, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(together.Waited, "too_long", lambda waited, ahead: True)  # unplanned saves wherever they may be
    assert train("--seeds=2", f"--logdir={tmp_path / 'runs'}", "--run.keep-last=1") == 0
    for seed in ("seed-0", "seed-1"):
        assert found(tmp_path / "runs" / seed) == found(both / seed)


def test_seeds_that_were_cut_while_they_were_saved_go_on_exactly(both, tmp_path, monkeypatch) -> None:
    real, passed = checkpoint.publish, []

    def cut(folder, taken, **how):
        def at(point: str) -> None:
            passed.append(point)
            if passed.count("manifest") == 3:
                raise Cut

        return real(folder, taken, **how | {"at": at})

    monkeypatch.setattr(checkpoint, "publish", cut)
    with pytest.raises(Cut):
        train("--seeds=2", f"--logdir={tmp_path / 'cut'}", "--run.keep-last=1")
    monkeypatch.setattr(checkpoint, "publish", real)
    left = tmp_path / "cut" / "seed-1" / "checkpoints"
    (left / "tmp-step-00000009").mkdir(parents=True, exist_ok=True)  # a kill leaves one
    assert main(["train", "--resume", str(tmp_path / "cut"), "--parallel=1"]) == 0
    for seed in ("seed-0", "seed-1"):
        assert same(tmp_path / "cut" / seed, both / seed) and found(tmp_path / "cut" / seed) == found(both / seed)
    assert not [*left.glob("tmp-*")]


def test_a_seed_whose_disk_is_full_costs_the_others_nothing(both, tmp_path, monkeypatch, capsys) -> None:
    real = checkpoint.publish

    def full(folder, taken, **how):
        if folder.path.name == "seed-1":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, taken, **how)

    monkeypatch.setattr(checkpoint, "publish", full)
    with pytest.warns(UserWarning, match="was not saved, the older ones are kept"):
        assert train("--seeds=2", f"--logdir={tmp_path / 'runs'}", "--run.keep-last=1") == 1
    assert same(tmp_path / "runs" / "seed-0", both / "seed-0")
    assert "No space left on device; make room, then resume" in capsys.readouterr().out
    status = json.loads((tmp_path / "runs" / "seed-1" / "status.json").read_text())
    assert status["reason"] == "unsaved"
    monkeypatch.setattr(checkpoint, "publish", real)
    assert main(["train", "--resume", str(tmp_path / "runs"), "--parallel=1"]) == 0
    assert same(tmp_path / "runs" / "seed-1", both / "seed-1")


def test_a_seed_that_somebody_else_trains_is_left_to_him(both, tmp_path) -> None:
    shutil.copytree(both, tmp_path / "runs")
    for seed in ("seed-0", "seed-1"):
        status = tmp_path / "runs" / seed / "status.json"
        status.write_text(json.dumps(json.loads(status.read_text()) | {"reason": "interrupted"}))
    with locked(tmp_path / "runs" / "seed-1"):
        assert main(["train", "--resume", str(tmp_path / "runs"), "--parallel=1"]) == 1
    ended = [json.loads((tmp_path / "runs" / seed / "status.json").read_text()) for seed in ("seed-0", "seed-1")]
    assert [status["reason"] for status in ended] == ["done", "interrupted"]


# --- episodes -------------------------------------------------------------------------------------------------------

ENDS = """
import jax, jax.numpy as np

actions = 2
limit = 6

def start(key):
    return jax.random.uniform(key, (2,), minval=-1)

def step(state, action):
    over = np.abs(state[0]) > 0.5
    return np.where(over, np.nan, state), 1.0, over
"""


@pytest.mark.parametrize("compiled", [True, False])
def test_an_episode_that_ends_in_something_that_is_no_number_has_failed(compiled, tmp_path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    settings = {"env": f"{tmp_path / 'ends.py'}:step", "compiled": compiled, **SMALL, "groups_per_step": 8}
    trainer = GRPOTrainer(**settings)
    report = trainer.step()
    assert 0 < report["failed"] < 32 and report["failed"] % 4 == 0
    assert report["return"] == report["episode_length"] == 6 and report["updates_skipped"] == 0
    judged = trainer.evaluation(1)
    assert judged["return"] == judged["length"] == 6 and 0 < judged["failed"] < 20
    assert all(np.isfinite(p.detach()).all() for p in trainer.policy.parameters().values())
    with pytest.raises(SamplesFailed, match="of 32 samples failed"):
        GRPOTrainer(**settings).train(steps=1, progress=None)
