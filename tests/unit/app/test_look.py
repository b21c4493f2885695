"""`grpo eval` and `grpo export`: the policy that a run learned, from its folder alone."""

import json
import sys

import numpy as np
import pytest
import torch

from grpo.app import look
from grpo.config import ConfigError
from grpo.control import GRPOTrainer
from grpo.control.groups import EVALUATION, seeds
from grpo.envs.evaluate import Evaluation
from grpo.envs.fleet import EnvError
from grpo.run.folder import RunFolder
from tests.faults import envs

SMALL = {"group_size": 4, "groups_per_step": 2, "num_iterations": 2, "eval_episodes": 4, "hidden": (16,)}


def train(path, steps=4, env="CartPole-v1", **settings) -> GRPOTrainer:
    made = GRPOTrainer(env=env, video=False, **SMALL | settings)
    made.train(steps=steps, evaluate_every=1, folder=path, progress=None)
    made.source.close()
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder, and its trainer after the last step."""
    path = tmp_path_factory.mktemp("look") / "run"
    return path, train(path, gamma=0.98, scale_observations=True, seed=1)


def evaluate(path, which="best", episodes=3, greedy=True, seed=None, as_json=True, render=False, video=None):
    said = look.evaluate(path, which, episodes, greedy, seed, as_json, render, video)
    return json.loads(said) if as_json else said


def test_the_last_is_the_policy_as_the_run_left_it(trained):
    path, made = trained
    found, checkpoint = look.trained(path, "last")
    assert checkpoint.step == 4 == found.steps_done
    for name, parameter in found.policy.parameters().items():
        assert torch.equal(parameter, made.policy.parameters()[name]), name
    seen = np.random.default_rng(0).normal(size=(5, 4))
    np.testing.assert_array_equal(found.source.scaling(seen), made.source.scaling(seen))
    assert found.evaluate(4).return_E.tolist() == made.evaluate(4).return_E.tolist()


def test_the_best_is_the_one_that_was_judged_best(trained):
    path, _ = trained
    judged = {row["step"]: row["eval/return"] for row in RunFolder.open(path).metrics()}
    best = max(judged, key=lambda step: (judged[step], step))
    assert evaluate(path)["checkpoint"] == best
    assert evaluate(path, str(best))["checkpoint"] == best and evaluate(path, "last")["checkpoint"] == 4


def test_starts_are_those_the_run_has_never_seen_unless_chosen(trained):
    path, made = trained
    fresh = made.evaluate(5, seed=made.config.seed + look.FRESH)
    found = evaluate(path, "last", episodes=5)["results"][0]
    assert found["mean"] == fresh.return_E.mean() and found["episodes"] == 5
    own = evaluate(path, "last", episodes=5, seed=made.config.seed)["results"][0]
    assert own["mean"] == made.evaluate(5).return_E.mean()
    seen, unseen = (seeds(made.config.seed + more, 0, EVALUATION, 50) for more in (0, look.FRESH))
    assert not {*seen} & {*unseen}


def test_the_table_for_people_and_the_same_in_json(trained):
    path, _ = trained
    row = evaluate(path, "last")["results"][0]
    lines = evaluate(path, "last", as_json=False).splitlines()
    assert lines[0] == f"{path}, step 4, 3 greedy episodes on fresh starts"
    assert lines[1].split() == ["mean", "95", "%", "interval", "std", "min", "max"]
    assert lines[2].split()[:2] == ["return", f"{row['mean']:.4g}"]
    assert "3 sampled episodes" in evaluate(path, "last", as_json=False, greedy=False)
    about = evaluate(path, "last", greedy=False)
    assert about["greedy"] is False and about["run"] == str(path)


def test_which_interval_is_which_is_said():
    played = Evaluation(np.array([3.0, 3.0]), np.array([5, 7]), np.array([1.0, 1.0]))
    lines = look._table(played.table()).splitlines()
    shown = [line.split()[:3] for line in lines[1:4]]
    assert shown == [["return", "3", "–"], ["length", "6", "5"], ["success", "1", "0.3424"]]
    assert lines[4] == "interval of the mean: Wilson's for shares (success), else a bootstrap; –: all alike"


def test_a_video_is_left_where_it_is_said_to_be(trained, tmp_path):
    path, _ = trained
    place = tmp_path / "look.mp4"
    said = evaluate(path, "last", episodes=1, as_json=False, video=str(place))
    assert said.splitlines()[-1] == f"video: {place}" and b"ftyp" in place.read_bytes()[:16]


def test_looking_leaves_the_run_as_it_was(trained):
    path, _ = trained
    files = ("metrics.jsonl", "config.json", "checkpoints/latest")
    before = [(path / name).read_bytes() for name in files]
    evaluate(path)
    assert [(path / name).read_bytes() for name in files] == before
    assert {p.name for p in path.iterdir()} >= {"metrics.jsonl", "curve.png"}


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("9999", "has no checkpoint of step 9999; there: "),
        ("worst", "--checkpoint worst: give best, last or the number of a step"),
        ("-1", "--checkpoint -1: give best, last"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(which, message, trained):
    with pytest.raises(ConfigError, match=message):
        look.trained(trained[0], which)


def test_a_folder_without_a_run_and_a_run_without_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="is no run folder"):
        look.trained(tmp_path)
    about = {"task": "control", "config": {"task": "control"}, "created": "2026-11-15T10:15:00Z", "seed": 0}
    RunFolder.create(tmp_path / "new", **about)
    with pytest.raises(ConfigError, match="has no checkpoint yet; train longer"):
        look.trained(tmp_path / "new")


@pytest.mark.parametrize("settings", [{"memory": 4}, {"group_by": "steps", "advantage": "step"}], ids=str)
def test_every_kind_of_policy_comes_back(settings, tmp_path):
    made = train(tmp_path / "run", steps=2, **settings)
    found = evaluate(tmp_path / "run", "last", seed=made.config.seed)["results"][0]
    assert found["mean"] == made.evaluate(3).return_E.mean()


def test_an_actor_of_ones_own_is_not_in_the_folder(tmp_path):
    """Only its weights are, and nobody here knows what they belong to."""
    made = GRPOTrainer(env="CartPole-v1", actor=torch.nn.Linear(4, 2), group_size=2, groups_per_step=1, video=False)
    made.train(steps=1, folder=tmp_path / "run", progress=None)
    with pytest.raises(ValueError, match="the saved policy has other parameters than this one"):
        look.trained(tmp_path / "run")


def test_when_every_episode_fails_the_first_reason_is_told(monkeypatch, tmp_path):
    train(tmp_path / "run", steps=1, env="tests.faults.envs:Walk", vector="serial")
    real, calls = envs.Walk.step, []

    def step(self, action):
        calls.append(action)
        if len(calls) > 2:  # each of the two fleets tries one when it is made
            raise RuntimeError("the servers are down")
        return real(self, action)

    monkeypatch.setattr(envs.Walk, "step", step)
    with pytest.raises(EnvError, match="all 3 episodes failed: Walk member 0, step 1: RuntimeError: the servers"):
        evaluate(tmp_path / "run")


def test_an_export_names_the_package_that_is_missing(trained, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"needs onnxruntime: pip install 'anygrpo\[export\]'"):
        look.export(trained[0], "last", tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()
