"""The front door: what train leaves and when it stops, and looking at what was learned."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from grpo.app.look import trained
from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer, make_trainer
from grpo.control import test as look_at
from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory
from grpo.errors import SamplesFailed
from grpo.run.checkpoint import CheckpointError
from grpo.run.folder import RunFolder
from tests.faults import envs

SMALL = {"group_size": 4, "groups_per_step": 2, "num_iterations": 2, "eval_episodes": 4, "max_episode_steps": 40}
STREAM = {"group_by": "steps", "advantage": "step", "groups_per_step": 1, "group_size": 13}


def make(env="CartPole-v1", **settings) -> GRPOTrainer:
    return GRPOTrainer(env=env, **SMALL | {"hidden": (16,)} | settings)


class Doubled(gym.Wrapper):
    """Pays twice. Does not say how it was made, so it cannot be made again."""

    def step(self, action):
        seen, reward, terminated, truncated, info = self.env.step(action)
        return seen, 2 * reward, terminated, truncated, info


# --- a run's folder -------------------------------------------------------------------------------------------------


def test_a_folder_gets_everything_a_run_leaves(tmp_path):
    reports = make(gamma=0.98).train(steps=4, evaluate_every=2, folder=tmp_path / "run", progress=None)
    folder = RunFolder.open(tmp_path / "run")
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4] == [report.step for report in reports]
    assert rows[-1]["eval/return"] == reports[-1]["eval/return"] and "eval/return" not in rows[0]
    assert sorted(path.name for path in folder.checkpoints.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert b"ftyp" in (tmp_path / "run" / "video.mp4").read_bytes()[:16]
    assert not list(folder.events())
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["env"] == "CartPole-v1" and kept["gamma"] == 0.98 and kept["hidden"] == [16]


def test_a_fresh_trainer_goes_on_in_the_folder_of_another(tmp_path):
    options = {"evaluate_every": 2, "progress": None}
    make(video=False).train(steps=5, folder=tmp_path / "whole", **options)
    make(video=False).train(steps=3, folder=tmp_path / "cut", **options)
    reports = make(video=False).train(steps=5, folder=tmp_path / "cut", **options)
    assert [report.step for report in reports] == [4, 5]
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="learning_rate"):
        make(video=False, learning_rate=0.5).train(steps=6, folder=tmp_path / "cut", **options)


def test_a_trainer_that_has_learned_may_begin_a_folder(tmp_path):
    made = make(video=False)
    made.train(steps=1, progress=None)
    made.train(steps=3, folder=tmp_path / "run", progress=None)
    assert [row["step"] for row in RunFolder.open(tmp_path / "run").metrics()] == [2, 3]


def test_an_only_copy_that_plays_a_stream_is_not_evaluated_unless_asked(tmp_path):
    made = make(env=envs.Walk(), video=False, **STREAM)
    made.train(steps=6, folder=tmp_path / "run", progress=None)
    rows = RunFolder.open(tmp_path / "run").metrics()
    assert len(rows) == 6 and not any(name.startswith("eval/") for row in rows for name in row)
    with pytest.raises(EnvError, match="is the only copy and busy with its stream"):
        made.train(steps=1, evaluate_every=1, progress=None)


def test_what_cannot_be_drawn_is_an_event_and_no_failure(tmp_path):
    made = make(env="tests.faults.envs:Walk", vector="serial")
    made.train(steps=1, folder=tmp_path / "run", progress=None)
    events = {event["event"]: event["message"] for event in RunFolder.open(tmp_path / "run").events()}
    assert events["nothing_to_show"] == "Walk cannot be drawn (NotImplementedError)"
    assert not (tmp_path / "run" / "video.mp4").exists()


def test_a_tracker_of_ones_own_gets_rows_and_the_video(tmp_path, monkeypatch):
    class Notes:
        def __init__(self):
            self.rows, self.shown, self.closed = [], [], False

        def log(self, step, metrics):
            self.rows.append((step, metrics["return"]))

        def show(self, step, name, path):
            self.shown.append((step, name, path.read_bytes()[4:8]))

        def close(self):
            self.closed = True

    monkeypatch.chdir(tmp_path)
    notes = Notes()
    reports = make().train(steps=2, trackers=[notes], progress=None)
    assert notes.rows == [(report.step, report["return"]) for report in reports]
    assert notes.shown == [(2, "video", b"ftyp")] and notes.closed
    (left,) = (tmp_path / "runs").iterdir()
    assert left.name.startswith("CartPole-v1-")


def test_failures_on_the_first_step_are_an_error_also_without_a_folder():
    class Sometimes(envs.Walk):
        def step(self, action):
            if self.steps == 3:
                raise RuntimeError("not today")
            return super().step(action)

    with pytest.raises(SamplesFailed, match=r"on the first step 8 of 8 samples failed: .* step 4: RuntimeError"):
        make(env=Sometimes, vector="serial").train(steps=2, progress=None)


# --- when it ends ---------------------------------------------------------------------------------------------------


def test_it_must_be_told_when_to_end():
    with pytest.raises(ValueError, match="needs total_updates, steps, env_steps or stop_at"):
        make().train()


def test_it_ends_with_the_steps_of_the_environment():
    reports = make().train(env_steps=300, progress=None)
    assert reports[-1]["env_steps"] >= 300 > reports[-2]["env_steps"]


@pytest.mark.parametrize("to_folder", [False, True])
def test_it_ends_when_it_is_good_enough(to_folder, tmp_path):
    folder = tmp_path / "run" if to_folder else None
    reports = make(video=False).train(steps=9, stop_at=5.0, evaluate_every=2, folder=folder, progress=None)
    assert len(reports) == 2 and reports[-1]["eval/return"] >= 5.0
    assert len(make(video=False).train(steps=3, stop_at=1e9, evaluate_every=1, progress=None)) == 3


def test_a_callback_sees_every_step_and_may_end_it():
    seen = []
    reports = make().train(
        steps=9, callbacks=[lambda report: seen.append(report.step) or report.step < 3], progress=None
    )
    assert seen == [1, 2, 3] and len(reports) == 3
    assert not hasattr(reports[0], "experience") and hasattr(reports[-1], "experience")


def test_the_tutorials_word_for_steps(tmp_path):
    reports = make(**STREAM).train(total_updates=2, progress=None)
    assert [report.step for report in reports] == [1, 2]


def test_progress_is_told(capsys):
    make().train(steps=2, evaluate_every=1, progress="plain")
    out = capsys.readouterr().out
    assert "step=2/2" in out and " return=" in out and "eval/return=" in out


# --- what may be given ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        "tests.faults.envs:Walk",
        f"{envs.__file__}:Walk",
        envs.Walk,
        lambda: envs.Walk(length=10),
        EnvFactory(envs.Walk),
        envs.Walk(),
    ],
    ids=["module", "file", "class", "factory", "EnvFactory", "environment"],
)
def test_an_environment_may_be_named_made_or_given(env):
    more = {} if isinstance(env, gym.Env) else {"vector": "serial"}
    made = make(env=env, **more)
    assert made.step()["episode_length"] == 10 and made.evaluate(2).length_E.tolist() == [10, 10]
    made.source.close()


def test_arguments_reach_the_environment_and_limits_hold_everywhere():
    made = make(env="tests.faults.envs:Walk", env_kwargs={"length": 6}, vector="serial")
    assert made.step()["episode_length"] == 6
    for env in ("CartPole-v1", gym.make("CartPole-v1"), envs.Walk()):
        short = make(env=env, max_episode_steps=5)
        assert short.step()["episode_length"] == 5
        assert short.evaluate(2).length_E.tolist() == [5, 5]
        assert len(short.watch(2)) == 2
    assert make(env=gym.make("CartPole-v1"), max_episode_steps=5).watch(2) == [5.0, 5.0]
    with pytest.raises(ConfigError, match="env_kwargs has no effect on an environment that is made already"):
        make(env=envs.Walk(), env_kwargs={"length": 6})


def test_a_wrapper_that_cannot_be_made_again_is_the_only_copy():
    made = make(env=Doubled(gym.make("CartPole-v1")))
    report = made.step()
    assert made.source.fleet.size == 1 and report["failed"] == 0
    assert report["return"] == 2 * report["episode_length"]
    found = made.evaluate(3)
    assert found.return_E.tolist() == (2.0 * found.length_E).tolist()


def test_settings_come_one_way():
    with pytest.raises(TypeError, match="give config or single settings, not both: gamma"):
        GRPOTrainer(config=ControlConfig(), gamma=0.9)
    with pytest.raises(TypeError, match="config says env=CartPole-v1; leave env=Pendulum-v1 out"):
        GRPOTrainer("Pendulum-v1", config=ControlConfig())
    assert GRPOTrainer("CartPole-v1", config=ControlConfig()).source.fleet.name == "CartPole-v1"
    assert make_trainer(ControlConfig(env="Pendulum-v1")).source.fleet.name == "Pendulum-v1"


# --- looking --------------------------------------------------------------------------------------------------------


def test_looking_prints_each_episode_and_takes_another_actor(capsys):
    made = make()
    returns = made.test(episodes=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"Test Episode {n} | Reward: {total}" for n, total in enumerate(returns, 1)]
    left = nn.Linear(4, 2)
    nn.init.zeros_(left.weight)
    left.bias.data = torch.tensor([1.0, 0.0])
    pushed = made.test(episodes=2, actor=left)
    assert max(pushed) <= 12 and pushed == look_at("CartPole-v1", left, episodes=2)
    assert made.test(episodes=2, env=gym.make("CartPole-v1"), actor=left) == pushed


def test_looking_at_another_action_space_is_refused():
    with pytest.raises(ValueError, match=r"actor gives \(2, 3\), the action space Discrete\(2\) needs \(2, 2\)"):
        look_at("CartPole-v1", nn.Linear(4, 3))


@pytest.mark.parametrize("only", [False, True], ids=["can be made again", "only copy"])
def test_looking_leaves_a_stream_where_it_was(only):
    """The environment that was given is a member of the fleet, in the middle of an episode."""

    def returns(look):
        env = gym.make("CartPole-v1")
        made = make(env=Doubled(env) if only else env, max_episode_steps=None, **STREAM)
        found = []
        for step in range(6):
            found.append(made.step()["return"])
            if look and step == 2:
                made.watch(1)
                made.test(made.env, episodes=1)
        return found

    assert returns(True) == returns(False)


def test_watching_uses_starts_of_evaluation_and_keeps_a_video(tmp_path):
    made = make()
    assert made.watch(2, video=tmp_path / "two.mp4") == made.evaluate(2).return_E.tolist()
    assert (tmp_path / "two.mp4").exists()


def test_an_exported_policy_acts_the_same(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = make(env="Pendulum-v1", scale_observations=True)
    made.train(steps=2, progress=None)
    path = made.export(tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    seen = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32) * [1, 1, 8]
    source = made.source
    ours = source.policy.head.to_env(source.policy.act(source.scaling(seen.astype(np.float32)), None).recorded)
    theirs = session.run(["action"], {"observation": seen.astype(np.float32)})[0]
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)
    assert ours.std() > 1e-3


def test_no_steps_is_an_error_and_not_for_ever():
    made = GRPOTrainer(env="CartPole-v1")
    for wrong in ({"steps": 0}, {"total_updates": 0}, {"steps": -1}, {"steps": 1, "evaluate_every": 0}):
        with pytest.raises(ValueError, match="at least one step"):
            made.train(progress=None, **wrong)


def test_settings_of_an_optimizer_that_was_given_are_refused():
    actor = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match="learning_rate has no effect with an optimizer of your own"):
        GRPOTrainer(
            env="CartPole-v1", actor=actor, optimizer=torch.optim.SGD(actor.parameters(), lr=0.1), learning_rate=1.0
        )


def test_a_folder_remembers_how_a_ready_made_environment_was_made(tmp_path):
    env = gym.make("FrozenLake-v1", is_slippery=False, max_episode_steps=30)
    made = GRPOTrainer(env=env, group_by="batch", hidden=(), video=False)
    made.train(steps=1, folder=tmp_path / "run", progress=None)
    again, _ = trained(tmp_path / "run")
    assert again.source.fleet.horizon == 30
    assert again.source.evaluator.copies.single.make().unwrapped.spec.kwargs["is_slippery"] is False


def test_copies_of_an_environment_with_a_window_have_none():
    made = GRPOTrainer(env=gym.make("CartPole-v1", render_mode="rgb_array"), group_size=2, groups_per_step=1)
    assert made.source.evaluator.copies.single.make().render_mode is None


def test_dropout_is_off_while_learning_too():
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 2))
    made = GRPOTrainer(env="CartPole-v1", actor=actor, num_iterations=1, learning_rate=1e-9, old_logp="recorded")
    assert abs(made.step()["approx_kl"]) < 1e-4
