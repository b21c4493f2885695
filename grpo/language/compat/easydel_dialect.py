"""EasyDeL's words: its GRPOConfig and the training arguments below it, those that TRL does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.spelling import Settings, Spelling, absent, always, choice, given, refuse, spelled, truth

_JAX = "a run is one process on one device, and nothing of JAX"
_PREVIEW = "samples of every sample_every-th step are in the run folder; grpo view shows them"
_ENGINE = "the engine is ours, or vLLM's: engine=vllm with engine_kwargs"
_MEMORY = "memory alone: log-probs are computed in tiles, passes are cut by tokens_per_microbatch"
_LENGTH = "prompts and completions have limits of their own: max_prompt_length, max_completion_length"
_QUANTISE = "quantize=4bit or 8bit, with an adapter"


def _schedule(value: Any) -> Settings:
    word = spelled(value).lower()
    return {"lr_schedule": {"none": "constant"}.get(word, word)}


def _clip_grad(value: Any) -> Settings:
    return {"max_grad_norm": None if absent(value) else value}


EASYDEL = (
    # the optimizer
    Spelling("scheduler", "lr_schedule", "none, which is constant; also linear and cosine", _schedule),
    Spelling("clip_grad", "max_grad_norm", "none: never; ours 1", _clip_grad),
    Spelling("optimizer", "", "adamw; another is handed over as GRPOTrainer(optimizers=(yours, None))",
             choice({"adamw": {}})),
    refuse("extra_optimizer_kwargs", "AdamW has adam_beta1, adam_beta2, adam_epsilon and weight_decay", {}),
    refuse("learning_rate_end", "schedules end where transformers' do, at 0"),
    refuse("custom_scheduler", "hand a LambdaLR over: GRPOTrainer(optimizers=(None, yours))"),
    refuse("tx_mu_dtype", "moments are float32"),
    refuse("frozen_parameters", "set requires_grad of the model, or train an adapter (lora_rank)"),
    # data
    Spelling("shuffle_train_dataset", "shuffle", "true", given("shuffle", truth)),
    refuse("shuffle_seed_train", "everything random comes from seed", 64871),
    Spelling("truncation_mode", "", "keep_end, as overlong_prompts=truncate does",
             choice({"keep_end": {}}, {"keep_start": "a prompt without its end asks nothing"})),
    refuse("max_length", _LENGTH),
    refuse("max_sequence_length", _LENGTH),
    refuse("ids_to_pop_from_dataset", "every column reaches the rewards", []),
    refuse("use_data_collator", "rows are padded or packed here; see packing", True),
    refuse("use_grain", "prompts are small and read in this process", True),
    refuse("offload_dataset", "prompts are small and read in this process"),
    # sampling
    refuse("presence_penalty", "a token is sampled by the probability that is trained; see repetition_penalty", 0, 0.0),
    refuse("frequency_penalty", "a token is sampled by the probability that is trained; see repetition_penalty",
           0, 0.0),
    *(refuse(f"generation_{word}", _PREVIEW, *neutral) for word, *neutral in (
        ("top_p",), ("top_k",), ("temperature",), ("do_sample",), ("num_return_sequences",), ("max_new_tokens",),
        ("presence_penalty",), ("frequency_penalty",), ("repetition_penalty",), ("interval",), ("prompts", []),
        ("use_train_prompts", False), ("num_prompts", 1), ("extra_kwargs",), ("config_overrides",), ("seed",),
        ("shard_inputs", True), ("preview_print", False), ("log_to_wandb", True),
        ("dataset_prompt_field", "prompt"),
    )),
    refuse("log_training_generations_to_wandb", _PREVIEW, True),
    refuse("benchmarks", "`grpo eval` and run.evaluate_every judge held-out prompts", []),
    refuse("benchmark_interval", "`grpo eval` and run.evaluate_every judge held-out prompts"),
    always("use_esurge_generation", f"true; {_ENGINE}"),
    *(refuse(f"esurge_{word}", _ENGINE, *neutral) for word, *neutral in (
        ("use_tqdm", True), ("hbm_utilization", 0.45), ("max_num_seqs",), ("max_num_seq_buckets",), ("min_input_pad",),
        ("page_size", 32), ("silent_mode", True), ("runner_verbose", False), ("max_num_batched_tokens",),
        ("enable_prefix_caching",), ("data_parallelism_axis",),
    )),
    # memory and precision
    *(Spelling(word, "", f"none; {_MEMORY}", lambda value: {}) for word in (
        "ref_logps_chunk_size", "completion_chunk_size", "logprob_vocab_chunk_size", "lmhead_chunksize",
        "eval_batch_size",
    )),
    refuse("max_loss_completion_tokens", "every token of a completion teaches; see max_completion_length"),
    refuse("quantization_mode", _QUANTISE),
    refuse("quantization_group_size", _QUANTISE),
    refuse("quantization_bits", _QUANTISE),
    always("low_mem_usage", "true, as here"),
    # output
    always("do_last_save", "true: the last step is always saved"),
    always("save_optimizer_state", "true: a checkpoint holds what exact resumption needs"),
    always("merge_lora_before_save", "true; ours saves the adapter, trainer.save_model(merge=True) merges it"),
    always("log_grad_norms", "true: grad_norm is among the metrics"),
    always("report_metrics", "true: the run folder has them all"),
    always("verbose", "true; train(progress=None) is silent"),
    refuse("resume_if_possible", "say it where it happens: trainer.train(resume_from_checkpoint=True)"),
    refuse("remove_ckpt_after_load", "checkpoints stay as keep_last says"),
    refuse("progress_bar_type", "train(progress=…) is live, plain or None", "tqdm", "rich"),
    refuse("track_memory", "timing.jsonl has memory where the machine tells it"),
    refuse("wandb_entity", "set WANDB_ENTITY in the environment"),
    refuse("trainer_prefix", "the run is called as model_name says", "GRPO"),
    refuse("watchers", "weights are not logged", []),
    refuse("max_evaluation_steps", "eval_prompts bounds the held-out rows of an evaluation"),
    refuse("per_epoch_training_steps", "the data set's length says how long an epoch is"),
    refuse("per_epoch_evaluation_steps", "eval_prompts bounds the held-out rows of an evaluation"),
    refuse("training_time_limit", "end it from outside: SIGTERM saves a checkpoint, --resume goes on"),
    # machinery
    *(refuse(word, _JAX, *neutral) for word, *neutral in (
        ("backend",), ("auto_shard_states", True), ("step_partition_spec",), ("jax_distributed_config",),
        ("log_all_workers", False), ("process_zero_is_admin", True), ("performance_mode", False), ("init_tx", True),
        ("is_fine_tuning", True), ("model_parameters",), ("state_apply_fn_kwarguments_to_model",),
        ("step_start_point",), ("force_step_start_point", False), ("sparsify_module", False), ("pruning_module",),
    )),
    refuse("loss_config", "loss_type names a recipe"),
    refuse("aux_loss_enabled", "the loss has no term for a mixture's router"),
)  # fmt: skip
"""Accepted wherever TRL's are: both speak to the language room."""

ITS_OWN = {
    "total_batch_size", "num_return_sequences", "max_training_steps", "save_directory", "model_name", "log_steps",
    "evaluation_steps", "report_steps", "save_interval_minutes", "wandb_name", "use_wandb", "attn_mechanism",
    "processor_repo_id", "repo_id", *(spelling.key for spelling in EASYDEL),
}  # fmt: skip
"""By which its scripts are told from TRL's, where both have a word."""


def with_its_defaults(words: Mapping[str, Any]) -> dict[str, Any]:
    """sync_ref_model beside its own words: every 64 steps, nine tenths of the policy, where nothing else is said."""
    switch = words.get("sync_ref_model")
    if absent(switch) or not ITS_OWN & words.keys() or str(switch).lower() == "false":
        return dict(words)
    return {"ref_model_sync_steps": 64, "ref_model_mixup_alpha": 0.9, **words}
