"""Playing, remembering and learning the world between imagined futures."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from grpo.config import ConfigError
from grpo.envs.action_repeat import ActionRepeatFactory
from grpo.envs.make import EnvFactory
from grpo.protocols import CollectRequest, State
from grpo.worldmodel.acting import EVALUATION, episode_seed
from grpo.worldmodel.model.learner import ModelDiverged, choose
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.views import DrawnFactory, View
from tests.unit.worldmodel.worlds import make, same, weights


def test_steps_and_updates_are_those_that_are_due():
    trainer = make(prefill=50, steps_per_collect=20, train_ratio=32, batch_size=4, batch_length=8, pretrain=3)
    first, second = trainer.step(), trainer.step()
    assert 50 <= first["env_steps"] <= 51 and first["model/updates"] == 3 + 1
    assert second["env_steps"] - first["env_steps"] in (20, 21)
    assert second["model/updates"] - first["model/updates"] in (20, 21)  # 32 replayed steps a step, 32 in a batch
    trainer.source.close()


def test_what_is_remembered_is_what_the_environment_gave():
    """CartPole pays 1 a step; a step's action and reward are those that led into it."""
    trainer = make(prefill=200, envs=2)
    trainer.step()
    batch = trainer.source.replay.peek(32, 0).batch
    first, last = batch["is_first"], batch["is_last"]
    assert (batch["reward"][first] == 0).all() and (batch["action"][first] == 0).all()
    assert (batch["reward"][~first] == 1).all() and (batch["action"][~first].sum(-1) == 1).all()
    assert (first[:, 1:] == last[:, :-1]).all()  # an end is followed by a beginning, and nothing else is
    assert batch["is_terminal"].any() and (batch["vector"][first] ** 2 <= 0.05**2 + 1e-9).all()
    moved = batch["vector"][:, 1:, 1] - batch["vector"][:, :-1, 1]  # the push, seen in the cart's speed
    push = batch["action"][:, 1:, 1] - batch["action"][:, 1:, 0]
    inside = ~first[:, 1:]
    assert (np.sign(moved[inside]) == push[inside]).all()
    trainer.source.close()


def test_a_model_that_is_not_trained_stays_as_it_is():
    trainer = make(train_ratio=0, pretrain=None)
    before = weights(trainer.source.learner.model)
    trainer.step()
    trainer.step()
    assert same(before, weights(trainer.source.learner.model)) and trainer.source.learner.updates == 0
    trainer.source.close()


def test_a_model_that_diverges_leaves_what_it_learned_from(tmp_path, monkeypatch):
    trainer = make()
    trainer.source.folder = tmp_path
    trainer.step()
    model = trainer.source.learner.model
    real = model.loss
    monkeypatch.setattr(model, "loss", lambda *given: (real(*given)[0] * torch.nan, *real(*given)[1:]))
    with pytest.raises(ModelDiverged, match=r"lower model_learning_rate.*; the last batch is in .*diverged-model"):
        trainer.step()
    with np.load(tmp_path / "samples" / "diverged-model-00000002.npz") as kept:
        assert kept["vector"].shape == (4, 8, 4) and kept["ids"].shape == (4, 8)
    trainer.source.close()


def test_starts_can_be_asked_for_again():
    trainer = make()
    first = trainer.source.collect(CollectRequest(0))
    played = trainer.source.metrics()["env_steps"]
    again = trainer.source.collect(CollectRequest(0, 1, first.starts[1:3]))
    assert trainer.source.metrics()["env_steps"] == played
    assert len(again.rollouts) == 2 * 3
    assert torch.equal(again.rollouts.inputs["flat"][0, 0], first.starts[1].flat)
    other = first.rollouts.inputs["action"][3:9]
    assert not torch.equal(again.rollouts.inputs["action"], other)
    trainer.source.close()


def test_no_future_begins_where_an_episode_ended():
    latent = Latent(torch.arange(10.0)[:, None], torch.ones(10, 1, 1))
    ends = torch.tensor([True, False] * 5)
    chosen = choose(latent, ends, 5, np.random.default_rng(0)).deter[:, 0]
    assert sorted(chosen.tolist()) == [1, 3, 5, 7, 9]
    assert len(choose(latent, ends, 9, np.random.default_rng(0)).deter) == 9


def test_no_start_is_in_training_and_in_evaluation():
    training = {episode_seed(0, lane, number) for lane in range(8) for number in range(100)}
    judged = {episode_seed(0, EVALUATION, number) for number in range(100)}
    assert len(training) == 800 and len(judged) == 100 and not training & judged


def test_rows_show_what_was_done_and_earned():
    trainer = make()
    rollouts = trainer.source.collect(CollectRequest(0)).rollouts
    shown = trainer.source.show(rollouts.select([0, 5]))
    names = ("actions", "rewards", "weights", "observations")
    assert len(shown) == 2 and all(len(row[name]) == 5 for row in shown for name in names)
    assert len(shown[0]["observations"][0]) == 4 and shown[0]["weights"][0] == 1
    entropy_NT = trainer.source.entropies(rollouts)
    assert entropy_NT.shape == (12, 5) and not entropy_NT.requires_grad
    trainer.source.close()


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "tests.unit.worldmodel.test_source:Panel"])
def test_any_action_space_is_played_imagined_and_judged(env):
    trainer = make(env, vector="serial", max_episode_steps=15)
    report = trainer.step()
    assert report["updates"] == 1 and np.isfinite(report["model/loss"])
    found = trainer.evaluate(3)
    assert found.return_E.shape == (3,) and found.failed == 0
    assert trainer.evaluate(3).return_E.tolist() == found.return_E.tolist()
    trainer.source.close()


def test_more_episodes_than_copies_are_judged_in_turns(monkeypatch):
    monkeypatch.setattr("grpo.worldmodel.evaluate.MOST_ENVS", 2)
    trainer = make()
    trainer.step()
    found = trainer.evaluate(5, greedy=False)
    assert found.return_E.shape == (5,) and len({row["quantity"] for row in found.table()}) == 2
    trainer.source.close()


def test_a_smaller_memory_needs_a_folder_for_the_rest():
    trainer = make(replay_memory=100)
    with pytest.raises(ConfigError, match="memory=100 needs a folder for the rest"):
        trainer.step()
    trainer.source.close()


def older(state):
    """The state as it was written before acting beside learning: all had been told, and nobody played ahead."""
    source = {name: value for name, value in state.values["source"].items() if name not in ("ahead", "counted")}
    source["lanes"] = {name: value for name, value in source["lanes"].items() if name != "failures"}
    return State({**state.values, "source": source}, state.arrays)


def test_an_older_checkpoint_goes_on_exactly():
    whole, cut, again = make(), make(), make()
    uncut = [dict(whole.step()) for _ in range(4)]
    for _ in range(2):
        cut.step()
    again.load_state(older(cut.state()))
    assert [dict(again.step()) for _ in range(2)] == uncut[2:]
    assert same(weights(whole.policy.module), weights(again.policy.module))
    for trainer in (whole, cut, again):
        trainer.source.close()


HELD = {"replay_ends": 0.5, "free_nats": 0.1, "reconstruction": 10.0}


def test_a_run_that_leads_to_ends_is_resumed_exactly():
    whole, cut, again = make(**HELD), make(**HELD), make(**HELD)
    uncut = [dict(whole.step()) for _ in range(4)]
    for _ in range(2):
        cut.step()
    again.load_state(cut.state())
    assert [dict(again.step()) for _ in range(2)] == uncut[2:]
    assert same(weights(whole.policy.module), weights(again.policy.module))
    assert same(weights(whole.source.model), weights(again.source.model))
    for trainer in (whole, cut, again):
        trainer.source.close()


@pytest.mark.parametrize("name", HELD)
def test_each_of_them_changes_what_is_learned(name):
    value = 1000.0 if name == "free_nats" else HELD[name]  # a fresh model is always some nats off
    one, other = make(), make(**{name: value})
    for _ in range(2):
        one.step(), other.step()
    assert not same(weights(one.policy.module), weights(other.policy.module))
    for trainer in (one, other):
        trainer.source.close()


def test_an_older_checkpoint_may_go_on_beside():
    lockstep, beside = make(), make(acting="beside")
    for _ in range(2):
        lockstep.step()
    beside.load_state(older(lockstep.state()))
    for _ in range(2):
        one, other = lockstep.step(), beside.step()
        for name in ("env_steps", "samples", "failed", "model/updates"):
            assert one[name] == other[name], name
    for trainer in (lockstep, beside):
        trainer.source.close()


# --- observations ---------------------------------------------------------------------------------------------------


def test_numbers_become_a_vector_and_pictures_one_size():
    space = spaces.Dict(
        {"at": spaces.Discrete(3), "eye": spaces.Box(0, 255, (40, 30, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))}
    )
    view = View(space, 32)
    assert view.shapes == {"vector": (5,), "eye": (32, 32, 3)}
    seen = view({"at": np.array([2, 0]), "eye": np.full((2, 40, 30, 3), 7, np.uint8), "speed": np.zeros((2, 2), "f4")})
    assert seen["vector"].tolist() == [[0, 0, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert seen["eye"].shape == (2, 32, 32, 3) and (seen["eye"] == 7).all()


def test_a_small_board_is_read_as_numbers():
    view = View(spaces.Box(0, 10, (7, 7, 3), np.uint8), 64)
    assert view.shapes == {"vector": (147,)}


def test_channels_first_and_stacks_are_laid_out_alike():
    view = View(spaces.Box(0, 255, (4, 20, 20, 3), np.uint8), 16)
    assert view.shapes == {"image": (16, 16, 12)}
    pixels = np.zeros((1, 4, 20, 20, 3), np.uint8)
    pixels[:, 1, ..., 2] = 9
    assert (view(pixels)["image"][..., 5] == 9).all() and view(pixels)["image"].sum() == 9 * 16 * 16


class Panel:
    """Two switches with several positions and one with two: made by the test above."""

    def __new__(cls):
        import gymnasium as gym

        class Made(gym.Env):
            observation_space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,))})
            action_space = spaces.MultiDiscrete([3, 2])

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                self.t = 0
                return {"a": 0, "b": np.zeros(2, np.float32)}, {}

            def step(self, action):
                self.t += 1
                return {"a": self.t % 3, "b": np.zeros(2, np.float32)}, float(action[0] == 1), self.t == 9, False, {}

        return Made()


def test_messages_name_the_environment_however_it_is_wrapped():
    drawn = EnvFactory(DrawnFactory("CartPole-v1", 64))
    assert EnvFactory(ActionRepeatFactory(drawn, 2)).name == "CartPole-v1"
