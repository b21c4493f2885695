"""One door: a run that Python began is carried out the same way by the command, and the other way round."""

import json

import pytest

pytest.importorskip("gymnasium")

import torch

from grpo import GRPOConfig, GRPOTrainer
from grpo.app.settings import preset_layer
from grpo.bandit import BanditConfig
from grpo.bandit import make_trainer as make_bandit
from grpo.cli import main
from grpo.config import ConfigError
from grpo.control import GRPOTrainer as ControlTrainer
from grpo.run.folder import RunFolder
from grpo.run.trainer import GRPOTrainer as RunTrainer
from tests.faults.tiny import STATES, Payoff, Softmax


def as_preset() -> BanditConfig:
    return BanditConfig(payoffs=preset_layer("bandit").settings["payoffs"])


def rows(path):
    return RunFolder.open(path).metrics()


def test_the_command_goes_on_with_a_run_of_python_as_it_was_begun(tmp_path, capsys):
    """Evaluation goes on, and checkpoints are ranked by the metric they were ranked by before."""
    made = ControlTrainer(env="CartPole-v1", hidden=(8,), video=False)
    made.train(steps=6, evaluate_every=2, folder=tmp_path / "x", progress=None)
    assert main(["train", "--resume", str(tmp_path / "x"), "--run.steps", "8"]) == 0
    judged = [row["step"] for row in rows(tmp_path / "x") if "eval/return" in row]
    assert judged == [2, 4, 6, 8]
    kept = json.loads((tmp_path / "x" / "config.json").read_text())["run"]
    assert kept["best_by"] == "eval/return" and kept["evaluate_every"] == 2 and kept["steps"] == 8
    measured = {row["step"]: row.get("eval/return") for row in rows(tmp_path / "x")}
    for manifest in (tmp_path / "x" / "checkpoints").glob("step-*/manifest.json"):
        found = json.loads(manifest.read_text())
        assert found["score"] == pytest.approx(measured[found["step"]])


def test_python_goes_on_with_a_run_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "bandit", "--run.steps", "3", "--logdir", "b"]) == 0
    preset = as_preset()
    reports = make_bandit(preset).train(steps=5, folder="b", progress=None)
    assert [report.step for report in reports] == [4, 5]
    make_bandit(preset).train(steps=5, folder="whole", progress=None)
    assert (tmp_path / "b/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    assert main(["train", "--resume", "whole", "--run.steps", "6"]) == 0
    assert rows("whole")[-1]["step"] == 6


def test_with_and_without_a_folder_the_same_is_learned(tmp_path):
    alone, kept = make_bandit(BanditConfig(seed=3)), make_bandit(BanditConfig(seed=3))
    reports = alone.train(steps=6, progress=None)
    kept.train(steps=6, folder=tmp_path / "run", progress=None)
    assert torch.equal(alone.policy.parameters()["logits"], kept.policy.parameters()["logits"])
    assert [report["reward"] for report in reports] == [row["reward"] for row in rows(tmp_path / "run")]


def own() -> GRPOTrainer:
    return GRPOTrainer(GRPOConfig(group_size=4), Softmax(), reward_model=Payoff())


def test_a_policy_of_ones_own_has_the_same_door(tmp_path, capsys):
    batches = [STATES] * 5
    assert len(own().train(batches, steps=3, folder=tmp_path / "run", progress=None)) == 3
    assert len(own().train(batches, 2, progress=None)) == 2  # steps, as the second
    reports = own().train(batches, folder=tmp_path / "run", progress=None)
    assert [report.step for report in reports] == [4, 5]  # the states of steps that are done are passed over
    learned = own()
    learned.train(batches, steps=1, progress=None)
    reports = learned.train([STATES] * 2, folder=tmp_path / "later", progress=None)
    assert [report.step for report in reports] == [2, 3]  # these have not been done before: none is passed over
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "call train(folder=…) there" in capsys.readouterr().err


def test_every_room_s_train_is_the_same_function():
    from grpo.language import GRPOTrainer as LanguageTrainer
    from grpo.worldmodel import GRPOTrainer as WorldModelTrainer

    assert len({kind.train for kind in (RunTrainer, ControlTrainer, LanguageTrainer, WorldModelTrainer)}) == 1


def test_an_evaluation_that_cannot_be_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="the task bandit has no evaluation"):
        make_bandit(BanditConfig()).train(steps=2, evaluate_every=1, folder=tmp_path / "run", progress=None)
    assert not any(tmp_path.iterdir())


def test_a_run_keeps_its_name_when_it_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "bandit", "gspo", "--run.steps", "2", "--logdir", "b"]) == 0
    before = RunFolder.open("b").config["run"]["name"]
    assert main(["train", "--resume", "b", "--run.steps", "3"]) == 0
    assert before and RunFolder.open("b").config["run"]["name"] == before


def test_a_run_of_the_command_keeps_its_name_when_a_script_resumes_it(tmp_path):
    assert main(["train", "bandit", "--run.name", "mine", "--run.steps", "2", "--logdir", str(tmp_path / "b")]) == 0
    trainer = make_bandit(as_preset())
    trainer.train(steps=3, folder=tmp_path / "b", progress=None)
    assert (trainer.name, RunFolder.open(tmp_path / "b").config["run"]["name"]) == ("mine", "mine")


def test_the_first_and_the_last_step_keep_groups_and_a_run_that_goes_on_has_those_of_one_that_was_not_cut(tmp_path):
    plan = {"steps": 7, "progress": None}
    make_bandit(BanditConfig()).train(**plan, folder=tmp_path / "whole")
    assert RunFolder.open(tmp_path / "whole").sample_steps() == [1, 7]
    make_bandit(BanditConfig()).train(**plan | {"steps": 4}, folder=tmp_path / "cut")
    assert RunFolder.open(tmp_path / "cut").sample_steps() == [1, 4]
    make_bandit(BanditConfig()).train(**plan, folder=tmp_path / "cut")
    assert RunFolder.open(tmp_path / "cut").sample_steps() == [1, 7]


def test_the_first_command_learns_something(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "bandit", "--run.steps", "20", "--logdir", "b"]) == 0
    first, last = rows("b")[0], rows("b")[-1]
    assert last["best_arm_probability"] > 0.9 > 0.3 > first["best_arm_probability"]
    assert last["reward"] > 1.5 * first["reward"]


def test_a_run_is_begun_anew_where_that_is_asked_for_and_one_that_is_done_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "bandit", "--run.steps", "2", "--logdir", "b"]
    assert main(words) == 0
    assert main(words) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--seed", "3"]) == 0
    assert RunFolder.open("b").config["seed"] == 3 and len(rows("b")) == 2
    made = make_bandit(BanditConfig()).train(steps=2, folder="p", progress=None)
    capsys.readouterr()
    with pytest.warns(UserWarning, match="has done its 2 steps already: nothing was trained"):
        again = make_bandit(BanditConfig()).train(steps=2, folder="p", progress="plain")
    assert [(report.step, report["reward"]) for report in again] == [(r.step, r["reward"]) for r in made]
    assert "nothing was learned" not in capsys.readouterr().out  # no step says so
    assert len(make_bandit(BanditConfig(seed=4)).train(steps=2, folder="p", progress=None, overwrite=True)) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    assert main([*words[:-1], "mine", "--overwrite"]) == 2  # what is no run is left alone
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_that_does_not_begin_overwrites_none(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "bandit", "--run.steps", "2", "--logdir", "b"]) == 0
    assert main(["train", "--env", "Mistyped-v0", "--logdir", "b", "--overwrite"]) != 0
    assert RunFolder.open("b").config["task"] == "bandit" and len(rows("b")) == 2
    (tmp_path / "link").symlink_to("b")
    assert main(["train", "bandit", "--run.steps", "2", "--logdir", "link", "--overwrite"]) == 2
    assert len(rows("b")) == 2 and [*tmp_path.glob(".*")] == []
