"""The protocol-based library: its README's blocks, its settings' names, its modules' names."""

import copy
import importlib
import sys
import warnings

import pytest
import torch

import grpo
from grpo import GRPOConfig, GRPOTrainer, PolicyModel, RewardModel
from grpo.errors import ConfigError
from grpo.moved import ELSEWHERE


class Words:
    """A policy without parameters: it names its tries, and cannot learn."""

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return [[f"{state}/{number}" for number in range(num_actions_per_state)] for state in states]

    def get_log_probabilities(self, states, actions):
        assert len(states) == len(actions)  # flat, each state repeated once a try
        return torch.randn(len(states))

    def get_parameters(self):
        return {}

    def train(self): ...
    def eval(self): ...
    def to(self, device):
        return self


class Chance:
    """A reward model that knows nothing."""

    def compute_rewards(self, states, actions):
        return torch.randn(len(states))

    def train(self): ...
    def eval(self): ...
    def to(self, device):
        return self


def test_the_minimal_example_runs_as_printed():
    policy = Words()
    config = GRPOConfig(group_size=4, batch_size=2, num_epochs_per_update=2)
    with pytest.warns(UserWarning, match="no trainable parameters"):
        trainer = GRPOTrainer(
            config=config,
            policy=policy,
            reference_policy=copy.deepcopy(policy),
            reward_model=Chance(),
            optimizer=None,
        )
        metrics = trainer.step(["state_1", "state_2", "state_3", "state_4"])
    assert {"loss", "reward", "kl"} <= set(metrics) and metrics["updates"] == 0


def test_the_protocols_are_found_at_the_top_and_say_who_keeps_them():
    assert isinstance(Words(), PolicyModel) and isinstance(Chance(), RewardModel)
    assert not isinstance(Chance(), PolicyModel) and not isinstance(object(), RewardModel)
    assert {"PolicyModel", "RewardModel"} <= set(dir(grpo))


def test_its_pair_of_normalisation_settings_goes_together():
    config = GRPOConfig(normalize_advantages=True, advantage_epsilon=1e-6)
    assert (config.whiten, config.whiten_eps, config.whiten_ddof) == ("rows", 1e-6, 0.0)
    assert (config.normalize_advantages, config.advantage_epsilon) == (True, 1e-6)
    assert GRPOConfig(normalize_advantages=True).whiten_eps == 1e-8
    off = GRPOConfig(normalize_advantages=False, advantage_epsilon=1e-6)
    assert off.whiten == "none" and off.normalize_advantages is False
    with pytest.raises(ConfigError, match="advantage_epsilon is read with normalize_advantages=True"):
        GRPOConfig(advantage_epsilon=1e-6)


GIVEN = {
    "group_size": 4,
    "batch_size": 2,
    "num_epochs_per_update": 2,
    "clip_epsilon": 0.1,
    "kl_coeff": 0.02,
    "entropy_coeff": 0.01,
    "learning_rate": 1e-4,
    "reference_update_freq": 5,
}


def test_settings_are_read_back_under_the_names_they_were_given():
    config = GRPOConfig(**GIVEN)
    assert {name: getattr(config, name) for name in GIVEN} == GIVEN
    assert (config.epsilon, config.groups_per_minibatch, config.num_iterations) == (0.1, 2, 2)
    changed = config.but(clip_epsilon=0.3, batch_size="1e1", scale_rewards="group")
    assert (changed.clip_epsilon, changed.batch_size, changed.scale_rewards) == (0.3, 10, "group")
    assert copy.deepcopy(config).batch_size == 2
    assert GRPOConfig().clip_epsilon == 0.2  # not given: as it is
    with pytest.raises(AttributeError, match="normalize_advantages was not given; it is whiten here"):
        _ = GRPOConfig().normalize_advantages
    assert not hasattr(config, "nothing_of_the_kind")


@pytest.mark.parametrize("theirs, ours", ELSEWHERE.items())
def test_its_modules_are_importable_and_say_what_they_are_called_here(theirs, ours):
    sys.modules.pop(f"grpo.{theirs}", None)
    with pytest.warns(UserWarning, match=rf"grpo\.{theirs} is called grpo\.{ours} here"):
        module = importlib.import_module(f"grpo.{theirs}")
    assert module is importlib.import_module(f"grpo.{ours}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(f"grpo.{theirs}")  # told once


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_epochs_per_updat": 2}, "unknown setting 'num_epochs_per_updat'; did you mean \"num_epochs_per_update\""),
        ({"normalise_advantages": True}, 'did you mean "normalize_advantages"'),
        ({"batch_size": "two"}, r"batch_size \(groups_per_minibatch here; there 1024 states .*valid integer.*'two'"),
        ({"clip_epsilon": "narrow"}, r"clip_epsilon \(epsilon here; there 0\.2\): .*valid number.*'narrow'"),
        ({"normalize_advantages": "maybe"}, "normalize_advantages: expected true or false, got 'maybe'"),
        ({"group_size": None}, "group_size: input should be a valid integer, got None"),
    ],
)
def test_wrong_words_and_values_are_told_in_its_own_words(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**settings)
