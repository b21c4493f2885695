"""Words that people bring from Stable-Baselines3."""

import pytest

from grpo.control import GRPOTrainer
from grpo.errors import ConfigError


def test_its_words_are_understood(capsys):
    trainer = GRPOTrainer(
        "CartPole-v1", lr=1e-3, n_envs=4, n_epochs=2, clip_range=0.1, ent_coef=0.01, gamma=0.98, group_size=4, seed=0
    )
    config = trainer.config
    assert (config.learning_rate, config.num_envs, config.num_iterations) == (1e-3, 4, 2)
    assert (config.recipe.surrogate.epsilon, config.recipe.entropy_coef, config.gamma) == (0.1, 0.01, 0.98)
    reports = trainer.train(total_timesteps=60, verbose=0)
    assert len(reports) == 1 and reports[-1]["env_steps"] >= 60 and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ({"policy_kwargs": {"net_arch": [64]}}, r"hidden=\[64,64\]"),
        ({"verbose": 1}, r"GRPOTrainer\(…\).train\(verbose=1\)"),
        ({"total_timesteps": 100}, r"train\(total_timesteps=100\)"),
        ({"n_steps": 128}, "group_by=steps"),
        ({"vf_coef": 0.5}, "no critic"),
        ({"env": "MlpPolicy"}, "no policy is named here"),
    ],
)
def test_others_are_answered_with_ours(words, answer):
    with pytest.raises(ConfigError, match=answer):
        GRPOTrainer(**{"env": "CartPole-v1"} | words)


def test_its_methods_too():
    trainer = GRPOTrainer("CartPole-v1")
    for name, answer in {
        "learn": r"train\(total_timesteps",
        "predict": r"grpo.load\(folder\).predict",
        "save": "folder=",
    }.items():
        with pytest.raises(AttributeError, match=answer):
            getattr(trainer, name)
