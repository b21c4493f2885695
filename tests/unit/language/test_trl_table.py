"""The table of TRL's fields: complete, and every line of it tried."""

import json
from pathlib import Path

import pytest

from grpo.config import ConfigError
from grpo.language.compat import arguments
from grpo.language.compat.trl import FIELDS, table_markdown
from grpo.language.config import LanguageConfig

TOLD = json.loads(Path(arguments.__file__).with_name("trl_1_16_fields.json").read_text(encoding="utf-8"))
DEFAULTS = TOLD["fields"]

BESIDE = {
    "hub_model_id": {"push_to_hub": True},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine"},
    "hub_private_repo": {"push_to_hub": True},
    "ref_model_mixup_alpha": {"beta": 0.1, "sync_ref_model": True},
    "ref_model_sync_steps": {"beta": 0.1, "sync_ref_model": True},
    "sync_ref_model": {"beta": 0.1},
    "use_bias_correction_kl": {"beta": 0.1},
    **{
        name: {"use_adaptive_entropy": True}
        for name in ("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta")
    },
    **{name: {"log_completions": True} for name in ("num_completions_to_print", "log_unique_prompts")},
    "max_tool_calling_iterations": {"tools": ("a:b",)},
    "greater_is_better": {"metric_for_best_model": "reward"},
    **{f"sapo_temperature_{side}": {"loss_type": "sapo"} for side in ("pos", "neg")},
    **{f"vespo_{word}": {"loss_type": "vespo"} for word in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    **{f"vllm_server_{word}": {"vllm_mode": "server"} for word in ("base_url", "host", "port")},
}
"""What a field needs beside it to mean anything."""

EXAMPLES = {
    "entropy_coef_min": 0.5, "num_completions_to_print": 3,
    "output_dir": "runs/x", "per_device_train_batch_size": 32, "max_steps": 7, "num_train_epochs": 2.0,
    "lr_scheduler_type": "cosine", "warmup_steps": 5, "gradient_accumulation_steps": 2, "bf16": True, "fp16": True,
    "logging_strategy": "no", "report_to": "wandb", "run_name": "x", "project": "x", "eval_strategy": "no",
    "eval_steps": 5, "save_strategy": "no", "save_total_limit": 5, "hub_private_repo": False, "hub_model_id": "a/b",
    "metric_for_best_model": "loss", "greater_is_better": False, "use_cpu": True,
    "train_sampling_strategy": "sequential",
    "model_init_kwargs": {"a": 1}, "num_generations_eval": 3, "generation_batch_size": 16, "steps_per_generation": 2,
    "top_p": 0.9, "top_k": 5, "min_p": 0.1, "generation_kwargs": {"top_k": 5}, "chat_template_kwargs": {"a": 1},
    "vllm_mode": "server", "vllm_server_base_url": "http://x", "vllm_model_impl": "transformers",
    "vllm_max_model_length": 99, "delta": 4.0, "epsilon_high": 0.3, "importance_sampling_level": "sequence",
    "reward_weights": [1.0, 2.0], "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch",
    "loss_type": "bnpo", "top_entropy_quantile": 0.5, "max_tool_calling_iterations": 3,
    "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.1,
    "vllm_importance_sampling_cap": 4.0, "off_policy_mask_threshold": 0.5, "max_completion_length": 99,
    "shuffle_dataset": False, "optim": "adamw_8bit", "data_seed": 5, "tf32": True,
    "lr_scheduler_kwargs": {"a": 1}, "vllm_server_host": "127.0.0.1", "seed": 3, "adam_beta1": 0.5,
    "adam_beta2": 0.5, "vllm_gpu_memory_utilization": 0.5, "sync_ref_model": True, "ref_model_mixup_alpha": 0.5,
    "vllm_importance_sampling_correction": True, "gradient_checkpointing": True, "use_bias_correction_kl": True,
}  # fmt: skip
"""Values that differ from ours; others are made from the default: the other truth value, twice the number and 7."""


def example(name):
    default = DEFAULTS[name]
    if name in EXAMPLES:
        return EXAMPLES[name]
    return not default if isinstance(default, bool) else "x" if default is None else "y" if default == "" else (
        default + "x" if isinstance(default, str) else default * 2 + 7 if isinstance(default, int | float) else ["x"]
    )  # fmt: skip


def of(verdict):
    return [name for name in DEFAULTS if FIELDS[name].verdict == verdict]


def test_the_table_has_every_field_and_no_other():
    assert TOLD["trl"].startswith("1.16") and len(DEFAULTS) > 180
    assert {*FIELDS} == {*DEFAULTS}


@pytest.mark.parametrize("name", of("implemented") + of("mapped"))
def test_a_field_that_is_accepted_changes_what_the_table_says(name):
    field, beside = FIELDS[name], BESIDE.get(name, {})
    before, after = LanguageConfig(**beside), LanguageConfig(**beside, **{name: example(name)})

    def seen(config):
        every = {n: getattr(config, n) for n in type(config).model_fields if n != "changed"}
        every |= config.algorithm.columns()
        return every | {f"run.{n}": v for n, v in config.run.model_dump().items()}

    old, new = seen(before), seen(after)
    changed = {n for n in new if new[n] != old[n]} - {"name", "paper", "follows"}
    words = {word.strip().removeprefix("run.") for word in field.ours.split(",") if word.strip()}
    if not words:  # always so
        assert not changed
    elif name in ("save_strategy", "loss_type"):
        assert changed
    elif name in ("eval_strategy", "logging_strategy", "vllm_server_host"):  # the example asks for our default
        assert {n.removeprefix("run.") for n in changed} <= words
    else:
        told = {n.removeprefix("run.") for n in changed}
        assert told and told <= words


@pytest.mark.parametrize("name", of("refused"))
def test_a_field_that_is_refused_says_why_unless_it_asks_for_nothing(name):
    assert LanguageConfig(**{name: DEFAULTS[name]}).model_dump() == LanguageConfig().model_dump()
    with pytest.raises(ConfigError) as caught:
        LanguageConfig(**{name: example(name)})
    assert str(caught.value) == f"{name}: not done here: {FIELDS[name].note}"


@pytest.mark.parametrize("name", of("accepted"))
def test_a_field_with_the_same_outcome_whatever_it_says_is_accepted_and_told_of(name):
    plain, given = LanguageConfig(), LanguageConfig(**{name: example(name)})
    assert given.model_dump() == plain.model_dump() and given.run == plain.run
    assert given.not_needed == {name: FIELDS[name].note} and not plain.not_needed
    assert getattr(given, name) == example(name)  # scripts read their settings back
    default = [] if DEFAULTS[name] == [] else DEFAULTS[name]
    assert (getattr(plain, name) or None) == (default or None)
    assert not LanguageConfig(**{name: DEFAULTS[name]}).not_needed


def test_few_fields_are_refused():
    assert len(of("refused")) <= 30


def test_every_accepted_field_but_those_that_would_be_idle_takes_trl_s_default():
    idle = [*BESIDE, "ref_model_sync_steps"]
    LanguageConfig(**{name: value for name, value in DEFAULTS.items() if name not in idle})


def test_the_page_has_a_line_for_every_field():
    page = table_markdown(DEFAULTS)
    assert all(f"\n| `{name}` |" in page for name in DEFAULTS)
    assert "always so" in page and page.count("\n## ") == 3
