"""The world-model document: its commands with `grpo train` in place of the launcher, its options and their values."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo.app.builders import configs
from grpo.app.settings import file_layer, flag_layer, preset_layer, resolve
from grpo.cli import main
from grpo.config import GRPOConfig
from grpo.errors import ConfigError
from grpo.run.config import RunConfig

ROOT = Path(__file__).parents[2]


def resolved(presets: str, **flags: str):
    layers = [preset_layer(name) for name in presets.split()]
    return resolve([*layers, flag_layer([(key.replace("__", "."), value) for key, value in flags.items()])], configs())


def test_the_first_command_as_printed():
    made = resolved(
        "defaults",
        script="train_grpo",
        run__train_ratio="32",
        beta="0.1",
        epsilon="0.2",
        num_generations="4",
        scale_rewards="true",
        loss_type="grpo",
        logdir="./logs/dreamer/{timestamp}",
    )
    config = made.config
    assert (made.task, config.env, config.train_ratio, config.group_size) == ("worldmodel", "CartPole-v1", 32, 4)
    assert (config.beta, config.epsilon, config.scale, config.loss_type) == (0.1, 0.2, "group_std", "grpo")
    assert made.run.logdir == "./logs/dreamer/{timestamp}"


@pytest.mark.parametrize(
    "preset, expected",
    [
        ("grpo_config", {"beta": 0.1, "epsilon": 0.2, "group_size": 4, "scale": "group_std", "loss_type": "grpo"}),
        ("grpo_kl", {"beta": 0.5, "loss_type": "grpo"}),
        ("grpo_bnpo", {"loss_type": "bnpo"}),
        ("grpo_multi", {"num_iterations": 4, "loss_type": "grpo"}),
    ],
)
def test_its_templates(preset, expected):
    config = resolved(f"defaults {preset}").config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("platform, device", [("metal", "mps"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_its_platforms_are_torch_devices(platform, device):
    assert resolved("defaults grpo_config", jax__platform=platform).config.device == device


# --- nothing, and numbers with an exponent --------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["None", "none", "null"])
def test_nothing_may_be_said_for_any_setting_that_can_be_nothing(word, tmp_path):
    wanted = {"epsilon_high": None, "max_grad_norm": None, "target_kl": None, "max_episode_steps": None}
    flagged = resolved("defaults", **dict.fromkeys(wanted, word), run__stop_at=word, run__env_steps=word)
    file = tmp_path / "own.yaml"
    lines = [f"{name}: {word}" for name in wanted]
    file.write_text("\n".join([*lines, f"run: {{stop_at: {word}, env_steps: {word}}}"]))
    filed = resolve([preset_layer("defaults"), file_layer(file)], configs())
    in_python = GRPOConfig(max_grad_norm=word, epsilon_high=word)
    assert (in_python.max_grad_norm, in_python.epsilon_high) == (None, None)
    assert RunConfig(stop_at=word).stop_at is None
    for made in (flagged, filed):
        assert {name: getattr(made.config, name) for name in wanted} == wanted
        assert (made.run.stop_at, made.run.env_steps) == (None, None)
        assert made.config.recipe.surrogate == resolved("defaults").config.recipe.surrogate


def test_a_word_that_is_a_choice_or_a_must_stays_what_it_is():
    assert resolved("defaults", scale="none").config.scale == "none"
    with pytest.raises(ConfigError, match=r"command line: learning_rate: .*valid number.*'None'"):
        resolved("defaults", learning_rate="None")


def test_whole_numbers_may_have_an_exponent(tmp_path):
    flagged = resolved("defaults", replay_capacity="1e6", run__env_steps="1.1e6", env_kwargs__limit="1e3")
    file = tmp_path / "own.yaml"
    file.write_text("replay_capacity: 1e6\nenv_kwargs: {limit: 1e3, mode: None}\nrun: {env_steps: 1.1e6}\n")
    filed = resolve([preset_layer("defaults"), file_layer(file)], configs())
    for made in (flagged, filed):
        assert (made.config.replay_capacity, made.run.env_steps) == (1_000_000, 1_100_000)
        assert made.config.env_kwargs["limit"] == 1000
    assert filed.config.env_kwargs["mode"] is None
    assert GRPOConfig(group_size="1e1").group_size == 10 and RunConfig(steps="2e2").steps == 200
    with pytest.raises(ConfigError, match=r"replay_capacity: .*valid integer.*'1\.5'"):
        resolved("defaults", replay_capacity="1.5")


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"epsilon_hihg": "0.3"}, "unknown setting 'epsilon_hihg'; did you mean \"epsilon_high\""),
        ({"imag_lenght": "15"}, 'did you mean "imag_length"'),
        ({"run__train_ration": "32"}, "unknown setting 'run.train_ration'; did you mean \"train_ratio\""),
        ({"imag_length": "far"}, r"command line: imag_length \(horizon here; there 15; ours 32\): .*integer.*'far'"),
        ({"jax__platform": "tpu"}, "'tpu' is not one of metal, mps, cuda"),
        ({"scale_rewards": "perhaps"}, "scale_rewards: 'perhaps' is not one of group, true"),
        ({"loss_type": "bnop"}, 'did you mean "bnpo"'),
    ],
)
def test_wrong_words_and_values_are_told_in_its_own_words(flags, message):
    with pytest.raises(ConfigError, match=message):
        resolved("defaults", **flags)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["dreamer --settings", "--configs defaults --settings", "--settings dreamer"])
def test_the_rooms_settings_are_listed_wherever_it_is_named(words, capsys):
    assert main(["train", *words.split()]) == 0
    told = capsys.readouterr().out
    assert "--horizon (32)" in told and "--env-kwargs ({})" in told and "Undefined" not in told


def test_no_page_shows_what_is_undefined():
    assert [page.name for page in ROOT.glob("docs/*.md") if "Undefined" in page.read_text(encoding="utf-8")] == []


def test_the_package_is_a_command_too():
    ran = subprocess.run([sys.executable, "-m", "grpo", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0 and ran.stdout.startswith("grpo ")
