"""Settings in blocks: given there or by their names alone, in Python, files and flags, with the same meaning."""

from __future__ import annotations

import pytest

from grpo.app.builders import configs
from grpo.app.explain import first_text, resolved_text, settings_text
from grpo.app.settings import file_layer, flag_layer, preset_layer, resolve
from grpo.app.words import EVERY
from grpo.bandit import BanditConfig
from grpo.blocks import extended, unfolded
from grpo.config import ConfigError, GRPOConfig
from grpo.control.config import ControlConfig
from grpo.dialects import COMMON
from grpo.language.config import LanguageConfig
from grpo.recipes import column_types
from grpo.run.config import RunConfig
from grpo.run.dialect import RUN
from grpo.worldmodel.config import WorldModelConfig

ROOMS = [GRPOConfig, BanditConfig, ControlConfig, LanguageConfig, WorldModelConfig]


@pytest.mark.parametrize("model", ROOMS)
def test_every_setting_is_in_one_block(model):
    placed = [name for names in model.blocks.values() for name in names]
    assert len(placed) == len({*placed})
    assert {*placed} == {name for name in model.model_fields if name != "changed"} | {*column_types()}


@pytest.mark.parametrize("model", ROOMS)
def test_no_block_can_be_taken_for_something_else(model):
    """A mapping is a block, so no setting that takes one may be called like a block, nor may a foreign word."""
    words = {spelling.key for some in (COMMON, RUN, *EVERY.values()) for spelling in some}
    assert not {*model.blocks} & {*words, *column_types(), *RunConfig.model_fields}
    for name in {*model.blocks} & {*model.model_fields}:
        assert "dict" not in str(model.model_fields[name].annotation)


@pytest.mark.parametrize("model", ROOMS)
def test_ten_settings_come_first(model):
    known = {*model.model_fields, *column_types(), *(f"run.{name}" for name in RunConfig.model_fields)}
    assert len({*model.first}) == 10 and {*model.first} <= known


def test_the_same_in_python():
    flat = LanguageConfig(model="m", lora_rank=16, temperature=0.7, num_generations=4, beta=0.1)
    blocks = LanguageConfig(
        model={"model": "m", "lora_rank": 16}, sampling={"temperature": 0.7, "num_generations": 4}, beta=0.1
    )
    assert blocks == flat and blocks.changed == flat.changed and blocks.recipe == flat.recipe
    assert flat.but(model={"lora_rank": 8}) == flat.but(lora_rank=8)
    assert [item.key for item in blocks.translations] == ["num_generations"]


def flagged(*presets, **flags):
    return resolve([*map(preset_layer, presets), flag_layer([(key.replace("__", "."), v) for key, v in flags.items()])],
                   configs())  # fmt: skip


def test_the_same_as_flags():
    flat = flagged("gsm8k", model="PATH", lora_rank="16", revision="1e5", reward="xml", num_generations="4")
    blocks = flagged(
        "gsm8k", model="PATH", model__lora_rank="16", model__revision="1e5", rewards__reward="xml",
        sampling__num_generations="4",
    )  # fmt: skip
    assert blocks.config == flat.config and blocks.document() == flat.document()
    assert blocks.config.revision == "1e5" and blocks.config.rewards == ("xml",)
    assert blocks.origins["lora_rank"] == "command line"
    assert flagged("gsm8k", model__model="PATH").config.model == "PATH"


def test_a_text_may_begin_with_a_brace():
    given = [("recipe", "opsd"), ("teacher_template", "{prompt} = {answer}"), ("rewards", "[correctness]")]
    found = resolve([preset_layer("language"), flag_layer(given)], configs()).config
    assert found.teacher_template == "{prompt} = {answer}" and found.rewards == ("correctness",)
    with pytest.raises(ConfigError, match=r"rewards:1"):
        flag_layer([("rewards", "[correctness: ]: ]")])


def test_the_same_in_a_file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "model: {model: PATH, lora_rank: 16}\nsampling:\n  temperature: 0.5\n  engine_kwargs: {deadline: 9}\n"
        "rewards: [xml]\nupdate.learning_rate: 1e-5\ndata:\n  dataset_name: mine\n"
    )
    config = resolve([preset_layer("gsm8k"), file_layer(path)], configs()).config
    assert (config.model, config.lora_rank, config.temperature, config.rewards) == ("PATH", 16, 0.5, ("xml",))
    assert (config.learning_rate, config.dataset, config.dataset_config) == (1e-5, "mine", None)
    assert config.engine_kwargs == {"deadline": 9}
    path.write_text("model: PATH\n")
    assert resolve([preset_layer("gsm8k"), file_layer(path)], configs()).config.model == "PATH"


def test_a_path_into_a_mapping_goes_on_below_its_block():
    flat = flagged("cartpole", env_kwargs__gravity="9.8").config
    assert flagged("cartpole", env__env_kwargs__gravity="9.8").config == flat
    assert flat.env_kwargs == {"gravity": 9.8} and flagged("cartpole", env="Taxi-v4").config.env == "Taxi-v4"


def test_dialect_blocks_are_as_they_were():
    assert flagged("bandit", algorithm__normalize_advantages="true").config.whiten == "decisions"
    assert flagged("cartpole", jax__platform="cpu").config.device == "cpu"
    dreamed = flagged("dreamer", run__train_ratio="64", run__envs="2").config
    assert (dreamed.train_ratio, dreamed.envs) == (64.0, 2)
    with pytest.raises(ConfigError, match=r"unknown setting 'run.train_ratio'"):
        flagged("cartpole", run__train_ratio="64")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model__lora_rnk": "1"}, "command line: unknown setting 'model.lora_rnk'; did you mean \"model.lora_rank\"?"),
        ({"data__lora_rank": "1"}, "command line: lora_rank is no setting of the block data; it is model.lora_rank"),
        ({"data__lora_r": "1"}, "command line: lora_r is no setting of the block data; it is model.lora_r"),
        ({"modell__lora_rank": "1"}, "unknown setting 'modell.lora_rank'; did you mean \"model\"?"),
        ({"sampling": "1"}, "sampling is a block of settings, sampling.temperature and others; it has no value"),
        ({"model__lora_rank": "1", "lora_rank": "2"}, "lora_rank and model.lora_rank both set lora_rank"),
        ({"beta__high": "1"}, "beta: input should be a valid number"),
        ({"seed": "1", "seed__high": "1"}, "seed.high: seed is a value, not a block"),
    ],
    ids=str,
)
def test_wrong_blocks_are_one_line_with_the_remedy(flags, message):
    with pytest.raises(ConfigError) as caught:
        flagged("gsm8k", **flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_room_may_place_a_shared_setting_elsewhere():
    made = extended({"a": ("x", "y"), "b": ("z",)}, {"c": ("x",), "a": ("w",)})
    assert made == {"c": ("x",), "a": ("w", "y"), "b": ("z",)}
    assert unfolded({"c": {"x": 1}, "a.w": 2, "z": 3}, made, ("w", "x", "y", "z"), {}) == {"x": 1, "w": 2, "z": 3}


def test_texts_are_grouped_by_block():
    got = flagged("gsm8k", model="PATH", lora_rank="16")
    shown = [line.split()[:2] for line in resolved_text(got).splitlines() if line]
    assert ["model", "lora_rank"] in shown and ["data", "dataset"] in shown and ["run", "best_by"] in shown
    blocks = [words[0] for words in shown[1:] if words[0] in (*LanguageConfig.blocks, "run")]
    assert blocks == sorted(blocks, key=[*LanguageConfig.blocks, "run"].index)
    every = settings_text("language")
    titles = [line.partition(":")[0] for line in every.splitlines() if line and not line.startswith(" ")]
    assert titles[1:] == [*LanguageConfig.blocks, "run"]
    first = first_text(got)
    assert "--model (PATH)" in first and "--lora-rank (16)" in first and "--run.steps (None)" in first
    listed = sum(line.startswith("  --") for line in every.splitlines())
    assert f"`grpo train language --settings` explains all {listed}, block by block." in first
    assert every.startswith(f"{listed} settings: ")
    assert "--group-size (8)" in first_text()
