"""The room's settings: what each way of judging means, and what is refused. More refusals: test_groups."""

import pytest

from grpo.config import ConfigError
from grpo.control import ControlConfig
from grpo.control.config import ADVANTAGES, ROOM_BASELINES


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_is_columns_of_the_recipe(name):
    config = ControlConfig(advantage=name, **{"gamma": 0.99} if name == "fitted" else {})
    recipe = config.algorithm
    assert config.judged_by == name
    assert (recipe.credit == "trajectory") == (name == "episode")
    assert (recipe.baseline == "given") == (name in ROOM_BASELINES)
    assert {key: getattr(recipe, key) for key in ADVANTAGES[name]} == ADVANTAGES[name]


def test_the_rooms_own_recipe_is_judged_by_a_linear_fit_and_others_by_themselves():
    assert ControlConfig().judged_by == "linear" and ControlConfig().algorithm.baseline == "given"
    grpo = ControlConfig(loss_type="grpo")
    assert grpo.judged_by is None and grpo.algorithm.baseline == "group_mean" and grpo.algorithm.credit == "trajectory"
    mixed = ControlConfig(loss_type="cispo", advantage="linear")
    assert mixed.algorithm.baseline == "given" and mixed.surrogate == "cispo"


def test_the_algorithm_of_the_room_counts_every_decision_alike():
    recipe = ControlConfig().algorithm
    assert (recipe.scale, recipe.reduction, recipe.ratio) == ("batch_std", "token_mean", "token")
    assert ControlConfig(gamma=0.9).algorithm.gamma == 0.9
    assert ControlConfig(group_size=3, groups_per_step=5).episodes == 15


def test_settings_come_back_from_what_a_run_folder_keeps():
    config = ControlConfig(env="Pendulum-v1", gamma=0.9, hidden=(32,), advantage="critic", env_kwargs={"g": 9.0})
    again = ControlConfig(**config.model_dump(mode="json"))
    assert again == config and again.algorithm == config.algorithm and again.judged_by == "critic"
    assert config.but(seed=4).advantage == "critic" and config.but(seed=4).seed == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_by": "steps", "advantage": "step", "action_repeat": 2}, "set action_repeat=1"),
        ({"group_by": "anchor", "loss_type": "grpo"}, "needs credit=reward_to_go"),
        ({"group_by": "steps", "advantage": "linear"}, "not linear$"),
        ({"group_by": "steps"}, r"not linear \(the default\)$"),
        ({"advantage": "step", "credit": "trajectory"}, "advantage=step already says credit"),
        ({"advantage": "stepp"}, "advantage: input should be"),
        ({"group_by": "group"}, "group_by: input should be"),
        ({"draws": "episode", "compiled": True}, "draws has no effect here: a compiled program .* compiled=false"),
        ({"critic_passes": 3}, "critic_passes has no effect here: it needs advantage=critic"),
        ({"baseline_features": 3}, "baseline_features has no effect here: it needs advantage=fitted"),
        ({"advantage": "critic", "baseline_memory": 0.5}, "baseline_memory has no effect here"),
        ({"advantage": "fitted", "baseline_memory": 1.0}, "baseline_memory"),
        ({"advantage": "fitted", "group_by": "anchor"}, "not fitted$"),
        ({"advantage": "fitted"}, "advantage=fitted .* set gamma=0.99"),
        ({"advantage": "step", "group_by": "steps", "end_on_success": True}, "set end_on_success=false"),
        ({"reward_scale": -1.0}, "reward_scale"),
        ({"log_std": float("nan")}, "log_std"),
        ({"gae_lambda": 1.5, "advantage": "critic"}, "gae_lambda"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"num_envs": 0}, "num_envs"),
        ({"env_timeout": 0}, "env_timeout"),
        ({"hidden": ("a",)}, "hidden"),
        ({"loss_type": "contrl"}, 'did you mean "control"'),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        ControlConfig(**settings)
    assert "\n" not in str(error.value)


def test_a_scale_of_rewards_is_refused_only_where_it_would_be_divided_out():
    assert ControlConfig(reward_scale=0.1, scale="none").reward_scale == 0.1
    assert ControlConfig(reward_scale=0.1, advantage="critic").reward_scale == 0.1
    for scale in ("batch_std", "group_std"):
        with pytest.raises(ConfigError, match="divides it out"):
            ControlConfig(reward_scale=0.1, scale=scale)


def test_starts_are_asked_for_again_where_whole_episodes_are_compared():
    for group_by in ("start", "batch"):
        assert ControlConfig(group_by=group_by, no_signal="resample", advantage="episode").algorithm.drop_no_signal
    with pytest.raises(ConfigError, match="needs credit=trajectory"):
        ControlConfig(no_signal="resample")


def test_settings_cannot_be_changed_later():
    with pytest.raises(ValueError):
        ControlConfig().group_size = 3
