"""Settings: one schema, other systems' words understood, wrong ones refused in one line."""

from __future__ import annotations

import re

import pytest

from grpo.app.words import EVERY, table_text
from grpo.config import ConfigError, GRPOConfig
from grpo.control.config import ControlConfig
from grpo.core.surrogates import Cispo, Sapo, Vespo
from grpo.dialects import COMMON, SYSTEMS, spellings, translate
from grpo.language.config import LanguageConfig
from grpo.recipes import RECIPES, column_types
from grpo.run.config import RunConfig
from grpo.run.dialect import RUN
from grpo.worldmodel.config import WorldModelConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size: input should be greater than or equal to 2, got 1"),
        ({"epsilonn": 0.1}, "unknown setting 'epsilonn'; did you mean \"epsilon\"?"),
        ({"kl_coef": 0.1}, "unknown setting 'kl_coef'; did you mean \"kl_coeff\"?"),
        ({"epsilon": "abc"}, "epsilon: input should be a valid number, unable to parse string as a number, got 'abc'"),
        ({"clip_ratio": 0.1, "epsilon": 0.3}, "epsilon=0.3 and clip_ratio both set epsilon; keep one of them"),
        ({"kl_penalty_type": "k9"}, "kl_penalty_type: 'k9' is not one of low_var_kl, kl, mse, mse_kl, abs, k1, k2, k3"),
        ({"tau_pos": 2.0}, "tau_pos has no effect here: it needs surrogate=sapo"),
        ({"loss_type": "gspo", "kl_cap": 5}, "kl_cap has no effect here: it needs beta > 0"),
        ({"ref_mixup_alpha": 0.5}, "ref_mixup_alpha has no effect here: it needs ref_sync_steps"),
        ({"ref_sync_steps": 4, "beta": 0.0}, "ref_sync_steps has no effect here: it needs beta > 0"),
        ({"max_attempts": 3}, "max_attempts has no effect here: it needs no_signal=resample"),
        ({"old_logp": "detached", "num_iterations": 2}, "old_logp=detached needs num_iterations=1"),
        ({"learning_rate": -1}, "learning_rate: input should be greater than 0, got -1"),
        ({"ratio": "chunk", "top_entropy": 0.1}, "pick single decisions"),
        ({"sync_ref_model": "maybe"}, "expected true or false, got 'maybe'"),
        ({"sync_ref_model": True}, "sync_ref_model=true needs ref_model_sync_steps"),
    ],
)
def test_wrong_settings_are_one_line_with_the_remedy(settings, message):
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="loss_type='dappo' is unknown"):
        GRPOConfig(loss_type="dappo")


def test_text_from_files_and_command_lines_is_coerced():
    config = GRPOConfig(learning_rate="3e-6", epsilon="0.1", group_size="4", loss_type="grpo", scale_rewards="false")
    assert (config.learning_rate, config.epsilon, config.group_size, config.scale) == (3e-6, 0.1, 4, "none")


def test_columns_not_given_are_the_recipe_s_own():
    known = column_types()
    for name, row in RECIPES.items():
        config = GRPOConfig(loss_type=name)
        assert config.algorithm == row
        own = {name: value for name, value in row.columns().items() if name in known}
        assert own == {name: getattr(config, name) for name in own}


def test_a_surrogate_s_numbers_by_name_as_a_block_or_as_a_record():
    flat = GRPOConfig(loss_type="grpo", surrogate="vespo", vespo_k_pos="1.5")
    block = GRPOConfig(loss_type="grpo", surrogate={"kind": "vespo", "k_pos": 1.5})
    nested = GRPOConfig(loss_type="grpo", recipe={"surrogate": "vespo", "vespo_k_pos": 1.5})
    record = GRPOConfig(loss_type="grpo", surrogate=Vespo(k_pos=1.5))
    assert flat == block == nested and flat.algorithm == record.algorithm
    assert (flat.surrogate, flat.vespo_k_pos, flat.algorithm.surrogate) == ("vespo", 1.5, Vespo(k_pos=1.5))
    assert GRPOConfig(loss_type="vespo", surrogate={"k_pos": 1.5}).algorithm.surrogate == Vespo(k_pos=1.5)
    absolute = Cispo(epsilon_high=3.0, bounds="absolute")
    assert GRPOConfig(loss_type="grpo", surrogate=absolute).algorithm.surrogate == absolute
    assert GRPOConfig(loss_type="gspo", surrogate="cispo").algorithm.surrogate == Cispo(3e-4, 4e-4)


def test_settings_are_kept_as_runs_before_had_them():
    """Checkpoints compare these names and values; a record is written out by the same names."""
    config = GRPOConfig(loss_type="vespo", vespo_k_pos=1.5, mismatch="none")
    assert config.model_dump()["recipe"] == config.changed == {"vespo_k_pos": 1.5, "mismatch": "none"}
    assert type(config).model_construct().model_dump()["recipe"] == {} and config.recipe is config.algorithm
    record = GRPOConfig(loss_type="plain", surrogate=Sapo(2.0)).model_dump()["recipe"]
    assert record == {"surrogate": "sapo", "tau_pos": 2.0, "tau_neg": 1.05}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon has no effect here: it needs surrogate=clip or geometric or"),
        ({"loss_type": "cispo", "epsilon": 0.1}, "epsilon has no effect here: bounds=absolute has no floor"),
        ({"surrogate": {"k_pos": 2}}, "vespo_k_pos has no effect here: it needs surrogate=vespo"),
        ({"surrogate": {"kind": "vespo", "k": 2}}, "unknown setting 'k'"),
        ({"surrogate": "vespoo"}, 'did you mean "vespo"?'),
        ({"surrogate": "sapo", "tau_pos": 0}, "tau_pos must be positive"),
        ({"surrogate": Sapo(2.0), "vespo_k_pos": 1.0}, "vespo_k_pos has no effect here"),
    ],
)
def test_numbers_of_another_surrogate_are_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        GRPOConfig(**settings)


def test_what_asks_for_nothing_is_no_number_of_another_surrogate():
    nothing = GRPOConfig(loss_type="sapo", delta=None, dual_clip=None, bounds="relative", epsilon_high=None)
    assert nothing.algorithm == RECIPES["sapo"] and nothing.delta is None


def test_no_signal_decides_whether_groups_are_dropped():
    assert GRPOConfig(loss_type="grpo", no_signal="drop").algorithm.drop_no_signal
    assert GRPOConfig(loss_type="dapo").algorithm.drop_no_signal
    assert not GRPOConfig(loss_type="dapo", no_signal="keep").algorithm.drop_no_signal
    assert not GRPOConfig(loss_type="dapo", teacher_coef=0.5).algorithm.drop_no_signal  # the teacher is one
    assert GRPOConfig(loss_type="dapo", teacher_coef=0.5, no_signal="drop").algorithm.drop_no_signal


def test_but_keeps_the_rest():
    config = GRPOConfig(loss_type="dapo", epsilon=0.1, group_size=4).but(group_size=6)
    assert (config.loss_type, config.epsilon, config.group_size) == ("dapo", 0.1, 6)


def test_configs_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        GRPOConfig().group_size = 3
    with pytest.raises(AttributeError):
        GRPOConfig().nonsense  # noqa: B018


def test_the_protocol_document_s_words():
    config = GRPOConfig(
        group_size=4, batch_size=2, num_epochs_per_update=2, clip_epsilon=0.3, kl_coeff=0.1, entropy_coeff=0.01
    )
    assert (config.groups_per_minibatch, config.num_iterations) == (2, 2)
    assert (config.epsilon, config.beta, config.entropy_coef) == (0.3, 0.1, 0.01)
    assert [t.key for t in config.translations] == [
        "batch_size", "num_epochs_per_update", "clip_epsilon", "kl_coeff", "entropy_coeff",
    ]  # fmt: skip


def test_the_same_word_in_two_systems():
    """normalize_advantages: batch std of the centred rewards here, a second whitening of all decisions there."""
    ours = GRPOConfig(normalize_advantages=True)
    theirs = GRPOConfig(_dialect="rlinf", normalize_advantages=True)
    assert (ours.whiten, ours.whiten_eps) == ("rows", 1e-8)
    assert (theirs.whiten, theirs.whiten_eps) == ("decisions", 1e-5)


def test_the_rlinf_page_s_block():
    block = {
        "adv_type": "grpo", "loss_type": "actor", "loss_agg_func": "token-mean", "group_size": 16, "kl_beta": 0.0,
        "kl_penalty_type": "low_var_kl", "ratio_clip_eps": 0.2, "calculate_entropy": False, "entropy_bonus": 0.0,
        "normalize_advantages": True, "early_stop_imp_ratio": 5.0, "use_valid_token_scale": False,
    }  # fmt: skip
    config = GRPOConfig(_dialect="rlinf", **block)
    assert (config.group_size, config.max_ratio, config.reduction, config.scale) == (16, 5.0, "token_mean", "group_std")
    assert (config.kl_estimator, config.beta, config.whiten) == ("k3", 0.0, "decisions")


def test_switched_off_keys_are_not_read():
    config = GRPOConfig(sync_ref_model=False, ref_model_sync_steps=64, ref_model_mixup_alpha=0.9)
    assert config.ref_sync_steps is None
    on = GRPOConfig(sync_ref_model=True, ref_model_sync_steps=64, ref_model_mixup_alpha=0.9)
    assert (on.ref_sync_steps, on.ref_mixup_alpha) == (64, 0.9)


CONTROL = {*ControlConfig.model_fields}
"""Words of Stable-Baselines3 are understood whatever else is spoken."""


@pytest.mark.parametrize("system", EVERY)
def test_every_spelling_ends_in_a_setting(system):
    """The table is tested against the schema: no foreign key leads nowhere."""
    rooms = {"trl": [LanguageConfig], "dreamer": [WorldModelConfig], "rlinf": [ControlConfig, LanguageConfig]}
    fields = [name for schema in rooms.get(system, [GRPOConfig]) for name in schema.model_fields]
    known = {*fields, *column_types()}
    for spelling in spellings(system, EVERY).values():
        names = {name.strip() for name in spelling.becomes.split(",")}
        assert names <= known | CONTROL or (names == {""} and spelling.default), spelling.key
        own = spelling.key in known and spelling.convert is None and spelling.together is None
        assert not own, f"{spelling.key} is our own word"


def test_every_word_about_the_run_ends_in_one_of_its_settings():
    assert {spelling.becomes for spelling in RUN if not spelling.accepted} <= {*RunConfig.model_fields}


def test_dashes_are_underscores():
    assert translate({"num-generations": 4})[0] == {"group_size": 4}


def test_the_table_lists_every_spelling():
    text = table_text()
    for spelling in (*COMMON, *RUN, *(s for some in EVERY.values() for s in some)):
        assert spelling.key in text
    with pytest.raises(ValueError, match='unknown dialect "rlinff"; did you mean "rlinf"'):
        spellings("rlinff")


def test_a_dump_makes_the_same_config():
    config = GRPOConfig(loss_type="dapo", epsilon=0.1)
    assert GRPOConfig(**config.model_dump()) == config


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(value):
    with pytest.raises(ConfigError, match="learning_rate: input should be a finite number"):
        GRPOConfig(learning_rate=value)


def test_a_recipe_is_chosen_by_name_and_changed_by_columns():
    assert GRPOConfig(recipe="dapo").loss_type == "dapo" and GRPOConfig(recipe={"epsilon": 0.1}).epsilon == 0.1
    with pytest.raises(ConfigError, match="both set loss_type; keep one of them"):
        GRPOConfig(recipe="dapo", loss_type="grpo")
    with pytest.raises(ConfigError, match="a recipe is chosen with loss_type"):
        GRPOConfig(recipe=3)
    assert GRPOConfig(recipe=None).changed == {}


def test_an_error_says_which_settings_could_be_left_out():
    cases = [
        ({"tau_pos": 2.0}, {"tau_pos": "it needs surrogate=sapo"}),
        ({"chunk_size": 4}, {"chunk_size": "ratio=chunk"}),
        (
            {"decisions_per_minibatch": 64, "ratio": "sequence"},
            {"decisions_per_minibatch": "this recipe needs trajectories whole"},
        ),
        ({"group_size": 1}, {}),
    ]
    for settings, idle in cases:
        with pytest.raises(ConfigError) as caught:
            GRPOConfig(**settings)
        assert caught.value.idle == idle, settings


def test_a_room_brings_its_own_words():
    """The hall knows the algorithm's; a room's are there for its own settings, and for whatever the command reads."""
    assert not {"trl", "dreamer"} & {*GRPOConfig.words} and "num_action_chunks" not in spellings("rlinf")
    assert {*LanguageConfig.words} - {*SYSTEMS} == {"trl"} and {*WorldModelConfig.words} - {*SYSTEMS} == {"dreamer"}
    assert "num_action_chunks" in spellings("rlinf", ControlConfig.words)
    with pytest.raises(ConfigError, match=r'unknown dialect "trl".*known: grpo, rlinf, tutorial, own'):
        GRPOConfig(_dialect="trl", max_steps=3)
    assert {*EVERY} == {*SYSTEMS, "trl", "dreamer"}
