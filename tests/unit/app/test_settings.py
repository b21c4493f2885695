"""Layers of settings: who wins, where each came from, and what is refused."""

from __future__ import annotations

import pytest

from grpo.app.builders import configs
from grpo.app.explain import presets_text, resolved_text, settings_text
from grpo.app.files import MAX_BYTES, parse_settings, read_settings
from grpo.app.settings import RunConfig, file_layer, flag_layer, preset_layer, preset_names, resolve
from grpo.config import COLUMNS, ConfigError, GRPOConfig
from grpo.recipes import RECIPES

TASKS = configs()


def resolved(*presets, flags=()):
    return resolve([*(preset_layer(name) for name in presets), flag_layer(flags)], TASKS)


def test_later_layers_win():
    assert resolved("bandit", "grpo_kl").config.beta == 0.5
    assert resolved("bandit", "grpo_kl", "grpo_config").config.beta == 0.1
    assert resolved("bandit", "grpo_kl", flags=[("beta", "0.2")]).config.beta == 0.2


def test_files_stand_where_they_are_named(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("beta: 0.3\nalgorithm:\n  kl_penalty_type: mse\nrun:\n  steps: 7\n")
    got = resolve([preset_layer("bandit"), preset_layer("grpo_kl"), file_layer(path)], TASKS)
    assert (got.config.beta, got.config.kl_estimator, got.run.steps) == (0.3, "k2", 7)
    assert got.origins["kl_estimator"] == f"{path} (kl_penalty_type)"
    assert got.origins["run.steps"] == str(path)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_builds(name):
    layers = [preset_layer(name)] if name == "bandit" else [preset_layer("bandit"), preset_layer(name)]
    got = resolve(layers, TASKS)
    assert preset_names()[name]
    if name in RECIPES and name != "bandit":
        assert got.config.loss_type == name


def test_the_named_variations():
    base = resolved("bandit", "grpo_config").config
    assert (base.beta, base.epsilon, base.group_size, base.scale, base.loss_type) == (0.1, 0.2, 4, "group_std", "grpo")
    assert resolved("bandit", "grpo_kl").config.beta > base.beta
    assert resolved("bandit", "grpo_bnpo").config.reduction == "token_mean"
    assert resolved("bandit", "grpo_multi").config.num_iterations > 1
    rlinf = resolved("bandit", "rlinf_math").config
    assert (rlinf.group_size, rlinf.max_ratio, rlinf.whiten, rlinf.reduction) == (16, 5.0, "decisions", "token_mean")


def test_the_same_word_in_two_blocks():
    """batch-wide whitening in an algorithm block, nothing of the kind outside."""
    got = resolved("bandit", flags=[("algorithm.normalize_advantages", "true")])
    assert got.config.whiten == "decisions"
    with pytest.raises(ConfigError, match="unknown setting 'normalize_advantages'"):
        resolved("bandit", flags=[("normalize_advantages", "true")])


def test_a_preset_s_setting_that_becomes_idle_is_left_out_a_user_s_is_refused():
    assert resolved("bandit", "grpo_config", flags=[("loss_type", "gpg")]).config.loss_type == "gpg"  # epsilon idles
    with pytest.raises(ConfigError, match="epsilon has no effect here"):
        resolved("bandit", flags=[("loss_type", "gpg"), ("epsilon", "0.1")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([("betaa", 1)], "command line: unknown setting 'betaa'; did you mean \"beta\"?"),
        ([("run.stepz", 1)], "command line: unknown setting 'run.stepz'; did you mean \"steps\"?"),
        ([("steps", 0)], "run.steps: input should be greater than or equal to 1, got 0"),
        ([("algorithm.kl_betta", 1)], "unknown setting 'kl_betta'; did you mean \"kl_beta\"?"),
        ([("group_size", "four")], "group_size: input should be a valid integer"),
        ([("phase_length", 0)], "phase_length"),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(ConfigError) as caught:
        resolved("bandit", flags=flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_lists_can_be_given_as_flags():
    got = resolved("bandit", flags=[("payoffs", "[[1, 0], [0, 1]]")])
    assert got.config.payoffs == ((1.0, 0.0), (0.0, 1.0))
    with pytest.raises(ConfigError, match="every phase the same number of arms"):
        resolved("bandit", flags=[("payoffs", "[[1, 2], [3]]")])


def test_no_task_lists_the_tasks():
    with pytest.raises(ConfigError, match="no task was named; give one of bandit, control first"):
        resolved("rlinf_math")


def test_unknown_presets_name_the_nearest():
    with pytest.raises(ConfigError, match="no preset or file 'grpo_k1'; did you mean \"grpo_kl\""):
        preset_layer("grpo_k1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beta: [1, 2", "my.yaml:1:12: "),
        ("beta: 1\n\tgamma: 2", "my.yaml:2:1: "),
        ("- a\n- b", "expected settings as `key: value`, found a list"),
        ("x: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: &x [1]\nb: *x", "my.yaml:2:4: aliases are not allowed in settings"),
        ("run: 5", "run must be a block"),
        ("beta: 1\nbeta: 2", "my.yaml:2:1: beta is given twice"),
        ("task: [1]", "task must be a word, found [1]"),
        ("dialect: [1]", "dialect must be a word"),
    ],
)
def test_bad_yaml_names_file_line_and_column(tmp_path, text, message):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        file_layer(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_settings(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: No such file"):
        read_settings(tmp_path / "none.yaml")
    large = tmp_path / "large.yaml"
    large.write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="that is not a settings file"):
        read_settings(large)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_settings(binary)
    assert parse_settings("", "empty") == {}


def test_the_document_resolves_to_the_same(tmp_path):
    """What is written into the run folder is enough to do it again."""
    import yaml

    got = resolved("bandit", "grpo_kl", flags=[("beta", "0.2"), ("num-generations", "6"), ("run.steps", "9")])
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(got.document()))
    again = resolve([file_layer(path)], TASKS)
    assert again.config == got.config and again.run == got.run


def test_texts_cover_everything():
    text = settings_text()
    for name in [*COLUMNS, *RunConfig.model_fields, *(n for n in GRPOConfig.model_fields if n != "recipe")]:
        assert f"--{name.replace('_', '-')} (" in text, name
    assert all(name in presets_text() for name in preset_names())
    shown = resolved_text(resolved("bandit", "grpo_kl", flags=[("kl-coeff", "0.2")]))
    assert "command line (kl_coeff)" in shown and "beta" in shown
    everything = resolved_text(resolved("bandit"), everything=True)
    assert all(name in everything for name in COLUMNS)


@pytest.mark.parametrize(
    ("presets", "flags", "name"),
    [
        (["cartpole"], [], "cartpole"),
        (["cartpole", "grpo_kl"], [], "cartpole"),
        (["control"], [("env", "MyPackage/MyEnv-v0")], "MyPackage-MyEnv-v0"),
        (["control"], [("env", "path/to/maze.py:Maze")], "path-to-maze.py-Maze"),
        (["bandit"], [], "bandit"),
    ],
)
def test_a_run_is_called_after_its_preset_or_its_environment(presets, flags, name):
    layers = [preset_layer(word) for word in presets]
    assert resolve([*layers, flag_layer(flags)], configs()).name == name


@pytest.mark.parametrize("flags", [[("memory", "8")], [("loss_type", "grpo")]])
def test_a_presets_setting_that_became_impossible_is_left_out_and_a_users_is_an_error(flags):
    made = resolve([preset_layer("cartpole"), flag_layer(flags)], configs()).config
    assert made.decisions_per_minibatch is None
    with pytest.raises(ConfigError, match="takes trajectories apart"):
        resolve([preset_layer("cartpole"), flag_layer([*flags, ("decisions_per_minibatch", "64")])], configs())


def test_arguments_of_an_environment_are_read_as_yaml():
    flags = [("env", "CartPole-v1"), ("env_kwargs.sutton_barto_reward", "false")]
    made = resolve([preset_layer("control"), flag_layer(flags)], configs()).config
    assert made.env_kwargs == {"sutton_barto_reward": False}
