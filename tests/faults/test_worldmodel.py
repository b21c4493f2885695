"""Environments, numbers and folders that misbehave while a world is learned: told at once, counted later, survived."""

from pathlib import Path

import numpy as np
import pytest
import torch

from grpo.cli import main
from grpo.config import ConfigError
from grpo.envs.fleet import EnvError
from grpo.errors import SamplesFailed
from grpo.run.files import FolderError
from grpo.run.folder import RunFolder
from grpo.run.loop import run
from grpo.worldmodel import acting
from grpo.worldmodel.model.learner import ModelDiverged
from tests.docs import shell
from tests.faults import envs
from tests.faults.envs import SEEDS
from tests.unit.worldmodel.worlds import SMALL, make, same, weights

ROOT = Path(__file__).parents[2]
UNRULY = "tests.faults.envs:Unruly"
QUICK = {"checkpoint_every": 2, "sample_every": None, "progress": None, "curve": False}


def make_folder(path) -> RunFolder:
    return RunFolder.create(path, task="worldmodel", config={}, created="2026-11-15T10:15:00Z", seed=0)


@pytest.fixture
def doomed(monkeypatch):
    """`doomed("raises", 2)`: the second episode of the first lane is one where the environment does that deed."""
    real = acting.episode_seed

    def plan(deed, number, every=False):
        def seed(base, lane, at):
            hit = lane == 0 and (at >= number if every else at == number)
            return SEEDS[deed] if hit else real(base, lane, at)

        monkeypatch.setattr(acting, "episode_seed", seed)

    return plan


DEEDS = {
    "raises": "ValueError: no such state",
    "sleeps": "hung for 2 s; killed and started again",
    "dies": "its process died (exit code -9); started again",
    "NaN observation": "observation is not finite: nan",
    "wrong shape": "observation has shape (3, 1), its space (3,)",
    "grows": "observation has shape (5,), its space (3,)",
    "NaN reward": "reward",
}


@pytest.mark.parametrize("deed", DEEDS)
def test_on_the_first_step_it_is_an_error_that_says_who_and_when(deed, doomed):
    doomed(deed, 1)
    apart = deed in ("sleeps", "dies")
    how = {"vector": "processes", "workers": 2, "env_timeout": 2.0} if apart else {"vector": "serial"}
    trainer = make(UNRULY, **how)
    with pytest.raises(SamplesFailed) as error:
        trainer.step()
    trainer.source.close()
    message = str(error.value)
    assert message.startswith("on the first step the environment failed: Unruly ") and "\n" not in message
    assert f"step {envs.STEP}" in message and DEEDS[deed] in message


@pytest.mark.parametrize("deed", ["raises", "dies", "NaN observation"])
def test_later_ones_are_counted_and_survived(deed, doomed, tmp_path):
    """The episode is given up, its good steps are remembered, and the next one begins."""
    doomed(deed, 2)
    how = {"vector": "processes", "workers": 1} if deed == "dies" else {"vector": "serial"}
    trainer = make(UNRULY, **how)
    with pytest.warns(UserWarning, match="an episode was given up: Unruly"):
        summary = run(trainer, 4, make_folder(tmp_path / "run"), failure_budget=0.5, **QUICK)
    rows = RunFolder.open(tmp_path / "run").metrics()
    failed = sum(row["failed"] for row in rows)
    assert summary.reason == "done" and 1 <= failed <= 2  # an innocent goes with its worker
    assert rows[-1]["env_steps"] >= 40 + 3 * 10 and rows[-1]["model/updates"] > 0
    batch = trainer.source.replay.sample(16).batch
    assert all(np.isfinite(x).all() for x in batch.values())
    trainer.source.close()


def test_beyond_the_budget_the_run_stops_with_a_checkpoint(doomed, tmp_path):
    doomed("raises", 4, every=True)
    trainer = make(UNRULY, vector="serial")
    with pytest.warns(UserWarning, match="given up"):
        summary = run(trainer, 200, make_folder(tmp_path / "run"), **QUICK)
    assert summary.reason == "failures" and summary.exit_code == 1 and summary.checkpoint is not None
    trainer.source.close()


def test_an_environment_that_can_no_longer_begin_ends_with_its_message(monkeypatch):
    trainer = make("tests.faults.envs:Walk", vector="serial")
    trainer.step()
    reset = trainer.source.collector.fleet.reset

    def refuses(members, seeds):
        begun = reset(members, seeds)
        return type(begun)(begun.observation, dict.fromkeys(range(len(seeds)), "Walk member 0: out of order"))

    monkeypatch.setattr(trainer.source.collector.fleet, "reset", refuses)
    with pytest.raises(SamplesFailed, match="no episode could begin in 5 tries: Walk member 0: out of order"):
        for _ in range(5):
            trainer.step()
    trainer.source.close()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("tests.faults.envs:Undecided", "action space"),
        ("tests.faults.envs:Wordy", "observation space"),
        ("tests.faults.envs:Older", "must give"),
        ("CartPole-v2-typo", "no environment 'CartPole-v2-typo' is registered"),
    ],
)
def test_what_cannot_work_is_refused_before_a_folder_is_made(env, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "dreamer", "--env", env, "--vector", "serial", "--steps", "1", "--logdir", "run"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch):
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "shimmy" else found(name, *a))
    with pytest.raises(EnvError, match=r"needs shimmy; pip install 'anygrpo\[dm-control\]'"):
        make("dm_control/cartpole-swingup-v0")


# --- numbers --------------------------------------------------------------------------------------------------------


def poison(trainer, monkeypatch, times):
    """The world model's loss is NaN so many times from now on."""
    model, left = trainer.source.learner.model, [times]
    real = model.loss

    def loss(*arguments):
        found = real(*arguments)
        if left[0] > 0:
            left[0] -= 1
            return (found[0] * torch.nan, *found[1:])
        return found

    monkeypatch.setattr(model, "loss", loss)


def test_a_non_finite_update_of_the_model_is_skipped_and_counted(monkeypatch):
    trainer = make(train_ratio=3.2)
    trainer.step()
    learner = trainer.source.learner
    before = weights(learner.model)
    moments = {name: x.clone() for name, x in learner.state().arrays.items() if name.startswith("moments/")}
    poison(trainer, monkeypatch, 1)
    report = trainer.step()  # ten steps are one update
    assert report["model/updates_skipped"] == 1
    assert same(before, weights(learner.model))
    assert same(moments, {name: x for name, x in learner.state().arrays.items() if name.startswith("moments/")})
    assert trainer.step()["model/updates_skipped"] == 1 and not same(before, weights(learner.model))
    trainer.source.close()


def test_several_in_a_row_end_the_run(monkeypatch, tmp_path):
    trainer = make()
    trainer.step()
    poison(trainer, monkeypatch, 3)
    with pytest.raises(ModelDiverged, match="last 3 updates had a non-finite loss or gradient"):
        trainer.step()
    trainer.source.close()


@pytest.mark.parametrize(
    ("pays", "message"),
    [
        (lambda batch: None, "gave nothing; return rewards, or set batch"),
        (lambda batch: torch.zeros(3), r"gave rewards of shape \(3,\); expected \(12,\) for whole futures"),
        (lambda batch: torch.full((12, 5), torch.nan), "NaN or infinite, first for future 0"),
        (lambda batch: batch["picture"], "a batch of futures has no 'picture'; it has action"),
    ],
)
def test_rewards_of_ones_own_that_make_no_sense_are_refused(pays, message):
    trainer = make(reward_fn=pays)
    with pytest.raises(SamplesFailed, match=message):
        trainer.step()
    trainer.source.close()


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_damaged_replay_is_named_and_an_older_checkpoint_can_be_looked_at(tmp_path):
    small = {"steps_per_collect": 40, "replay_capacity": 200}
    trainer = make(**small)
    trainer.source.folder = tmp_path / "run"
    run(trainer, 4, make_folder(tmp_path / "run"), **QUICK)
    trainer.source.close()
    damaged = sorted((tmp_path / "run" / "replay").glob("steps-*.npy"))[-1]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(bytes(data))
    again = make(**small)
    again.source.folder = tmp_path / "run"
    with pytest.raises(FolderError, match=rf"{damaged.name} is damaged.*go on from another checkpoint"):
        run(again, 6, RunFolder.open(tmp_path / "run"), resume=True, **QUICK)
    again.source.close()
    seen = make(**small)  # looking needs no replay
    from grpo.run import checkpoint

    seen.load_state(checkpoint.resume_point(RunFolder.open(tmp_path / "run"), None).state)
    assert seen.evaluate(2).return_E.shape == (2,)
    seen.source.close()


def test_another_layout_of_the_replay_is_refused(tmp_path):
    trainer = make()
    trainer.step()
    state = trainer.state()
    trainer.source.close()
    other = make(replay_capacity=300)
    other.load_state(state)
    with pytest.raises(ConfigError, match="the replay was saved with other settings"):
        other.step()
    other.source.close()


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_in_the_middle_and_resumed_is_the_same_run(tmp_path):
    """kill -9 inside a step, through the command line; then `--resume`."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    words = ["train", "dreamer", *flags, "--steps", "5", "--checkpoint-every", "2", "--evaluate-every", "2"]
    code = "import sys, os\nfrom grpo.worldmodel.imagine import Imagination\n"
    code += "real, left = Imagination.__call__, [4]\n"
    code += "def fatal(*a):\n    left[0] -= 1\n    return os.kill(os.getpid(), 9) if not left[0] else real(*a)\n"
    code += "Imagination.__call__ = fatal\nfrom grpo.cli import main\nsys.exit(main(sys.argv[1:]))"
    (tmp_path / "fatal.py").write_text(code)
    assert shell.run(["python", "fatal.py", *words, "--logdir", "cut"], tmp_path, ROOT)[0] == -9
    done, said = shell.run(["grpo", "train", "--resume", "cut"], tmp_path, ROOT)
    assert done == 0, said
    assert shell.run(["grpo", *words, "--logdir", "whole"], tmp_path, ROOT)[0] == 0
    last = "checkpoints/step-00000005/arrays.safetensors"
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    assert (tmp_path / "cut" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
