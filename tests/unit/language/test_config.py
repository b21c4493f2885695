"""The language room's settings: TRL's and EasyDeL's words in Python, and what they become."""

import json
from enum import Enum

import pytest
import torch

from grpo.config import ConfigError
from grpo.language.around import rate_of
from grpo.language.build import set_torch
from grpo.language.checks import notices
from grpo.language.config import LanguageConfig
from grpo.recipes import RECIPES
from grpo.run.config import RunConfig
from grpo.run.dialect import RUN_NAMES, translate_run


def test_the_issue_s_block():
    config = LanguageConfig(
        output_dir="runs/demo", num_generations=8, beta=0.04, max_prompt_length=512, max_completion_length=256,
        temperature=0.7, top_p=0.95, top_k=50, sync_ref_model=True, ref_model_mixup_alpha=0.9, ref_model_sync_steps=64,
        reward_weights=[1.0, 0.1],
    )  # fmt: skip
    assert (config.run.logdir, config.group_size, config.beta, config.top_k) == ("runs/demo", 8, 0.04, 50)
    assert (config.ref_sync_steps, config.ref_mixup_alpha, config.reward_weights) == (64, 0.9, (1.0, 0.1))


def test_easydel_s_two_blocks():
    page = LanguageConfig(
        model_name="GRPOTrainer", learning_rate=1e-6, max_prompt_length=512, max_completion_length=256, beta=0.04,
        sync_ref_model=False, ref_model_mixup_alpha=0.9, ref_model_sync_steps=64, dataset_num_proc=None,
        skip_apply_chat_template=False, total_batch_size=16, num_train_epochs=3,
    )  # fmt: skip
    assert (page.run.name, page.ref_sync_steps, page.groups_per_step, page.run.num_train_epochs) == (
        "GRPOTrainer", None, 16, 3,
    )  # fmt: skip
    usage = LanguageConfig(
        model_name="grpo_math_solver", save_directory="grpo_checkpoints", beta=0.04, max_prompt_length=512,
        max_completion_length=256, total_batch_size=16, learning_rate=1e-6, num_train_epochs=3, use_wandb=True,
    )  # fmt: skip
    assert (usage.run.logdir, usage.run.trackers) == ("grpo_checkpoints/{name}", ("wandb",))


# --- the run --------------------------------------------------------------------------------------------------------


def test_every_setting_of_the_run_has_a_word_here():
    """Two have rules of their own."""
    assert {*RUN_NAMES, "trackers", "name"} == {*RunConfig.model_fields}


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ({"max_steps": 7}, {"steps": 7}),
        ({"max_steps": -1, "num_train_epochs": 2}, {"num_train_epochs": 2}),
        ({"steps": 7, "max_steps": "7"}, {"steps": 7}),
        ({"run_name": "a"}, {"name": "a"}),
        ({"save_steps": 50.0, "save_strategy": "steps"}, {"checkpoint_every": 50}),
        ({"save_strategy": "no"}, {"checkpoint_every": None, "checkpoint_minutes": None}),
        ({"save_total_limit": None}, {"keep_last": None}),
        ({"eval_steps": 5, "eval_strategy": "steps"}, {"evaluate_every": 5}),
        ({"eval_strategy": False}, {"evaluate_every": None}),  # what YAML makes of `no`
        ({"report_to": "none"}, {"trackers": ()}),
        ({"report_to": "tensorboard", "use_wandb": True}, {"trackers": ("tensorboard", "wandb")}),
        ({"report_to": ["wandb"], "use_wandb": "true"}, {"trackers": ("wandb",)}),
        ({"trackers": "wandb, trackio"}, {"trackers": ("wandb", "trackio")}),
        ({"use_wandb": False}, {}),
        ({"logging-steps": 10}, {"log_every": 10}),
        ({"metric_for_best_model": "eval_loss", "greater_is_better": False}, {"best_by": "-eval/loss"}),
        ({"failure_budget": 0.1, "stop_at": 0.5}, {"failure_budget": 0.1, "stop_at": 0.5}),
    ],
    ids=str,
)
def test_words_about_the_run(given, run):
    rest, found, _ = translate_run({**given, "beta": 0.1, "epochs": 2})
    assert found == run and rest == {"beta": 0.1, "epochs": 2}  # epochs are passes over the same tries
    RunConfig(**found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_dir": "a", "save_directory": "b"}, "both set logdir; keep one of them"),
        ({"steps": 5, "max_steps": 6}, "max_steps=6 and steps both set steps"),
        ({"save_strategy": "best"}, "save_strategy=best needs metric_for_best_model, of evaluations"),
        ({"eval_strategy": "sometimes"}, "use eval_steps"),
        ({"report_to": "all"}, "report_to=all is refused: name what is meant, of tensorboard, wandb, trackio"),
        ({"report_to": "none", "use_wandb": True}, "report_to says none and use_wandb asks for one"),
        ({"save_steps": "often"}, "save_steps: could not convert"),
        ({"greater_is_better": False}, "needs metric_for_best_model"),
        ({"failure_budget": 2}, "run.failure_budget: input should be less than or equal to 1"),
    ],
    ids=str,
)
def test_words_about_the_run_that_are_wrong(given, message):
    with pytest.raises(ConfigError) as caught:
        LanguageConfig(**given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "prompts", "minibatch"),
    [
        ({"prompts_per_step": 5}, 5, None),
        ({"per_device_train_batch_size": 16}, 2, None),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, 2, None),
        ({"gradient_accumulation_steps": 2}, 2, None),  # eight completions on a device, as there
        ({"per_device_train_batch_size": 8, "steps_per_generation": 4}, 4, ("groups_per_minibatch", 1)),
        ({"per_device_train_batch_size": 4, "generation_batch_size": 32}, 4, ("rows_per_minibatch", 4)),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 2}, 4, None),
        ({"per_device_train_batch_size": "8", "num_generations": "4"}, 2, None),
        ({"per_device_train_batch_size": None, "prompts_per_step": 3}, 3, None),
        (
            {
                "per_device_train_batch_size": 6,
                "gradient_accumulation_steps": 3,
                "steps_per_generation": 4,
                "num_generations": 4,
            },
            6,
            ("rows_per_minibatch", 18),
        ),
        (
            {
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 3,
                "steps_per_generation": 2,
                "num_generations": 4,
            },
            2,
            None,
        ),
    ],
    ids=str,
)
def test_completions_become_prompts(given, prompts, minibatch):
    config = LanguageConfig(**given)
    assert config.groups_per_step == prompts
    found = {name: getattr(config, name) for name in ("groups_per_minibatch", "rows_per_minibatch")}
    assert {name: value for name, value in found.items() if value} == dict([minibatch] if minibatch else [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"per_device_train_batch_size": 6}, "6 completions a step are not whole groups of 8"),
        ({"per_device_train_batch_size": 6}, "give prompts_per_step=1 instead"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "say the same thing"),
        ({"per_device_train_batch_size": 8, "prompts_per_step": 3}, "both set groups_per_step"),
        ({"per_device_train_batch_size": 2.5}, "expected a whole number"),
    ],
    ids=str,
)
def test_batches_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        LanguageConfig(**given)


# --- the algorithm --------------------------------------------------------------------------------------------------


def test_a_loss_type_is_the_reduction_alone_as_in_trl():
    dapo, drgrpo = LanguageConfig(loss_type="dapo").algorithm, LanguageConfig(loss_type="dr_grpo").algorithm
    assert (dapo.reduction, dapo.surrogate.epsilon_high, dapo.mask_truncated, dapo.drop_no_signal) == (
        "token_mean", None, False, False,
    )  # fmt: skip
    assert (drgrpo.reduction, drgrpo.scale, drgrpo.length) == ("fixed_length", "group_std", 256.0)
    for name in ("grpo", "bnpo", "sapo", "cispo", "luspo", "gspo"):
        assert LanguageConfig(loss_type=name).algorithm == RECIPES[name], name


def test_other_keys_say_more_than_a_loss_type():
    said = LanguageConfig(loss_type="dapo", epsilon_high=0.28, mask_truncated_completions=True, drop_no_signal=True)
    assert said.algorithm == RECIPES["dapo"]
    assert LanguageConfig(loss_type="dr_grpo", scale_rewards="none").algorithm.scale == "none"
    assert LanguageConfig(scale_rewards=False, loss_type="dr_grpo").algorithm.scale == "none"


def test_changing_a_setting_keeps_the_sense_of_the_others():
    papers = LanguageConfig(_dialect="own", loss_type="dapo")
    assert papers.algorithm == RECIPES["dapo"] == papers.but(seed=3).algorithm
    trl = LanguageConfig(loss_type="dapo", output_dir="x")
    assert trl.but(num_generations=4).algorithm == trl.algorithm and trl.but(seed=1).run.logdir == "x"
    assert LanguageConfig().but(loss_type="dapo").algorithm == trl.algorithm


@pytest.mark.parametrize(
    ("beside", "found"),
    [
        ({}, (512, 0.6)),
        ({"total_batch_size": 4}, (64, 0.9)),
        ({"ref_model_sync_steps": 7}, (7, 0.6)),
        ({"max_training_steps": 4, "ref_model_mixup_alpha": 0.3}, (64, 0.3)),
    ],
)
def test_the_reference_follows_as_trl_says_and_as_easydel_says_beside_words_of_its_own(beside, found):
    config = LanguageConfig(beta=0.1, sync_ref_model=True, **beside)
    assert (config.ref_sync_steps, config.ref_mixup_alpha) == found


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({"per_device_train_batch_size": 4}, (2, None)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, (8, None)),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 4}, (8, 2)),
        ({"per_device_train_batch_size": 4, "generation_batch_size": 16}, (4, 2)),
    ],
)
def test_batches_count_the_devices_of_a_launcher(monkeypatch, words, found):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = LanguageConfig(num_generations=4, **words)
    assert (config.groups_per_step, config.groups_per_minibatch) == found
    assert (config.per_device_train_batch_size, config.world_size) == (4, 2)


def test_steps_that_trl_would_count_otherwise_are_told_of():
    config = LanguageConfig(max_steps=10, num_iterations=2, generation_batch_size=32, per_device_train_batch_size=8)
    assert "max_steps=10 counts samplings, each with 8 updates: 80 in all" in notices(config)[0]
    assert not notices(config.but(num_iterations=1, groups_per_minibatch=None))


@pytest.mark.parametrize(
    ("name", "how", "last"),
    [
        ("cosine_with_min_lr", {"min_lr": 1e-6}, 0.1),
        ("cosine_with_min_lr", {"min_lr_rate": 0.5}, 0.5),
        ("warmup_stable_decay", {"num_decay_steps": 5, "min_lr_ratio": 0.2}, 0.2),
        ("polynomial", {"lr_end": 5e-6}, 0.5),
    ],
)
def test_schedules_take_arguments(name, how, last):
    config = LanguageConfig(lr_scheduler_type=name, lr_scheduler_kwargs=how, learning_rate=1e-5)
    rate = rate_of(config, None)
    assert rate(0, 20) == 1.0 and rate(20, 20) == pytest.approx(last)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows what was measured"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min": 1}}, "unexpected keyword argument 'min'"),
    ],
)
def test_schedules_that_cannot_be_are_refused_in_a_line(words, message):
    with pytest.raises(ConfigError, match=message):
        rate_of(LanguageConfig(**words), None)


def test_pytorch_is_set_as_asked(monkeypatch):
    told = []
    monkeypatch.setattr("torch.set_float32_matmul_precision", told.append)
    monkeypatch.setattr("torch.use_deterministic_algorithms", told.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for words in ({}, {"tf32": True}, {"tf32": False, "full_determinism": True}):
        set_torch(LanguageConfig(**words))
    assert told == ["high", "highest", True]


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        ({"correction": False}, ("none", "token", 2.0, None)),
        ({"correction": True}, ("mask", "sequence", 3.0, None)),
        ({"mode": "token_truncate", "clip_max": 2.0, "clip_min": 0.5}, ("truncate", "token", 2.0, 0.5)),
        ({"mode": "sequence_truncate", "cap": 4.0}, ("truncate", "sequence", 4.0, None)),
        ({"mode": "token_mask", "clip_max": None}, ("mask", "token", None, None)),
    ],
    ids=str,
)
def test_the_sampler_s_mismatch(given, columns):
    made = LanguageConfig(**{f"vllm_importance_sampling_{name}": value for name, value in given.items()}).algorithm
    assert (made.mismatch, made.mismatch_level, made.mismatch_high, made.mismatch_low) == columns


def test_asking_for_vllm_asks_for_its_correction():
    made = LanguageConfig(use_vllm=True)
    assert (made.engine, made.mismatch, made.mismatch_level, made.mismatch_high) == ("vllm", "mask", "sequence", 3.0)
    assert LanguageConfig(use_vllm=True, vllm_importance_sampling_correction=False).mismatch == "none"
    assert LanguageConfig(use_vllm=True, loss_type="vespo").algorithm == RECIPES["vespo"]
    assert LanguageConfig(use_vllm=False).mismatch == "none"


def test_each_reward_on_its_own():
    made = LanguageConfig(multi_objective_aggregation="normalize_then_sum").algorithm
    assert made.but(name="gdpo", paper="", follows="") == RECIPES["gdpo"].but(paper="", follows="")
    assert LanguageConfig(multi_objective_aggregation="sum_then_normalize").algorithm.credit == "trajectory"


# --- model and sampling ---------------------------------------------------------------------------------------------


class Name(Enum):
    COSINE = "cosine"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"repo_id": "a/b"}, {"model": "a/b"}),
        ({"model_name_or_path": "a/b", "attn_implementation": "flash_attention_2"}, {"attention": "flash"}),
        ({"attn_mechanism": "vanilla"}, {"attention": "eager"}),
        ({"bf16": True}, {"dtype": "bfloat16"}),
        ({"bf16": False}, {"dtype": "float32"}),
        ({"bf16": False, "fp16": True}, {"dtype": "float16"}),
        ({"model_init_kwargs": {"dtype": torch.bfloat16, "low": 1}}, {"dtype": "bfloat16", "model_kwargs": {"low": 1}}),
        ({"model_init_kwargs": json.dumps({"attn_implementation": "eager"})}, {"attention": "eager"}),
        ({"use_cpu": True}, {"device": "cpu"}),
        ({"lr_scheduler_type": "constant_with_warmup"}, {"lr_schedule": "constant"}),
        ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}),
        ({"lr_scheduler_type": Name.COSINE}, {"lr_schedule": "cosine"}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": None, "min_p": None}, {"top_k": 0, "min_p": 0.0}),
        ({"generation_kwargs": {"top_k": 5, "stop": "END"}}, {"top_k": 5, "stop": ("END",)}),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9}, {
            "engine": "vllm", "engine_kwargs": {"base_url": "http://0.0.0.0:9"}}),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 0.5, "vllm_server_timeout": 9.0}, {
            "engine_kwargs": {"gpu_memory_utilization": 0.5, "deadline": 9.0}}),
        ({"use_vllm": "true", "vllm_max_model_length": "512", "vllm_server_timeout": "3"}, {
            "engine_kwargs": {"max_model_len": 512, "deadline": 3.0}}),
        ({"use_transformers_continuous_batching": True}, {"engine": "transformers"}),
        ({"num_generations_eval": 4, "shuffle_dataset": False}, {"eval_samples": 4, "shuffle": False}),
        ({"max_tool_calling_iterations": 3, "tools": ("a:b",)}, {"max_turns": 4}),
        ({"reward": "a.py:f"}, {"rewards": ("a.py:f",)}),
    ],
    ids=str,
)  # fmt: skip
def test_words_about_the_model_and_sampling(given, ours):
    config = LanguageConfig(**given)
    assert {name: getattr(config, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fp16": True, "bf16": True}, "both set dtype"),
        ({"optim": "sgd"}, "optim: 'sgd' is not one of adamw_torch"),
        (
            {"generation_kwargs": {"num_beams": 4}},
            "generation_kwargs: num_beams=4 is not done here: completions are sampled one token at a time",
        ),
        ({"generation_kwargs": {"top_k": 4}, "top_k": 5}, "both set top_k"),
        ({"vllm_mode": "remote"}, "is not one of colocate, server"),
        ({"num_generation": 4}, "unknown setting 'num_generation'; did you mean \"num_generations\"?"),
        ({"deepspeed": "zero3.json"}, "deepspeed: not done here: weights are divided among ranks by shard=weights"),
    ],
    ids=str,
)
def test_words_that_are_wrong(given, message):
    with pytest.raises(ConfigError) as caught:
        LanguageConfig(**given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_foreign_words_are_echoed_and_our_own_are_not():
    config = LanguageConfig(num_generations=4, top_k=5, use_wandb=True, trackers="wandb")
    assert [item.key for item in config.translations] == ["num_generations", "use_wandb"]


def test_a_dump_makes_the_same_settings():
    config = LanguageConfig(loss_type="dr_grpo", num_generations=4, stop=("x",))
    assert LanguageConfig(**config.model_dump(exclude_unset=True)).model_dump() == config.model_dump()
