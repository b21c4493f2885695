"""What was trained, back in Python: from a run folder, a saved one, an ONNX file, the hub."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("gymnasium")

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import grpo
from grpo.app.load import Policy
from grpo.app.onnx_policy import OnnxPlayers
from grpo.cli import main
from grpo.config import ConfigError
from grpo.control import GRPOTrainer
from grpo.envs.fleet import EnvError
from grpo.envs.spaces import as_rows
from tests.unit.app.hub_standin import hub
from tests.unit.worldmodel.worlds import make as make_world


@pytest.fixture(scope="module")
def pole(tmp_path_factory):
    """A run of a policy with a memory, so that something has to be remembered between observations."""
    path = tmp_path_factory.mktemp("runs") / "pole"
    trainer = GRPOTrainer(env="CartPole-v1", hidden=(8,), memory=8, video=False, films=False)
    trainer.train(steps=2, evaluate_every=1, folder=path, progress=None)
    trainer.source.close()
    return path


@pytest.fixture(scope="module")
def dream(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "dream"
    trainer = make_world(video=False, films=False)
    trainer.train(steps=2, folder=path, progress=None)
    trainer.source.close()
    return path


def played(policy: Policy, steps: int = 12) -> list[int]:
    """Actions of an episode whose observations do not depend on them."""
    policy.reset()
    observations = np.random.default_rng(0).normal(size=(steps, 4)).astype(np.float32)
    return [int(policy.act(observation)) for observation in observations]


def test_a_run_can_be_asked_for_actions(pole):
    policy = grpo.load(pole)
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=1)
    action, state = policy.predict(observation)
    assert env.action_space.contains(action)
    assert "remembers of 1 episode" in repr(state)
    again, _ = policy.predict(observation, state, episode_start=True)
    assert again == action  # nothing of before is remembered
    several, state = policy.predict(np.stack([observation] * 3), deterministic=False)
    assert several.shape == (3,) and policy.predict(np.stack([observation] * 3), state)[0].shape == (3,)
    many = np.stack([observation] * 64)
    drawn = [policy.predict(many, deterministic=False)[0].tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]  # whoever passes no state on draws anew all the same
    assert played(policy) == played(policy)
    assert 1 <= policy.evaluate(episodes=2)["return"] <= 500
    with pytest.raises(EnvError, match="does not fit the observation space"):
        policy.predict(np.zeros(5))
    policy.close()


def test_a_policy_without_a_memory_gives_no_state():
    trainer = GRPOTrainer(env="CartPole-v1", hidden=(8,), vector="serial")
    policy = Policy(trainer.player(), Path("nowhere"))
    observation = np.zeros(4, np.float32)
    action, state = policy.predict(observation)
    assert state is None and policy.predict(observation, state, episode_start=True) == (action, None)
    policy = Policy(GRPOTrainer(env="CartPole-v1", hidden=(8,), action_repeat=2).player(), Path("nowhere"))
    _, state = policy.predict(observation)
    assert state is not None and policy.predict(observation, state)[1] is None  # what was decided ahead is used up


def test_what_was_saved_and_exported_plays_as_the_run(pole, tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    policy = grpo.load(pole)
    saved = policy.save(tmp_path / "saved")
    card = (saved / "README.md").read_text()
    assert "grpo.load(" in card and "mean_reward" in card and "curve.png" in card and (saved / "curve.png").exists()
    again = grpo.load(saved)
    file = again.export(tmp_path / "sub" / "dir" / "policy.onnx")
    assert played(policy) == played(again) == played(grpo.load(file))
    with pytest.raises(ConfigError, match="likeliest actions alone"):
        grpo.load(file).predict(np.zeros(4), deterministic=False)
    assert main(["eval", str(saved), "--episodes", "2"]) == 0
    for taken in (saved, file):
        with pytest.raises(ConfigError, match="holds something already"):
            again.save(taken)
    with pytest.raises(ConfigError, match="cannot write to"):
        again.save(file / "below")


@pytest.mark.slow
def test_a_dreamer_plays_from_its_run_its_saved_folder_and_a_file(dream, tmp_path):
    pytest.importorskip("onnxruntime")
    policy = grpo.load(dream)
    again = grpo.load(policy.save(tmp_path / "saved"))
    assert played(policy) == played(again)
    assert main(["export", str(dream), "--onnx", str(tmp_path / "a" / "dream.onnx")]) == 0
    file = grpo.load(tmp_path / "a" / "dream.onnx")
    assert set(played(file)) <= {0, 1} and played(file) == played(file)


def test_a_policy_goes_to_the_hub_and_comes_back(pole, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    policy = grpo.load(pole)
    with hub() as (address, held):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        assert "me/pole" in policy.push_to_hub("me/pole")
        assert {"README.md", "run.json", "curve.png", "checkpoints/latest"} <= {*held["me/pole"]}
        fetched = grpo.load("me/pole")
        assert played(fetched) == played(policy)
        assert played(grpo.load(fetched.save(tmp_path / "kept"))) == played(policy)  # the cache holds links
        with pytest.raises(ConfigError, match="could not be fetched from the hub"):
            grpo.load("me/nothing")


def test_a_policy_that_could_not_be_uploaded_is_not_said_to_lie_somewhere(pole, monkeypatch):
    def refuse(*_, **__):
        raise OSError("401")

    monkeypatch.setattr(pytest.importorskip("huggingface_hub").HfApi, "create_repo", refuse)
    policy = grpo.load(pole)
    with pytest.raises(ConfigError, match=r"the policy could not be uploaded to me/pole.*try again"):
        policy.push_to_hub("me/pole")


def test_what_cannot_be_loaded_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is nothing; give a run folder"):
        grpo.load(tmp_path / "none")
    assert main(["train", "bandit", "--run.steps", "1", "--logdir", "b"]) == 0
    with pytest.raises(ConfigError, match="leaves no policy to ask"):
        grpo.load("b")
    with pytest.raises(ConfigError, match="grpo export RUN"):
        grpo.load("no.onnx")
    with pytest.raises(ConfigError, match="there is nothing; give a run folder"):
        grpo.load("runs/mistyped")  # the hub is not asked
    capsys.readouterr()
    for words in (["eval", "runs/mistyped", "--episodes", "3"], ["export", "runs/mistyped"], ["chat", "runs/mistyped"]):
        assert main(words) == 2 and "no run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"), [(["--private"], "for --push"), (["--onnx", "a.onnx", "--to", "b"], "one of")]
)
def test_flags_of_an_export_that_would_do_nothing_are_refused(flags, told, pole, capsys):
    assert main(["export", str(pole), *flags]) == 2 and told in capsys.readouterr().err


def test_in_a_file_each_episode_has_actions_ahead_of_its_own():
    class Session:
        def get_modelmeta(self):
            return SimpleNamespace(custom_metadata_map={"chunk": "2"})

        def get_outputs(self):
            return [SimpleNamespace(name="action")]

        def run(self, _, given):
            return [np.stack([given["observation"], given["observation"] + 1], 1)]

    players = OnnxPlayers(SimpleNamespace(session=Session(), hidden=None), 2)
    assert players.decide({"observation": np.array([10, 20])}).tolist() == [10, 20]
    players.forget(np.array([False, True]))
    assert players.decide({"observation": np.array([0, 30])}).tolist() == [11, 30]


def test_observations_one_by_one_and_side_by_side():
    space = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Discrete(3)})
    tree, single = as_rows({"a": [0, 1], "b": 2}, space)
    assert single and tree["a"].shape == (1, 2) and tree["b"].shape[0] == 1
    tree, single = as_rows({"a": np.zeros((5, 2)), "b": np.zeros(5)}, space)
    assert not single and tree["a"].shape == (5, 2) and len(tree["b"]) == 5
