"""The CartPole tutorial: its classes' words, its `main`, and the tracker's run that it opens by itself."""

import sys
import types

import gymnasium as gym
import pytest
import torch
from torch import nn

from grpo.bandit import BanditConfig
from grpo.bandit import make_trainer as make_bandit
from grpo.control import GRPOTrainer, test
from grpo.errors import ConfigError
from grpo.run.open_trackers import found
from grpo.run.start import MOST
from grpo.run.trackers import TrackerError

test.__test__ = False  # a function of the library, not one of ours

WORDS = {"clip_ratio": 0.2, "beta": 0.001, "gamma": 0.99, "epochs": 10, "batch_size": 32, "group_size": 200}
ITS_METRICS = {"update", "avg_reward", "policy_loss", "kl_divergence"}


@pytest.fixture
def parts():
    """An environment, an actor and an optimizer, as its `main` makes them."""
    env = gym.make("CartPole-v1")
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(env.observation_space.shape[0], 16), nn.Tanh(), nn.Linear(16, env.action_space.n))
    yield env, actor, torch.optim.Adam(actor.parameters(), lr=3e-4)
    env.close()


class Run:
    """What a run of Weights & Biases takes, and what it would then refuse."""

    def __init__(self):
        self.rows, self.step, self.over = [], 0, False

    def log(self, data, step=None, commit=None):
        assert not self.over, "a run that is finished takes nothing"
        assert step is None or step >= self.step  # rows of earlier steps are dropped there
        self.step = self.step + 1 if step is None else step
        self.rows.append(dict(data))

    def finish(self):
        self.over = True


@pytest.fixture
def wandb(monkeypatch):
    """The library, as far as scripts and trackers use it."""
    module = types.ModuleType("wandb")
    module.run = None

    def init(**options):
        module.run = Run()
        return module.run

    module.init, module.log = init, lambda data, **more: module.run.log(data, **more)
    module.Settings = lambda **settings: settings
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


# --- its main -------------------------------------------------------------------------------------------------------


def test_its_main_logs_into_the_run_it_opened_and_leaves_it_open(parts, wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    env, actor, optimizer = parts
    wandb.init(project="grpo-cartpole")
    wandb.log({"mine": 1.0})
    trainer = GRPOTrainer(env=env, actor=actor, optimizer=optimizer, **WORDS | {"epochs": 1})
    trainer.train(total_updates=3)
    test(gym.make("CartPole-v1"), actor, episodes=2, render=False)
    wandb.log({"mine": 2.0})  # still open
    ours = wandb.run.rows[1:-1]
    assert [row["update"] for row in ours] == [0, 1, 2] and [row["step"] for row in ours] == [1, 2, 3]
    assert all(set(row) >= ITS_METRICS for row in ours) and not wandb.run.over
    assert list(tmp_path.iterdir()) == []  # nothing was asked to be kept
    assert "Test Episode 2 | Reward: " in capsys.readouterr().out


def test_a_run_that_is_asked_for_by_name_and_open_is_not_finished(wandb, tmp_path):
    mine = wandb.init(project="mine")
    make_bandit(BanditConfig()).train(2, folder=tmp_path / "run", trackers=["wandb"], progress=None)
    assert wandb.run is mine and len(mine.rows) == 2 and not mine.over
    wandb.log({"mine": 1.0})


def test_none_means_no_tracker_and_a_run_of_ours_is_finished(wandb, tmp_path):
    mine = wandb.init(project="mine")
    make_bandit(BanditConfig()).train(2, trackers=None, progress=None)
    assert mine.rows == []
    wandb.run = None
    made = []
    wandb.init = lambda **options: made.append(Run()) or made[0]
    make_bandit(BanditConfig()).train(2, trackers=["wandb"], folder=tmp_path / "run", progress=None)
    assert len(made[0].rows) == 2 and made[0].over


def test_open_runs_of_other_trackers_get_the_metrics_too(monkeypatch):
    told = []

    class Trackio:
        def log(self, metrics, step=None):
            told.append(("trackio", step, metrics))

        def finish(self):
            told.append("finished")

    mlflow = types.ModuleType("mlflow")
    mlflow.active_run = lambda: types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))
    mlflow.log_metrics = lambda metrics, step, run_id: told.append(("mlflow", step, metrics))
    context = types.ModuleType("trackio.context_vars")
    context.current_run = types.SimpleNamespace(get=Trackio)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "trackio.context_vars", context)
    make_bandit(BanditConfig()).train(2, progress=None)
    assert [(name, step) for name, step, _ in told] == [("trackio", 1), ("mlflow", 1), ("trackio", 2), ("mlflow", 2)]
    assert all("reward" in metrics for *_, metrics in told)


def test_a_writer_that_is_handed_over_is_written_to_and_stays_open(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX")
    writer = tensorboard.SummaryWriter(str(tmp_path / "mine"))
    make_bandit(BanditConfig()).train(2, trackers=[writer], folder=tmp_path / "run", progress=None)
    writer.add_scalar("mine", 1.0, 3)  # a closed one would begin a new file
    writer.close()
    (file,) = (tmp_path / "mine").iterdir()
    content = file.read_bytes()
    assert b"reward_std" in content and b"mine" in content


def test_a_run_that_is_handed_over_is_logged_into(wandb, tmp_path):
    mine = wandb.init()
    wandb.run = None  # not the one that is current
    make_bandit(BanditConfig()).train(2, trackers=[mine], folder=tmp_path / "run", progress=None)
    assert len(mine.rows) == 2 and not mine.over
    with pytest.raises(TrackerError, match=r"object is no tracker: it needs log\(step, metrics\) and close\(\)"):
        make_bandit(BanditConfig()).train(2, trackers=[object()], folder=tmp_path / "other", progress=None)


def test_an_open_run_that_fails_is_left_out_with_a_warning(wandb):
    mine = wandb.init()
    mine.over = True
    with pytest.warns(UserWarning, match="OpenWandb failed and is left out"):
        reports = make_bandit(BanditConfig()).train(3, progress=None)
    assert len(reports) == 3


def test_nothing_is_looked_for_in_libraries_that_are_not_loaded(monkeypatch):
    for name in ("wandb", "mlflow", "trackio.context_vars"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert found() == {} and "wandb" not in sys.modules


@pytest.mark.slow
def test_wandb_itself_offline(parts, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    env, actor, optimizer = parts
    mine = wandb.init(project="grpo-cartpole")
    try:
        trainer = GRPOTrainer(env=env, actor=actor, optimizer=optimizer, **WORDS | {"epochs": 1})
        trainer.train(total_updates=2)
        assert wandb.run is mine and set(dict(mine.summary)) >= ITS_METRICS
        make_bandit(BanditConfig()).train(2, folder=tmp_path / "run", trackers=["wandb"], progress=None)
        wandb.log({"mine": 1.0})
        assert wandb.run is mine and mine.step == 5
    finally:
        wandb.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"kl_divergence" in file.read_bytes()


@pytest.mark.slow
def test_mlflow_and_trackio_themselves(tmp_path, monkeypatch):
    mlflow, trackio = pytest.importorskip("mlflow"), pytest.importorskip("trackio")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    trackio.init(project="mine")
    with mlflow.start_run() as mine:
        make_bandit(BanditConfig()).train(3, progress=None)
        assert mlflow.active_run().info.run_id == mine.info.run_id
    trackio.log({"mine": 1.0})
    trackio.finish()
    assert [point.step for point in mlflow.MlflowClient().get_metric_history(mine.info.run_id, "reward")] == [1, 2, 3]
    for steps in (2, 4):  # one of its own, and its resumption
        make_bandit(BanditConfig()).train(steps, trackers=["mlflow"], folder=tmp_path / "run", progress=None)
    (own,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("grpo").experiment_id])
    assert own.info.status == "FINISHED" and own.data.params["task"] == "bandit"
    assert len(mlflow.MlflowClient().get_metric_history(own.info.run_id, "reward")) == 4


# --- its words ------------------------------------------------------------------------------------------------------


def test_train_without_a_number_makes_its_three_hundred_updates(parts):
    trainer = GRPOTrainer(*parts, **WORDS)
    assert trainer.planned({}, kept=False).steps == 300 and trainer.planned({"steps": 4}, kept=False).steps == 4


@pytest.mark.parametrize("words", [{}, {"group_size": 200}, {"beta": 0.01}, {"gamma": 0.9}, {"beta": 0.1, "seed": 3}])
def test_an_environment_an_actor_and_an_optimizer_mean_the_tutorial_and_say_so(parts, words, capsys):
    trainer = GRPOTrainer(*parts, **words)
    told = capsys.readouterr().out.splitlines()
    assert told == ["read as the tutorial's words: a group is a window of 200 steps; for episodes say group_by='start'"]
    config = trainer.config
    assert (config.group_by, config.group_size, config.num_iterations) == ("steps", 200, 10)
    assert (config.decisions_per_minibatch, config.max_grad_norm, config.kl_estimator) == (32, 0.5, "exact")


@pytest.mark.parametrize("word", ["clip_ratio", "epochs", "batch_size"])
def test_its_own_words_need_no_line(parts, word, capsys):
    trainer = GRPOTrainer(*parts, **{word: WORDS[word]})
    assert trainer.config.group_by == "steps" and capsys.readouterr().out == ""


def test_many_tries_from_one_start_are_said_aloud_and_few_are_not(capsys):
    assert GRPOTrainer(env="CartPole-v1", group_size=200).config.group_by == "start"
    told = "group_size=200: as many episodes from one start; for a window of steps say group_by='steps'\n"
    assert capsys.readouterr().out == told
    GRPOTrainer(env="CartPole-v1", group_size=8, gamma=0.9)
    GRPOTrainer(env="CartPole-v1", group_size=200, group_by="start")
    assert capsys.readouterr().out == ""


def test_our_words_beside_its_parts_stay_ours(parts, capsys):
    trainer = GRPOTrainer(*parts, groups_per_step=2)
    assert trainer.config.group_by == "start" and trainer.recipe.name == "control" and capsys.readouterr().out == ""


def test_its_attributes_can_be_read(parts):
    trainer = GRPOTrainer(*parts, **WORDS)
    assert {name: getattr(trainer, name) for name in WORDS} == WORDS
    assert (trainer.env, trainer.actor, trainer.optimizer) == parts
    trainer.train(1, progress=None)
    assert len(trainer.ep_rewards) > 3 and all(reward >= 8 for reward in trainer.ep_rewards)
    assert sum(trainer.ep_rewards) <= 200


def test_its_list_of_returns_is_of_the_last_episodes(parts):
    trainer = GRPOTrainer(*parts, **WORDS)
    trainer.ep_rewards += [0.0] * MOST
    trainer.train(1, progress=None)
    assert len(trainer.ep_rewards) == MOST and trainer.ep_rewards[-1] >= 8


def test_what_is_not_there_names_what_is(parts):
    trainer = GRPOTrainer(*parts, **WORDS)
    with pytest.raises(AttributeError, match=r"'collect_rollout'; a window is trainer\.source\.collect"):
        trainer.collect_rollout()
    with pytest.raises(AttributeError, match=r"reward_to_go"):
        trainer._calc_returns([1.0], [False])
    with pytest.raises(AttributeError, match=r"beta stays as it is in a trainer; make one with beta=0\.5"):
        trainer.beta = 0.5
    with pytest.raises(AttributeError, match=r"see report\['return'\]"):
        _ = GRPOTrainer(env="CartPole-v1").ep_rewards
    with pytest.raises(AttributeError, match=r"no attribute 'nothing_of_the_kind'$"):
        _ = trainer.nothing_of_the_kind


@pytest.mark.parametrize(
    "words, message",
    [
        ({"clip_ration": 0.2}, "unknown setting 'clip_ration'; did you mean \"clip_ratio\""),
        ({"epoch": 3}, 'did you mean "epochs"'),
        ({"batch_size": "some"}, r"batch_size \(decisions_per_minibatch here; there 32 decisions\): .*integer.*'some'"),
        ({"epochs": 0}, r"epochs \(num_iterations here; there tutorial 10\): .*greater than or equal to 1, got 0"),
    ],
)
def test_wrong_words_and_values_are_told_in_its_own_words(parts, words, message):
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(*parts, **words)


def test_an_error_inside_a_property_is_told_as_it_is():
    class Mine(GRPOTrainer):
        @property
        def broken(self):
            return None.typo

    trainer = Mine(env="CartPole-v1", group_size=2)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'typo'"):
        trainer.broken  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018
    trainer.source.close()
