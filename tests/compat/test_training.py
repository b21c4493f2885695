"""TRL's settings, losses, models and adapters: a script's trainer learns, and its log says so in TRL's words."""

import warnings

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.config import ConfigError
from grpo.core.gates import on_policy_enough, top_entropy
from grpo.language import GRPOTrainer
from tests.compat.scripts import (
    CHATS,
    STANDARD,
    TEXTS,
    Said,
    judge,
    learns,
    model,
    moved,
    settings,
    spread,
    tokenizer,
    train,
    trainer,
    weights,
)
from tests.unit.language.tiny import CHARACTERS, SPECIAL

# --- masks ------------------------------------------------------------------------------------------------------------

RISING = torch.arange(1.0, 13.0).reshape(2, 6) / 10
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("entropy", "mask", "share", "kept"),
    [
        (RISING, PADDED, 0.2, [8, 9]),
        (torch.tensor([[1, 2, 3, 14, 5, 1.4], [5, 6, 7, 8, 9, 10]]), torch.tensor([[1, 1, 1, 1, 0, 0]] * 2).bool(), 0.2,
         [3, 9]),
        (RISING, PADDED, 0.5, [5, 6, 7, 8, 9]),
        (RISING, PADDED, 1.0, list(range(10))),
        (RISING, PADDED, 0.0, [9]),
        (RISING, torch.zeros(2, 6, dtype=torch.bool), 0.5, []),
    ],
)  # fmt: skip
def test_only_the_most_uncertain_tokens_are_kept(entropy, mask, share, kept):
    assert (top_entropy(entropy, mask, share) & mask).flatten().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("padded", [False, True])
def test_what_is_far_off_policy_is_dropped_unless_it_was_good(padded):
    sampled, mask = torch.zeros(3, 4), torch.ones(3, 4).bool()
    logp = torch.tensor([-2.0, -0.5, -2.0])[:, None].repeat(1, 4)
    if padded:
        mask[:, 2:] = False
        logp[:, 2], logp[:, 3] = -1e4, 1e4
    advantage = torch.tensor([1.0, -1.0, -1.0])[:, None].repeat(1, 4)
    kept = on_policy_enough(logp, sampled, advantage, mask, 1.0)
    assert [bool(row[0]) for row in kept] == [True, True, False]


# --- the constructor and models ---------------------------------------------------------------------------------------


def test_a_model_a_reward_model_and_rows_suffice(tmp_path):
    made = GRPOTrainer(
        model=model(), processing_class=tokenizer(), reward_funcs=judge(), reward_processing_classes=tokenizer(),
        train_dataset=STANDARD,
    )  # fmt: skip
    assert made.train_dataset is STANDARD and made.eval_dataset is None


SMALL = {"vocab_size": len(SPECIAL) + len(CHARACTERS), "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LAYOUTS = {
    "cohere2": {},
    "gpt_oss": EXPERTS,
    "qwen2": {},
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
                           "topk_group": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYOUTS)
def test_models_of_other_layouts_learn(tmp_path, kind):
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | LAYOUTS[kind]))
    built = trainer(tmp_path, given={"model": made})
    before = weights(built)
    train(built)
    assert len(moved(built, before)) > len(before) / 2 and built.state.log_history[-1]["train_loss"] is not None


@pytest.mark.parametrize("data", [STANDARD, CHATS], ids=["standard", "conversational"])
def test_rows_of_text_and_of_messages(tmp_path, data):
    learns(trainer(tmp_path, data=data))


def test_a_models_own_code_is_run_only_where_it_was_asked_for(tmp_path):
    assert settings(tmp_path, trust_remote_code=True).trust_remote_code and not settings(tmp_path).trust_remote_code


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_liger_kernel", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_every_loss_learns_with_and_without_the_kernel_that_is_not_needed(tmp_path, loss_type, use_liger_kernel):
    level = {"importance_sampling_level": "sequence" if loss_type == "luspo" else "token"}
    learns(trainer(tmp_path, loss_type=loss_type, use_liger_kernel=use_liger_kernel, gradient_accumulation_steps=2,
                   **level))  # fmt: skip


@pytest.mark.parametrize("use_liger_kernel", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {"beta": 0.1, "use_bias_correction_kl": True},
        {"delta": 2.0},
        {"off_policy_mask_threshold": 0.5},
    ],
    ids=["kl", "delta", "off_policy"],
)
def test_terms_of_the_loss_with_and_without_the_kernel_that_is_not_needed(tmp_path, more, use_liger_kernel):
    made = learns(trainer(tmp_path, use_liger_kernel=use_liger_kernel, **more))
    assert ("kl" in made.state.log_history[0]) == ("beta" in more)


@pytest.mark.parametrize(
    "more",
    [
        {"num_iterations": 2},
        {"beta": 0.1},
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 2},
        {"pad_to_multiple_of": 8},
        {"cast_lm_head_to_fp32": True},
        {"top_entropy_quantile": 0.5},
        {"generation_kwargs": {"top_k": 5, "min_p": 0.01}},
        {"importance_sampling_level": "sequence"},
        {"num_generations": 6, "gradient_accumulation_steps": 2},
        {"dataloader_num_workers": 2},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"use_transformers_continuous_batching": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_settings_of_trls_scripts_learn(tmp_path, more):
    learns(trainer(tmp_path, **more))


def test_a_reference_that_follows_is_another_one_afterwards(tmp_path):
    made = trainer(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
    before = {name: p.clone() for name, p in made.ref_model.named_parameters()}
    train(made)
    assert all(not torch.equal(p, before[name]) for name, p in made.ref_model.named_parameters())


@pytest.mark.parametrize("scale_rewards", [False, "group", "batch", True, "none"])
def test_every_way_to_scale_rewards(tmp_path, scale_rewards):
    learns(trainer(tmp_path, scale_rewards=scale_rewards))


def test_beams_are_refused_by_name_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="num_beams=2 is not done here: completions are sampled one token at a time"):
        settings(tmp_path, generation_kwargs={"do_sample": True, "top_k": 50, "num_beams": 2})
    settings(tmp_path, generation_kwargs={"do_sample": True, "top_k": 50, "num_beams": 1})


def test_prompts_come_in_the_order_of_trls_sampler(tmp_path):
    seen = []

    def watched(prompts, completions, **columns):
        seen.append([prompt[-1]["content"] for prompt in prompts])
        return spread(completions)

    made = trainer(
        tmp_path, rewards=watched, gradient_accumulation_steps=3, steps_per_generation=4, num_generations=4,
        per_device_train_batch_size=3, num_iterations=2, shuffle_dataset=False, max_steps=2, overlap_rewards=False,
    )  # fmt: skip
    train(made)
    assert [batch[::4] for batch in seen] == [TEXTS[:3], TEXTS[3:]] and seen[0][:4] == [TEXTS[0]] * 4


# --- entropy ----------------------------------------------------------------------------------------------------------


def test_a_bonus_for_entropy_is_told_of(tmp_path):
    row = learns(trainer(tmp_path, entropy_coef=0.1)).state.log_history[-1]
    assert row["policy_loss"] is not None and row["entropy"] > 0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_weight_of_an_adaptive_bonus_grows_once_a_step(tmp_path, accumulated):
    made = learns(trainer(
        tmp_path, entropy_coef=0.01, use_adaptive_entropy=True, entropy_target=15.0, entropy_coef_delta=0.005,
        gradient_accumulation_steps=accumulated, max_steps=3,
    ))  # fmt: skip
    rows = made.state.log_history[:3]
    assert [row["entropy_coef"] for row in rows] == pytest.approx([0.015, 0.020, 0.025])
    assert rows[0]["loss"] == pytest.approx(rows[0]["policy_loss"])  # nothing was measured before the first
    assert rows[1]["policy_loss"] - rows[1]["loss"] == pytest.approx(0.015 * rows[1]["entropy"], rel=1e-3)


def test_an_adaptive_bonus_goes_on_where_a_run_left_it(tmp_path):
    how = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 15.0, "save_strategy": "steps",
           "save_steps": 1}  # fmt: skip
    whole = train(trainer(tmp_path / "whole", max_steps=3, **how))
    train(trainer(tmp_path / "cut", max_steps=2, **how))
    again = train(trainer(tmp_path / "cut", max_steps=3, **how), resume_from_checkpoint=True)
    assert again.state.log_history[-1]["entropy_coef"] == whole.state.log_history[-1]["entropy_coef"]
    assert again.state.log_history[-1]["loss"] == whole.state.log_history[2]["loss"]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "luspo"])
def test_the_bonus_is_the_mean_entropy_whatever_the_loss(tmp_path, loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    made = trainer(tmp_path, loss_type=loss_type, importance_sampling_level=level, entropy_coef=0.5)
    row = train(made).state.log_history[0]
    assert (row["policy_loss"] - row["loss"]) / row["entropy"] == pytest.approx(0.5, rel=0.3)


def test_the_bonus_moves_weights_by_itself(tmp_path):
    def constant(completions, **columns):
        return [1.0] * len(completions)

    for coefficient, moves in ((0.0, False), (0.5, True)):
        made = trainer(tmp_path / str(moves), rewards=constant, entropy_coef=coefficient)
        before = weights(made)
        train(made)
        assert bool(moved(made, before)) == moves


# --- what is cut off --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_cut", [False, True])
def test_completions_that_were_cut_off_teach_nothing_where_that_is_asked_for(tmp_path, all_cut):
    made = trainer(tmp_path, mask_truncated_completions=True, loss_type="dapo", max_completion_length=4)
    made.source.engine = Said(["abcd", "abcef", "abcgh"] if all_cut else ["abcdef", "ab", "a"])
    if all_cut:
        generate = made.source.engine.generate
        made.source.engine.generate = lambda *given: [replace_stop(c) for c in generate(*given)]
    before = weights(made)
    train(made)
    assert bool(moved(made, before)) != all_cut
    if all_cut:
        assert made.state.log_history[-1]["train_loss"] == pytest.approx(0.0)


def replace_stop(completion):
    return type(completion)(completion.ids, completion.logp, "length")


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_a_ratio_of_whole_sequences_beside_a_sum_over_tokens_is_warned_of(tmp_path, loss_type):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GRPOTrainer(model=model(), processing_class=tokenizer(), reward_funcs=spread, train_dataset=STANDARD,
                    args=settings(tmp_path, loss_type=loss_type, importance_sampling_level="sequence"))  # fmt: skip
    told = any("weighs each sequence by its length" in str(warning.message) for warning in caught)
    assert told == (loss_type != "grpo")


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"beta": 0.1}], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_adapter_learns_and_its_base_stays(tmp_path, wrapped, more):
    given = {"model": get_peft_model(model(), LoraConfig())} if wrapped else {"peft_config": LoraConfig()}
    made = trainer(tmp_path, given=given, max_steps=2, learning_rate=0.01, **more)
    before = weights(made)
    train(made)
    changed = moved(made, before)
    assert changed and changed == {name for name in before if "lora_" in name and "reference" not in name}


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"]),
        LoraConfig(target_modules=["q_proj", "v_proj"]),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        LoraConfig(target_modules="all-linear"),
    ],
    ids=["head", "no_head", "head_saved", "all"],
)
def test_adapters_of_every_module_learn_beside_the_kernel_that_is_not_needed(tmp_path, config):
    """An adapter on the head too: TRL refuses that with Liger, which would leave it out."""
    made = trainer(tmp_path, given={"peft_config": config}, use_liger_kernel=True, max_steps=2, learning_rate=0.01)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters() if p.requires_grad}
    train(made)
    assert moved(made, before) == set(before)


def test_prompt_learning_is_refused(tmp_path):
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="prompt-learning"):
        trainer(tmp_path, given={"peft_config": config}, use_liger_kernel=True, max_steps=2, learning_rate=0.01)


def test_the_order_of_the_rows_has_a_seed_of_its_own(tmp_path):
    orders = [
        [prompt.text for prompt in trainer(tmp_path, **seeds).source.prompts.batch(0, 6)]
        for seeds in ({"seed": 5}, {"data_seed": 5, "seed": 1}, {"seed": 1})
    ]
    assert orders[0] == orders[1] != orders[2]
