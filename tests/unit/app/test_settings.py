"""Layers of settings: who wins, where each came from, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import metadata

import pytest

from grpo.app import arguments, doctor
from grpo.app.arguments import given_flags
from grpo.app.builders import configs
from grpo.app.explain import presets_text, resolved_text, settings_text
from grpo.app.files import MAX_BYTES, parse_settings, read_settings
from grpo.app.settings import data_layer, file_layer, flag_layer, preset_layer, preset_names, resolve
from grpo.cli import main
from grpo.config import ConfigError, GRPOConfig
from grpo.core.surrogates import Vespo
from grpo.recipes import COLUMNS, RECIPES
from grpo.run.checkpoint import CheckpointError, expect_same_settings
from grpo.run.config import RunConfig

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
    task = "defaults" if name == "debug" or name.startswith("size") else "bandit"  # of a world model
    layers = [preset_layer(name)] if name == task else [preset_layer(task), preset_layer(name)]
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
        ([("adapter", 1)], "command line: unknown setting 'adapter'; did you mean \"optimizer\"?"),  # no block
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
    with pytest.raises(ConfigError, match="no task was named; give one of bandit, control, language, worldmodel first"):
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
        ("x: !!python/object/apply:os.system ['true']", "is not allowed in settings"),
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


def test_a_surrogate_s_numbers_are_a_block_or_flags(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("surrogate:\n  kind: vespo\n  k_pos: 1.5\n")
    file = resolve([preset_layer("bandit"), file_layer(path)], TASKS)
    flags = resolved("bandit", flags=[("surrogate", "vespo"), ("surrogate.k-pos", "1.5")])
    turned = resolved("bandit", flags=[("surrogate.k_pos", "1.5"), ("surrogate", "vespo")])
    plain = resolved("bandit", "vespo", flags=[("vespo_k_pos", "1.5")])
    assert file.config == flags.config == turned.config and plain.config.vespo_k_pos == 1.5
    assert flags.origins["vespo_k_pos"] == "command line" and file.document()["vespo_k_pos"] == 1.5
    later = resolve([preset_layer("bandit"), file_layer(path), flag_layer([("surrogate.k_neg", "2")])], TASKS)
    assert (later.config.vespo_k_pos, later.config.vespo_k_neg) == (1.5, 2.0)
    with pytest.raises(ConfigError, match="vespo_k_pos has no effect here: it needs surrogate=vespo"):
        resolved("bandit", flags=[("surrogate.k_pos", "1.5")])


def test_a_run_from_before_surrogates_were_records_is_gone_on_with(tmp_path):
    """config.json and a checkpoint's manifest as they were written when every number was a column of the recipe."""
    document = {"task": "bandit", "dialect": "own", "loss_type": "vespo", "vespo_k_pos": 1.5, "delta": None}
    settings = {
        "loss_type": "vespo", "group_size": 32, "groups_per_step": 1, "groups_per_minibatch": None,
        "rows_per_minibatch": None, "decisions_per_minibatch": None, "rows_per_microbatch": None, "num_iterations": 1,
        "learning_rate": 5.0, "weight_decay": 0.02, "max_grad_norm": 1.0, "max_ratio": None, "target_kl": None,
        "old_logp": "auto", "no_signal": "recipe", "max_attempts": 4, "ref_sync_steps": None, "ref_mixup_alpha": 1.0,
        "seed": 0, "device": "auto", "recipe": {"vespo_k_pos": 1.5, "delta": None}, "phase_length": 20, "noise": 0.0,
        "optimizer": "sgd",
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    config = resolve([file_layer(path)], TASKS).config
    assert config.algorithm.surrogate == Vespo(k_pos=1.5)
    defaults = type(config).model_construct().model_dump(mode="json")
    manifest = {"settings": settings, "versions": {}}
    expect_same_settings(manifest, config.model_dump(mode="json"), defaults=defaults)
    with pytest.raises(CheckpointError, match=r"vespo_k_pos: 1.5 → 1.0"):
        expect_same_settings(manifest, config.but(vespo_k_pos=1.0).model_dump(mode="json"), defaults=defaults)


def test_only_the_chosen_surrogate_s_numbers_are_listed():
    assert "vespo" not in settings_text().replace("vespo, dro", "")
    clip, vespo = (resolved_text(resolved(*names), everything=True) for names in (("bandit",), ("bandit", "vespo")))
    assert "epsilon_high" in clip and "vespo_k_pos" not in clip and "tau_pos" not in clip
    assert "epsilon_high" not in vespo and "vespo_k_pos" in vespo


def test_what_a_preset_says_of_another_surrogate_is_left_out():
    mixed = resolved("bandit", "grpo_config", "vespo")
    assert mixed.config.surrogate == "vespo" and "epsilon" not in mixed.config.changed


def test_texts_cover_everything():
    text = settings_text()
    run = [f"run.{name}" for name in RunConfig.model_fields]
    for name in [*COLUMNS, *run, *(n for n in GRPOConfig.model_fields if n != "changed")]:
        assert f"--{name.replace('_', '-')} (" in text, name
    presets = presets_text()
    assert all(name in presets for name in preset_names())
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


# --- language models ------------------------------------------------------------------------------------------------

ISSUE = (
    "--repo_id PATH --attn_mechanism vanilla --max-prompt-length 2048 --max-completion-length 1024 --beta 0.04 "
    "--top-p 0.95 --top-k 50 --num-return-sequences 4 --xml-reward 0.125 --correctness-reward 2.0 "
    "--total-batch-size 16 --learning-rate 1e-6 --num-train-epochs 3 --use-wandb"
)
EASYDEL = {
    "gsm8k": ISSUE.replace("-", "_").replace("__", "--").replace("1e_6", "1e-6"),
    "numinamath": "--repo_id PATH --attn_mechanism vanilla --max_prompt_length 2048 --max_completion_length 1024 "
    "--beta 0.04 --top_p 0.95 --num_return_sequences 4 --total_batch_size 16 --learning_rate 1e-6 "
    "--num_train_epochs 3 --use_wandb",
}


def language(*presets, **flags):
    return resolved(*presets, flags=list(flags.items()))


@pytest.mark.parametrize(
    ("preset", "line"), [("gsm8k", ISSUE), *EASYDEL.items()], ids=["issue", "gsm8k page", "numinamath page"]
)
def test_the_printed_command_lines_resolve(preset, line):
    got = resolved(preset, flags=given_flags((), line.split()))
    config = got.config
    assert (config.model, config.attention, config.group_size, config.groups_per_step) == ("PATH", "eager", 4, 16)
    assert (config.max_prompt_length, config.max_completion_length) == (2048, 1024)
    assert (config.beta, config.top_p, config.learning_rate) == (0.04, 0.95, 1e-6)
    assert (got.run.num_train_epochs, got.run.trackers, got.name) == (3, ("wandb",), preset)
    assert config.rewards == ("correctness", "xml")
    if preset == "gsm8k":
        assert (config.top_k, config.xml_reward, config.correctness_reward) == (50, 0.125, 2.0)
        assert (config.dataset, config.answer_after, config.prompt_column) == ("openai/gsm8k", "####", "question")


def test_the_rlinf_block_applies_to_a_language_task(tmp_path):
    got = resolved("gsm8k", "rlinf_math").config
    assert (got.group_size, got.max_ratio, got.whiten, got.reduction, got.beta) == (
        16, 5.0, "decisions", "token_mean", 0.0,
    )  # fmt: skip
    path = tmp_path / "that.yaml"
    path.write_text("algorithm:\n  group_size: 16\n  kl_beta: 0.02\n  loss_type: actor\n  normalize_advantages: true\n")
    got = resolve([preset_layer("gsm8k"), file_layer(path)], TASKS)
    assert (got.config.group_size, got.config.beta, got.config.whiten) == (16, 0.02, "decisions")


def test_completions_a_device_are_counted_in_the_groups_of_the_preset_below():
    got = language("gsm8k", per_device_train_batch_size="8", gradient_accumulation_steps="2").config
    assert (got.group_size, got.groups_per_step) == (4, 4)
    got = language("gsm8k", per_device_train_batch_size="8", num_generations="2").config
    assert (got.group_size, got.groups_per_step) == (2, 4)
    with pytest.raises(ConfigError, match=r"command line: .* give prompts_per_step=1 instead"):
        language("gsm8k", per_device_train_batch_size="6")


def test_trl_s_words_are_for_language_tasks():
    with pytest.raises(ConfigError, match="unknown setting 'per_device_train_batch_size'"):
        language("bandit", per_device_train_batch_size="8")


def test_words_about_the_run_are_read_in_files_flags_and_its_block(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("save_steps: 7\nlogging_steps: 3\nrun:\n  max_steps: 9\n  name: mine\n")
    got = resolve([preset_layer("bandit"), file_layer(path), flag_layer([("report-to", "tensorboard")])], TASKS)
    assert (got.run.checkpoint_every, got.run.log_every, got.run.steps, got.name) == (7, 3, 9, "mine")
    assert got.run.trackers == ("tensorboard",)
    assert got.origins["run.checkpoint_every"] == f"{path} (save_steps)"
    with pytest.raises(ConfigError, match=r"my.yaml: .*both set steps"):
        path.write_text("run:\n  max_steps: 9\n  steps: 8\n")
        file_layer(path)


def test_a_preset_named_like_a_recipe_is_the_paper_s_and_a_loss_type_is_trl_s():
    """A later layer's word wins, with what goes along with it; what others say stays."""
    assert resolved("gsm8k", "dapo").config.algorithm.but(beta=0.0) == RECIPES["dapo"]
    flagged = language("gsm8k", loss_type="dapo").config
    assert (flagged.reduction, flagged.epsilon_high, flagged.drop_no_signal) == ("token_mean", None, False)
    both = language("gsm8k", "dapo", loss_type="dapo", epsilon_high="0.28")
    assert both.config.epsilon_high == 0.28 and not both.config.mask_truncated
    assert both.origins["mask_truncated"] == "command line (loss_type)"
    over = resolve([flag_layer([("loss_type", "dapo")]), preset_layer("gsm8k"), preset_layer("cispo")], TASKS).config
    assert over.epsilon_high == 5.0


def test_a_language_document_resolves_to_the_same(tmp_path):
    import yaml

    got = resolved("gsm8k", "dapo", flags=[("model", "m"), ("use_wandb", "true"), ("engine_kwargs.deadline", "9")])
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(got.document()))
    again = resolve([file_layer(path)], TASKS)
    assert again.config == got.config and again.run == got.run and again.config.engine_kwargs == {"deadline": 9}


def test_repeated_flags_collect_where_a_setting_has_several_and_the_last_counts_elsewhere():
    flags = [("reward", "a.py:f"), ("reward", "b.py:g"), ("beta", "0.1"), ("beta", "0.2"), ("stop", "END")]
    got = resolved("language", flags=flags).config
    assert (got.rewards, got.beta, got.stop) == (("a.py:f", "b.py:g"), 0.2, ("END",))
    assert resolved("language", flags=[("rewards", "[xml, code]")]).config.rewards == ("xml", "code")


def test_what_a_preset_says_of_its_own_data_does_not_hold_for_another():
    own, other = language("gsm8k").config, language("gsm8k", dataset="my.jsonl").config
    assert (own.dataset_config, own.eval_split) == ("main", "test")
    assert (other.dataset_config, other.eval_split, other.answer_after) == (None, None, "####")
    kept = language("gsm8k", dataset="my.jsonl", eval_split="train[:5]")
    assert kept.config.eval_split == "train[:5]" and "dataset_config" not in kept.origins


def test_a_data_file_is_a_language_task(tmp_path):
    path = tmp_path / "my_data.jsonl"
    with pytest.raises(ConfigError, match="No such file"):
        data_layer(path)
    path.write_text('{"prompt": "1+1="}\n')
    got = resolve([data_layer(path)], TASKS)
    assert (got.task, got.config.dataset, got.name) == ("language", str(path), "my_data")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"model": "org/Small-1B"}, "Small-1B"),
        ({"model": "org/Small-1B", "dataset": "org/data"}, "data"),
        ({"model": "org/Small-1B", "run_name": "mine"}, "mine"),
        ({"model_name": "my run"}, "my-run"),
    ],
    ids=str,
)
def test_a_run_is_called_as_asked_or_after_its_data_or_model(flags, name):
    assert language("language", **flags).name == name
    assert language("gsm8k", model="org/Small-1B").name == "gsm8k"


def test_a_missing_model_is_told_with_the_remedy():
    from grpo.app.builders import TASKS as rooms

    with pytest.raises(ConfigError, match="no model was named; give --model with a hub id, a folder"):
        rooms["language"].expect_whole(language("gsm8k").config)
    with pytest.raises(ConfigError, match="no dataset was named; give --dataset"):
        rooms["language"].expect_whole(language("language", model="m").config)


def test_the_length_of_a_run_is_what_was_asked_for_last():
    assert language("bandit").run.steps == 100
    epochs = language("bandit", num_train_epochs="2").run
    assert (epochs.steps, epochs.num_train_epochs) == (None, 2)
    steps = language("gsm8k", max_steps="5").run
    assert (steps.steps, steps.num_train_epochs) == (5, None)


def test_steps_follow_from_epochs_where_there_is_data():
    from grpo.bandit import BanditConfig, make_trainer

    endless = make_trainer(BanditConfig())  # a data set's: tests/unit/language/test_trainer.py
    assert endless.total_steps(RunConfig()) == 100 and endless.total_steps(RunConfig(steps=7)) == 7
    with pytest.raises(ConfigError, match="no data set to pass over"):
        endless.total_steps(RunConfig(num_train_epochs=1))


def test_words_of_stable_baselines_are_understood_or_answered(capsys):
    words = ["config", "cartpole", "--lr", "0.001", "--n-envs", "4", "--total-timesteps", "5000", "--verbose", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "command line (lr)" in out and "command line (n_envs)" in out and "command line (total_timesteps)" in out
    assert main(["config", "cartpole", "--policy-kwargs", "{}"]) == 2
    assert "hidden=[64,64] and activation=tanh" in capsys.readouterr().err


def test_the_other_distribution_is_found(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.3" if name == "grpo" else real(name))
    (found,) = [item for item in doctor.findings() if item.what == "grpo"]
    assert found.level == "problem" and "pip uninstall grpo" in found.remedy


@pytest.mark.parametrize(
    "names, flags, said",
    [
        (["dreamer"], [], ["no --env was named: env CartPole-v1 is taken"]),
        (["dreamer"], [("env", "CartPole-v1")], []),
        (["cartpole"], [], []),
        (["control", "cartpole"], [], []),
        (
            ["cartpole", "acrobot"],
            [],
            ["cartpole, acrobot each name a task: what the later says holds, here task control, env Acrobot-v1"],
        ),
        (
            ["acrobot", "dreamer"],
            [],
            ["acrobot, dreamer each name a task: what the later says holds, here task worldmodel, env Acrobot-v1"],
        ),
        (["bandit", "grpo_kl"], [], []),
    ],
)
def test_choices_that_nobody_made_are_said(names, flags, said):
    assert list(arguments.resolved(names, flags).remarks) == said


def test_a_flag_without_its_value_is_told_apart_from_a_switch(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "cartpole", "--env"]) == 2
    assert capsys.readouterr().err == "grpo: command line: --env needs a value\n"
    assert main(["train", "cartpole", "--max-episode-steps", "--seed", "1"]) == 2
    assert capsys.readouterr().err == "grpo: command line: --max-episode-steps needs a value\n"
    switched = resolve([preset_layer("cartpole"), flag_layer(given_flags([], ["--scale-observations"]))], configs())
    assert switched.config.scale_observations is True


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", ["train", "eval", "view", "export", "plan", "new", "doctor"])
def test_help_fits_narrow_terminals_but_for_commands_to_copy(command, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    with suppress(SystemExit):
        main([command, "--help"])
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("  grpo ", "usage:"))]
    fits = 80 if command == "train" else width  # whose words about examples are as they are
    assert max(map(len, said)) <= fits
