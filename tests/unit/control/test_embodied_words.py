"""RLinf's words for robots: the published block loads, acts and trains; what is not done is refused with the reason."""

import pytest

from grpo.app.builders import TASKS, configs
from grpo.app.settings import file_layer, flag_layer, layer, preset_layer, resolve
from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer
from grpo.dialects import translate

BLOCK = """
algorithm:
  normalize_advantages: True
  kl_penalty: kl
  group_size: 4
  rollout_epoch: 2
  num_group_envs: 3
  reward_type: chunk_level
  logprob_type: action_level
  entropy_type: token_level
  adv_type: grpo
  loss_type: actor
  loss_agg_func: "token-mean"
  update_epoch: 3
  kl_beta: 0.0
  entropy_bonus: 0.01
  clip_ratio_high: 0.28
  clip_ratio_low: 0.2
  clip_ratio_c: 3.0
  value_clip: 0.2
  huber_delta: 10.0
  gamma: 0.99
  gae_lambda: 0.95
  auto_reset: False
  ignore_terminations: False
  use_fixed_reset_state_ids: True
  reward_coef: 5.0
  filter_rewards: True
  rewards_lower_bound: 0.5
  rewards_upper_bound: 4.5
"""
REACH = [("env", "tests.unit.control.reach:Reach"), ("vector", "serial"), ("hidden", "[16]"), ("num_envs", "8")]


def test_the_published_block_loads_from_a_file(tmp_path):
    path = tmp_path / "robot.yaml"
    path.write_text(BLOCK)
    config = resolve([preset_layer("control"), file_layer(path)], configs()).config
    assert isinstance(config, ControlConfig)
    assert (config.group_size, config.groups_per_step, config.num_iterations) == (4, 6, 3)
    assert (config.reward_type, config.logprob_type, config.entropy_type) == (
        "chunk_level", "action_level", "token_level",
    )  # fmt: skip
    assert (config.filter_rewards, config.rewards_lower_bound, config.rewards_upper_bound) == (True, 0.5, 4.5)
    assert (config.epsilon, config.epsilon_high, config.dual_clip) == (0.2, 0.28, 3.0)
    assert (config.credit, config.baseline, config.scale, config.whiten) == (
        "trajectory", "group_mean", "group_std", "decisions",
    )  # fmt: skip
    assert (config.reward_scale, config.end_on_success, config.entropy_coef) == (5.0, True, 0.01)
    assert config.judged_by is None and config.gamma == 1.0


def test_the_preset_trains_a_toy_robot():
    """A few steps of RLinf's settings: chunks of five, ratios of single numbers, groups kept by their mean reward."""
    resolved = resolve([preset_layer("rlinf_embodied"), flag_layer([*REACH, ("env_kwargs", "{near: 1.0}")])], TASKS)
    made = GRPOTrainer(config=resolved.config)
    assert made.policy.columns.stride == 10 and made.config.filter_rewards
    reports = made.train(steps=4, progress=None)
    assert all(report["updates"] == 2.0 and report["grad_norm"] > 0 for report in reports)
    last = reports[-1].experience.rollouts
    for group in last.group_N.unique().tolist():
        returns = (last.reward_NT * last.mask_NT).sum(1)[last.group_N == group]
        assert 0.1 <= float(returns.mean()) <= 0.9
    made.source.close()


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (
            {"filter_rewards": False, "rewards_lower_bound": 0.1},
            {"filter_rewards": False, "rewards_lower_bound": None, "rewards_upper_bound": None},
        ),
        ({"rewards_lower_bound": 0.1}, {}),
        ({"rollout_epoch": 1}, {}),
        ({"num_group_envs": 4}, {"groups_per_step": 4}),
        ({"num_group_envs": 4, "rollout_epoch": "16"}, {"groups_per_step": 64}),
        ({"ignore_terminations": True}, {"end_on_success": False}),
        ({"num_action_chunks": 8}, {"action_chunk": 8}),
        ({"gamma": 0.9}, {"gamma": 0.9}),
        ({"value_clip": 0.2, "huber_delta": 10.0, "auto_reset": False}, {}),
    ],
)
def test_what_a_word_becomes(words, ours):
    assert translate(words, "rlinf", ControlConfig.words)[0] == ours


def test_a_discount_beside_whole_episodes_is_not_read():
    ours, _ = translate({"adv_type": "grpo", "gamma": 0.99, "gae_lambda": 0.95}, "rlinf", ControlConfig.words)
    assert ours["credit"] == "trajectory" and "gamma" not in ours and "gae_lambda" not in ours


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"auto_reset": True}, "auto_reset: not done here: nothing resets by itself"),
        ({"use_fixed_reset_state_ids": False}, "a group always begins from one state"),
        ({"value_clip": 0.5}, "its GRPO has no critic"),
        ({"rollout_epoch": 4}, "rollout_epoch needs num_group_envs"),
        ({"adv_type": "gae"}, "'gae' is not done here: that trains a critic too"),
        ({"reward_type": "token"}, "reward_type: input should be"),
        ({"logprob_typ": "token_level"}, "did you mean"),
    ],
)
def test_what_is_not_done_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        resolve([preset_layer("control"), layer({"algorithm": words}, "robot.yaml")], configs())
