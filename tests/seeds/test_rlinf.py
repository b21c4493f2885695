"""The page on GRPO of RLinf: its block, each of its lines changed, and the blocks of its current configurations."""

import pytest

from grpo.app.builders import configs
from grpo.app.settings import file_layer, flag_layer, preset_layer, resolve
from grpo.config import GRPOConfig
from grpo.errors import ConfigError
from grpo.language import GRPOConfig as LanguageConfig
from grpo.language import GRPOTrainer

BLOCK = """\
algorithm:
  adv_type: grpo
  loss_type: actor
  loss_agg_func: "token-mean"
  group_size: 16
  kl_beta: 0.0
  kl_penalty_type: low_var_kl
  ratio_clip_eps: 0.2
  calculate_entropy: False
  entropy_bonus: 0.0
  normalize_advantages: True
  early_stop_imp_ratio: 5.0
  use_valid_token_scale: False
"""

REASONING = """\
algorithm:
  group_size: 16
  n_minibatches: 4
  training_batch_size_per_gpu: 1
  rollout_batch_size_per_gpu: null
  logprob_forward_micro_batch_size: 1
  val_rollout_batch_size_per_gpu: 4
  recompute_logprobs: True
  shuffle_rollout: False
  max_num_gen_batches: 1
  loss_type: actor
  loss_agg_func: "token-mean"
  kl_beta: 0.0
  kl_penalty_type: low_var_kl
  ratio_clip_eps: 0.2
  entropy_bonus: 0.0
  calculate_entropy: False
  clip_ratio_c: null
  clip_ratio_low: null
  clip_ratio_high: null
  clip_log_ratio_min: -20
  clip_log_ratio_max: 20
  importance_sampling_fix: True
  importance_sampling_clip: 2
  adv_type: grpo
  normalize_advantages: True
  early_stop_imp_ratio: 5.0
  use_valid_token_scale: True
  sampling_params:
    do_sample: True
    temperature: 0.8
    top_k: 1000000
    top_p: 1.0
    repetition_penalty: 1.0
    max_new_tokens: 1024
    min_new_tokens: 1
    stop: ["<|im_end|>"]
"""


@pytest.fixture
def made(tmp_path):
    """Resolves a task with a block of one's own and flags over it, as `grpo train` does."""

    def resolved(block: str = BLOCK, *flags: tuple[str, str], task: str = "gsm8k"):
        file = tmp_path / "own.yaml"
        file.write_text(block)
        return resolve([preset_layer(task), file_layer(file), flag_layer(flags)], configs()).config

    return resolved


def test_the_block_as_printed(made):
    config = made()
    assert (config.group_size, config.reduction, config.max_ratio, config.whiten) == (16, "token_mean", 5, "decisions")
    assert (config.scale_eps, config.whiten_ddof, config.whiten_eps, config.whiten_root) == (1e-6, 0.0, 1e-5, False)
    assert (config.beta, config.kl_estimator, config.epsilon, config.entropy_coef) == (0, "k3", 0.2, 0)
    assert config.report_entropy is False


@pytest.mark.parametrize(
    "line, value, expected",
    [
        ("adv_type", "raw", {"baseline": "none", "scale": "none", "whiten": "decisions"}),
        ("loss_type", "ppo", {"loss_type": "grpo", "epsilon": 0.2}),
        ("loss_agg_func", "seq-mean-token-mean", {"reduction": "sequence_mean"}),
        ("group_size", "4", {"group_size": 4}),
        ("kl_beta", "0.01", {"beta": 0.01}),
        ("kl_penalty_type", "mse", {"kl_estimator": "k2"}),
        ("ratio_clip_eps", "0.1", {"epsilon": 0.1}),
        ("clip_ratio_high", "0.28", {"epsilon": 0.2, "epsilon_high": 0.28}),
        ("calculate_entropy", "true", {"report_entropy": True, "entropy_coef": 0.0}),
        ("entropy_bonus", "0.01", {"entropy_coef": 0.01}),
        ("normalize_advantages", "false", {"whiten": "none", "scale_eps": 1e-6}),
        ("early_stop_imp_ratio", "null", {"max_ratio": None}),
        ("use_valid_token_scale", "true", {"reduction": "token_mean"}),
    ],
)
def test_any_line_of_ones_own_block_can_be_changed(made, line, value, expected):
    config = made(BLOCK, (f"algorithm.{line}", value))
    assert {name: getattr(config, name) for name in expected} == expected


def test_what_a_line_brought_along_goes_with_it_by_our_names_and_in_python_too(made):
    assert made(BLOCK, ("whiten", "none")).whiten == "none"
    assert made(BLOCK, ("scale", "none")).scale == "none"
    config = GRPOConfig(_dialect="rlinf", adv_type="grpo", normalize_advantages=True)
    off = config.but(normalize_advantages=False, adv_type="raw")
    assert (off.whiten, off.scale, off.whiten_eps, off.scale_eps) == ("none", "none", 1e-8, 1e-4)
    assert config.but(scale="none").scale == "none" and config.but(group_size=4).whiten_eps == 1e-5
    assert GRPOConfig(normalize_advantages=True).but(normalize_advantages=False).whiten == "none"
    assert config.normalize_advantages is True and off.normalize_advantages is False  # as given


def test_the_entropy_is_reported_where_it_is_asked_for_and_no_bonus_is():
    def entropy(**words):
        args = LanguageConfig(
            _dialect="rlinf",
            model="tiny",
            dataset="addition",
            max_completion_length=4,
            group_size=2,
            groups_per_step=1,
            **words,
        )
        return GRPOTrainer(args=args, reward_funcs=lambda completion: float(len(completion))).step().metrics

    assert entropy(calculate_entropy=True, entropy_bonus=0.0)["entropy"] > 0
    assert "entropy" not in entropy(calculate_entropy=False)


def test_a_bonus_that_is_not_read_there_says_which_line_to_delete(made):
    block = BLOCK.replace("entropy_bonus: 0.0", "entropy_bonus: 0.01")
    with pytest.raises(ConfigError, match=r"entropy_bonus=0\.01 is not read there where calculate_entropy is false.*"
                       r"delete entropy_bonus for no bonus, or calculate_entropy for the bonus"):  # fmt: skip
        made(block)
    config = made(block.replace("calculate_entropy: False", "calculate_entropy: True"))
    assert (config.entropy_coef, config.report_entropy) == (0.01, True)


# --- groups kept by their mean reward ------------------------------------------------------------------------------


def test_groups_outside_of_the_bounds_are_sampled_again_and_left_out(made):
    bounds = "  filter_rewards: True\n  rewards_lower_bound: 0.1\n  rewards_upper_bound: 0.9\n"
    config = made(BLOCK + bounds)
    assert (config.filter_rewards, config.rewards_lower_bound, config.rewards_upper_bound) == (True, 0.1, 0.9)
    assert made(BLOCK + bounds, ("algorithm.filter_rewards", "false")).rewards_lower_bound is None
    asked = []

    def by_prompt(completions, prompts):  # the first prompt that is seen is hopeless, all others are mixed
        asked.extend(prompts)
        return [0.0 if prompt == asked[0] else float(row % 2) for row, prompt in enumerate(prompts)]

    args = LanguageConfig(
        model="tiny", dataset="addition", max_completion_length=4, group_size=4, groups_per_step=3,
        filter_rewards=True, rewards_lower_bound=0.1, rewards_upper_bound=0.9, max_attempts=3, overlap_rewards=False,
        preflight=False,
    )  # fmt: skip
    report = GRPOTrainer(args=args, reward_funcs=by_prompt).step()
    kept = report.experience.rollouts
    assert (report["attempts"], report["filtered"], len(kept)) == (3, 1, 8)
    assert asked.count(asked[0]) == 12 and asked[0] not in {sample.prompt.text for sample in kept.inputs}


# --- blocks of its current configurations -------------------------------------------------------------------------


def test_a_block_of_its_configurations_for_reasoning_loads(made):
    config = made(REASONING)
    assert (config.minibatches, config.old_logp, config.epsilon, config.dual_clip) == (4, "recomputed", 0.2, None)
    assert (config.temperature, config.top_k, config.top_p, config.max_completion_length) == (0.8, 0, 1.0, 1024)
    assert config.stop == ("<|im_end|>",)
    assert (config.mismatch, config.mismatch_level, config.mismatch_high) == ("truncate", "token", 2)
    assert made(REASONING, ("algorithm.importance_sampling_fix", "false")).mismatch == "none"


def test_its_older_names_are_known(made):
    older = BLOCK.replace("adv_type: grpo", "adv_type: math_grpo").replace(
        "loss_type: actor", "loss_type: math_ppo_actor"
    )
    assert made(older) == made()


def test_so_many_minibatches_are_so_many_updates():
    args = LanguageConfig(
        model="tiny",
        dataset="addition",
        max_completion_length=4,
        group_size=2,
        groups_per_step=5,
        minibatches=2,
        preflight=False,
    )
    report = GRPOTrainer(args=args, reward_funcs=lambda completion: float(len(completion))).step()
    assert report["updates"] == 2


@pytest.mark.parametrize(
    "line, message",
    [
        ("adv_type: gae", r"adv_type: 'gae' is not done here: .*advantage=critic"),
        ("adv_type: reinpp", r"loss_type: reinforce\+\+"),
        ("adv_type: opd", r"'opd' is not done here: that is a recipe here: --recipe opd with a teacher"),
        ("adv_type: grop", r"'grop' is not one of grpo, .*did you mean \"grpo\""),
        ("loss_type: actor_critic", "not done here: .*critic"),
        ("loss_type: dr_grop", 'did you mean "dr_grpo"'),
        ("advantage_mode: turn", "advantage_mode: not done here: a conversation is judged as a whole"),
        ("max_num_gen_batches: 3", "no_signal=resample with max_attempts"),
        ("value_clip: 0.5", "value_clip: not done here: its GRPO has no critic"),
        ("staleness_threshold: 2", "sampled by the policy that learns from it"),
        ("down_sampling: {do_down_sampling: true}", "every try of a group teaches"),
        ("importance_sampling_fix: true", "needs importance_sampling_clip"),
        ("sampling_params: {max_new_tokens: '${data.length}'}", "max_new_tokens=.*computed by OmegaConf there"),
        ("sampling_params: {temprature: 1}", 'temprature is not one of .*did you mean "temperature"'),
        ("sampling_params: {do_sample: false}", "equal answers"),
        ("sampling_params: greedy", "sampling_params: expected a block"),
        ("earlystop_imp_ratio: 5.0", 'did you mean "early_stop_imp_ratio"'),
        ("n_minibatchs: 4", 'did you mean "n_minibatches"'),
        ("n_minibatches: few", "n_minibatches: expected a whole number, got 'few'"),
        ("clip_ratio_c: much", r"clip_ratio_c \(dual_clip here; there .*valid number.*'much'"),
        ("entropy_bonus: lots", "entropy_bonus: expected a number, got 'lots'"),
        ("normalize_advantages: maybe", "normalize_advantages: expected true or false, got 'maybe'"),
        ("kl_penalty_type: k4", "'k4' is not one of low_var_kl, kl"),
        ("rewards_lower_bound: low\n  filter_rewards: true", r"rewards_lower_bound: .*valid number.*'low'"),
    ],
)  # fmt: skip
def test_wrong_words_and_values_are_told_in_its_own_words(made, line, message):
    with pytest.raises(ConfigError, match=message):
        made(f"algorithm:\n  {line}\n")


def test_without_a_task_the_tasks_are_listed(tmp_path):
    with pytest.raises(ConfigError, match="no task was named; give one of bandit, control, language"):
        resolve([preset_layer("rlinf_math")], configs())
