"""The world-model document: its commands with `grpo train` in place of the launcher, its options and their values."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo.app.builders import TASKS, configs
from grpo.app.settings import file_layer, flag_layer, preset_layer, resolve
from grpo.cli import main
from grpo.config import GRPOConfig
from grpo.errors import ConfigError
from grpo.models import device_of, moved
from grpo.run.config import RunConfig
from grpo.worldmodel import GRPOTrainer

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


def test_the_launcher_comes_with_the_wheel():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert about["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-scripts"] == {
        "scripts/macos_run.sh": "macos_run.sh"
    }


# --- its tasks and configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, env",
    [
        ("dmc_walker_walk", "dm_control/walker-walk-v0"),
        ("dmc_cup_catch", "dm_control/ball_in_cup-catch-v0"),
        ("dmc_point_mass_easy", "dm_control/point_mass-easy-v0"),
        ("dmc_cartpole_swingup_sparse", "dm_control/cartpole-swingup_sparse-v0"),
        ("atari_pong", "ALE/Pong-v5"),
        ("atari100k_montezuma_revenge", "ALE/MontezumaRevenge-v5"),
        ("gym_Pendulum-v1", "Pendulum-v1"),
    ],
)
def test_its_names_of_tasks_are_environments(task, env, tmp_path):
    made = resolved("defaults", task=task)
    assert (made.task, made.config.env) == ("worldmodel", env)
    file = tmp_path / "own.yaml"
    file.write_text(f"task: {task}\n")
    assert resolve([file_layer(file)], configs()).config.env == env


@pytest.mark.parametrize("size", ["1m", "12m", "25m", "50m", "100m", "200m", "400m"])
def test_its_sizes_are_presets(size):
    assert resolved(f"defaults size{size}").config.size == size


def test_its_other_configurations_are_presets():
    vision = resolved("defaults size12m dmc_vision").config
    assert (vision.env, vision.pixels, vision.train_ratio, vision.size) == (
        "dm_control/walker-walk-v0", True, 256, "12m"
    )  # fmt: skip
    assert (resolved("dmc_proprio").config.train_ratio, resolved("dmc_proprio").config.pixels) == (1024, False)
    assert resolved("atari100k", task="atari100k_breakout").config.env == "ALE/Breakout-v5"
    small = resolved("defaults size12m debug").config
    assert (small.size, small.device, small.replay_capacity, small.batch_length) == ("0.5m", "cpu", 10_000, 10)


@pytest.mark.parametrize(
    "presets, flags, message",
    [
        ("defaults crafter", {}, r"no preset crafter: .*--env your_file\.py:NAME"),
        ("defaults multicpu", {}, "leave it out"),
        ("defaults size13m", {}, 'did you mean "size1'),
        (
            "defaults",
            {"task": "minecraft_diamond"},
            r"command line: task minecraft_diamond: .*--env your_file\.py:NAME",
        ),
        ("defaults", {"task": "walker"}, "unknown task 'walker'"),
        ("defaults", {"task": "gym_Pendulum-v1", "env": "CartPole-v1"}, "keep one of them"),
    ],
)
def test_what_there_is_not_says_what_to_write_instead(presets, flags, message):
    with pytest.raises(ConfigError, match=message):
        resolved(presets, **flags)


# --- rewards of one's own, and Apple's devices ----------------------------------------------------------------------

SMALL = {
    "env": "CartPole-v1", "envs": 2, "size": "0.5m", "batch_size": 4, "batch_length": 8, "prefill": 60, "pretrain": 2,
    "horizon": 4, "groups_per_step": 4, "group_size": 4, "train_ratio": 8, "device": "cpu",
}  # fmt: skip


def test_a_reward_function_is_named_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def level(batch):\n    return 7.0 + 0 * batch['reward'].sum(1)\n")
    words = {name: str(value) for name, value in SMALL.items()}
    trainer = TASKS["worldmodel"].trainer(resolved("defaults", reward="mine.py:level", **words).config)
    assert trainer.step()["reward"] == pytest.approx(7.0)
    trainer.source.close()
    with pytest.raises(ConfigError, match=r"mine\.py has no function 'lvel'; did you mean \"level\""):
        GRPOTrainer(reward="mine.py:lvel", **SMALL)
    with pytest.raises(ConfigError, match=r"names no function; write file\.py:NAME"):
        GRPOTrainer(reward="level", **SMALL)
    with pytest.raises(TypeError, match="both judge imagined futures"):
        GRPOTrainer(reward="mine.py:level", reward_fn=lambda batch: batch["reward"], **SMALL)


def test_a_mac_computes_on_its_gpu_and_others_say_that_they_have_none(monkeypatch):
    with pytest.raises(ValueError, match="device='mps' is not available here; use device=cpu or auto"):
        moved(torch.nn.Linear(1, 1), "mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    went = []
    moved(SimpleNamespace(to=went.append), device_of("auto"))
    assert went == ["mps"]


class NoDoubles(TorchDispatchMode):
    """Finds numbers of 64 bits, which Apple's GPUs do not have."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_leaves(made)):
            self.found.add(str(func))
        return made


def test_no_step_needs_what_apples_gpus_do_not_have():
    trainer = GRPOTrainer(beta=0.1, **SMALL)
    with NoDoubles() as watch:
        trainer.step()
        trainer.evaluate(episodes=1)
    assert watch.found == set()
    trainer.source.close()
