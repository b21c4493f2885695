"""What a script sees of an exception: its own frames; all of them where it asks."""

import re
import traceback

import gymnasium as gym
import pytest
import torch

from grpo import GRPOConfig, GRPOTrainer
from grpo.control import GRPOTrainer as ControlTrainer
from grpo.envs.fleet import EnvError
from grpo.errors import ConfigError
from grpo.run.door import NOTE, SETTING


class Policy(torch.nn.Module):
    """Two states, two actions; `fault` is what scoring them does."""

    def __init__(self, fault=lambda: None):
        super().__init__()
        self.logits, self.fault = torch.nn.Parameter(torch.zeros(2, 2)), fault

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return torch.multinomial(self.logits[states].softmax(-1), num_actions_per_state, replacement=True).tolist()

    def get_log_probabilities(self, states, actions):
        self.fault()
        return self.logits.log_softmax(-1)[states, actions]

    def get_parameters(self):
        return dict(self.named_parameters())


class Reward(torch.nn.Module):
    def compute_rewards(self, states, actions):
        return torch.tensor([float(action) for action in actions])


class Fails(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        raise KeyError("map")


def looked_up():
    return {}["place"]


def train(fault):
    GRPOTrainer(GRPOConfig(group_size=2), Policy(fault), reward_model=Reward()).train([[0, 1]], progress=None)


def trainer():
    return GRPOTrainer(GRPOConfig(group_size=2), Policy(), reward_model=Reward())


def frames(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)


def test_a_policys_own_exception_shows_the_users_frames_alone():
    with pytest.raises(KeyError, match="place") as caught:
        train(looked_up)
    test, called, *own = frames(caught.value)
    assert (called, own) == ("train", ["get_log_probabilities", "looked_up"]), test
    assert caught.value.__notes__ == [NOTE]


def test_everything_is_there_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv(SETTING, "full")
    with pytest.raises(KeyError) as caught:
        train(looked_up)
    assert {"step", "collect", "log_probs"} < {*frames(caught.value)}
    assert not hasattr(caught.value, "__notes__")


def test_a_loop_of_the_users_own_and_the_constructor_show_them_alone_too():
    class Unready(Policy):
        def get_parameters(self):
            return looked_up()

    with pytest.raises(KeyError, match="place") as stepped:
        GRPOTrainer(GRPOConfig(group_size=2), Policy(looked_up), reward_model=Reward()).step([0, 1])
    assert frames(stepped.value)[1:] == ["get_log_probabilities", "looked_up"]
    with pytest.raises(KeyError, match="place") as made:
        GRPOTrainer(GRPOConfig(group_size=2), Unready(), reward_model=Reward())
    assert frames(made.value)[1:] == ["get_parameters", "looked_up"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: trainer().train(), "train() needs total_updates, steps"),
        (lambda: trainer().train([0, 1], progress=None), "a step takes a list of states, got int; train() a list for"),
        (lambda: trainer().train(steps=1, progress=None), "a step needs states: train([[state, …], …])"),
        (lambda: GRPOTrainer(GRPOConfig(), Policy(), reward_model=len), "(a torch.nn.Module has train, eval and to)"),
    ],
)
def test_what_is_refused_is_one_frame_of_ours(call, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as caught:
        call()
    assert frames(caught.value)[1] == "<lambda>" and len(frames(caught.value)) == 3


def test_what_led_to_an_exception_is_kept_and_as_short():
    def fault():
        try:
            looked_up()
        except KeyError as error:
            raise RuntimeError("no such place") from error

    with pytest.raises(RuntimeError) as caught:
        train(fault)
    assert frames(caught.value)[2:] == ["get_log_probabilities", "fault"]
    assert frames(caught.value.__cause__) == ["fault", "looked_up"]


def test_an_environment_that_fails_is_one_frame_of_ours_and_its_own_line():
    with pytest.raises(EnvError, match=r"Fails member 0, reset: KeyError: 'map' \(.*test_door.py:\d+\)") as caught:
        ControlTrainer(env=Fails, vector="serial")
    assert len(frames(caught.value)) == 2


def test_ctrl_c_in_our_code_is_no_page_of_it(monkeypatch):
    def waiting(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo.trainer.Trainer.step", _as_ours(waiting))
    with pytest.raises(KeyboardInterrupt) as caught:
        train(lambda: None)
    assert frames(caught.value)[1:] == ["train", "waiting"]


def test_a_fault_of_ours_keeps_every_frame(monkeypatch):
    def broken(*_, **__):
        raise AssertionError("a fault of ours")

    monkeypatch.setattr("grpo.trainer.Trainer.step", _as_ours(broken))
    with pytest.raises(AssertionError) as caught:
        train(lambda: None)
    assert {"run", "_go_round", "broken"} < {*frames(caught.value)}
    assert not hasattr(caught.value, "__notes__")


def _as_ours(function):
    """The same function, in a file of the library's."""
    import grpo.trainer

    function.__code__ = function.__code__.replace(co_filename=grpo.trainer.__file__)
    return function


def test_a_refused_setting_is_where_it_was_called_and_what_is_wrong(tmp_path):
    def script():
        trainer = GRPOTrainer(GRPOConfig(group_size=2), Policy(), reward_model=Reward())
        return trainer.train(steps=1, evaluate_every=1, folder=tmp_path / "run", progress=None)

    with pytest.raises(ConfigError) as caught:
        script()
    assert frames(caught.value)[1:-1] == ["script"]
