"""TRL's words: every field of its GRPOConfig that is not one of ours by the same name, and those of command lines.

`docs/trl.md` lists all of TRL's fields with what became of each; it is made from here and `grpo.language.compat.trl`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from grpo.dialects.spelling import (
    Settings,
    Soft,
    Spelling,
    absent,
    accept,
    always,
    choice,
    given,
    refuse,
    spelled,
    truth,
    when,
    whole,
)
from grpo.errors import nearest
from grpo.language.compat.easydel_dialect import EASYDEL
from grpo.language.compat.generation import NEUTRAL, NOT_SAMPLED
from grpo.language.compat.rlinf import RLINF

# --- batches ----------------------------------------------------------------------------------------------------------


def world_size() -> int:
    """Processes that train together, as torchrun and accelerate say."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def batches(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """TRL counts completions: so many a device, times devices and accumulation, are an optimizer step; times
    steps_per_generation, what is sampled at a time. Here a step is so many prompts with group_size completions each.
    """
    number = {key: whole(value) for key, value in words.items() if not absent(value)}
    if not number or ("groups_per_step" in ours and set(number) == {"gradient_accumulation_steps"}):
        return {}  # prompts are counted already: accumulation is memory alone
    if "generation_batch_size" in number and "steps_per_generation" in number:
        raise ValueError("generation_batch_size and steps_per_generation say the same thing; give one of them")
    device, accumulated = number.get("per_device_train_batch_size", 8), number.get("gradient_accumulation_steps", 1)
    update = device * accumulated * world_size()
    every = device * number.get("steps_per_generation", accumulated) * world_size()
    sampled = number.get("generation_batch_size", every)
    group = whole(ours.get("group_size", 8))
    if min(number.values()) < 1 or sampled % group:
        told = ", ".join(f"{key}={value}" for key, value in number.items())
        raise ValueError(
            f"{told}: {sampled} completions a step are not whole groups of {group} (num_generations); "
            f"give prompts_per_step={max(sampled // group, 1)} instead, which needs no such care"
        )
    # Sampled in smaller parts for one update: the weights are the same for all of them.
    groups = max(sampled // group, -(-update // group))
    found: Settings = {"groups_per_step": groups}
    if update < groups * group and sampled > update:
        found |= {"rows_per_minibatch": update} if update % group else {"groups_per_minibatch": update // group}
    return {next(iter(number)): found}


# --- the model --------------------------------------------------------------------------------------------------------


def _dtype(value: Any) -> str:
    word = str(value).removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(word, word)


def _attention(value: Any) -> str:
    word = str(value).lower()
    return "flash" if word.startswith("flash") else {"vanilla": "eager"}.get(word, word)


def _block(value: Any) -> dict[str, Any]:
    """A mapping, or one written as JSON."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise ValueError(f"expected a block of `key: value`, got {value!r}")
    return dict(found)


def _model_kwargs(value: Any) -> Settings:
    """What we have a word for becomes that; the rest goes to from_pretrained as it is."""
    rest, ours = _block(value), {}
    for key, name, make in (
        ("dtype", "dtype", _dtype),
        ("torch_dtype", "dtype", _dtype),
        ("attn_implementation", "attention", _attention),
        ("revision", "revision", str),
        ("trust_remote_code", "trust_remote_code", truth),
    ):
        if key in rest:
            ours[name] = make(rest.pop(key))
    return ours | ({"model_kwargs": rest} if rest else {})


# --- sampling ---------------------------------------------------------------------------------------------------------

_GENERATION = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length", "stop": "stop", "stop_strings": "stop",
}  # fmt: skip


def _generation_kwargs(value: Any) -> Settings:
    found: Settings = {}
    for key, item in _block(value).items():
        if key == "do_sample" and truth(item):
            continue
        if key in NOT_SAMPLED:
            if item not in (None, 0, False, [], (), *NEUTRAL.get(key, ())):
                raise ValueError(f"{key}={item!r} is not done here: {NOT_SAMPLED[key]}")
            continue
        if key not in _GENERATION:
            raise ValueError(f"{key} is not one of {', '.join(_GENERATION)}{nearest(key, list(_GENERATION))}")
        found[_GENERATION[key]] = (item,) if key.startswith("stop") and isinstance(item, str) else item
    return found


def _top_k(value: Any) -> Settings:
    return {"top_k": 0 if absent(value) or str(value) == "-1" else value}


def _server(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """Where vLLM is: in this process, or a server by its address."""
    said = {key: value for key, value in words.items() if not absent(value)}
    mode = said.get("vllm_mode", "colocate")
    if mode not in ("colocate", "server"):
        raise ValueError(f"vllm_mode={mode!r} is not one of colocate, server")
    if mode == "colocate":
        return {}  # as in TRL, addresses are not read
    host, port = said.get("vllm_server_host", "0.0.0.0"), said.get("vllm_server_port", 8000)
    url = said.get("vllm_server_base_url", f"http://{host}:{port}")
    return {"vllm_mode": {"engine_kwargs": {"base_url": url}}}


def _engine(name: str, kind: Callable[[Any], Any]) -> Callable[[Any], Settings]:
    """An argument of the engine, whose kind no setting's schema knows: a command line has words for numbers."""
    return lambda value: {} if absent(value) else {"engine_kwargs": {name: kind(value)}}


_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def _mismatch(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """vLLM's own log-probs against ours: off, or cut or masked, a token or a sequence, within bounds.

    Asking for vLLM asks for this too, in TRL's form, unless the recipe has one of its own.
    """
    prefix = "vllm_importance_sampling_"
    said = {key.removeprefix(prefix): value for key, value in words.items() if not absent(value)}
    vllm = truth(said.pop("use_vllm", False))
    found: dict[str, Settings] = {"use_vllm": {"engine": "vllm"}} if vllm else {}
    if "correction" in said and not truth(said["correction"]):
        return found | {f"{prefix}correction": {"mismatch": "none"}}
    if not said:
        usual = {"mismatch": Soft("mask"), "mismatch_level": Soft("sequence"), "mismatch_high": Soft(3.0)}
        return {"use_vllm": found["use_vllm"] | usual} if vllm and ours.get("loss_type") != "vespo" else found
    mode = str(said.get("mode", "sequence_mask"))
    if mode not in _MODES:
        raise ValueError(f"vllm_importance_sampling_mode={mode!r} is not one of {', '.join(_MODES)}")
    level, how = mode.split("_")
    columns: Settings = {"mismatch": how, "mismatch_level": level}
    columns["mismatch_high"] = said.get("clip_max", said.get("cap", None if f"{prefix}clip_max" in words else 3.0))
    if "clip_min" in said:
        columns["mismatch_low"] = said["clip_min"]
    return found | {prefix + next(iter(said)): columns}


# --- the algorithm ----------------------------------------------------------------------------------------------------


def _loss_type(value: Any) -> Settings:
    """In TRL a loss_type is a reduction; the rest of the paper's recipe is left to other keys, which may say more."""
    alone: dict[str, Settings] = {
        "dapo": {"epsilon_high": Soft(None), "mask_truncated": Soft(False), "drop_no_signal": Soft(False)},
        "dr_grpo": {"scale": Soft("group_std")},
    }
    return {"loss_type": value, **alone.get(str(value), {})}


def reference(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """sync_ref_model is a switch; on, what is not said beside it is TRL's: every 512 steps, six tenths."""
    switch = words.get("sync_ref_model")
    if switch is not None and not truth(switch):
        return {"sync_ref_model": {"ref_sync_steps": None, "ref_mixup_alpha": 1.0}}
    names = {"ref_model_sync_steps": "ref_sync_steps", "ref_model_mixup_alpha": "ref_mixup_alpha"}
    found: dict[str, Settings] = {key: {names[key]: value} for key, value in words.items() if key in names}
    if switch is not None:
        found["sync_ref_model"] = {"ref_sync_steps": Soft(512), "ref_mixup_alpha": Soft(0.6)}
    return found


_SHARDED = "weights are divided among ranks by shard=weights (states, gradients), started with torchrun or --ranks"
_EVALUATION = "held-out prompts are sampled and judged by the rewards, a batch at a time; there is nothing to gather"
_LOADER = "prompts are small and read in this process; dataset_num_proc tokenises them beforehand"
_COMPILE = "torch_compile uses inductor in its default mode"
_PRECISE = "evaluation uses the weights as they are trained, in the precision of dtype"
_HUB = "push_to_hub uploads once, when training ends; trainer.push_to_hub() at any time"

FIELDS = (
    # batches
    *(Spelling(key, "groups_per_step, groups_per_minibatch, rows_per_minibatch", default, together=batches)
      for key, default in (
        ("per_device_train_batch_size", "8 completions; ours 8 prompts a step"),
        ("gradient_accumulation_steps", "1; micro-batches are ours to choose, by tokens_per_microbatch"),
        ("steps_per_generation", "as gradient_accumulation_steps"),
        ("generation_batch_size", "from the other three"),
    )),
    always("auto_find_batch_size", "a pass that runs out of memory is done again in halves"),
    always("average_tokens_across_devices", "a mean over tokens is one over the whole batch"),
    # optimizer
    Spelling("lr_scheduler_type", "lr_schedule", "linear; ours constant",
             given("lr_schedule", lambda value: spelled(value).removesuffix("_with_warmup"))),
    Spelling("lr_scheduler_kwargs", "lr_schedule_kwargs", "none", given("lr_schedule_kwargs", _block)),
    Spelling("warmup_steps", "warmup_steps, warmup_ratio", "0; below 1 it is a share of the run",
             lambda value: {"warmup_ratio" if 0 < float(value) < 1 else "warmup_steps": value}),
    Spelling("optim", "adam_states", "adamw_torch_fused, or 8-bit and paged ones of bitsandbytes; another is handed "
             "over as GRPOTrainer(optimizers=(yours, None))",
             choice({"adamw_torch": {}, "adamw_torch_fused": {}, "adamw_8bit": {"adam_states": "8bit"},
                     "adamw_bnb_8bit": {"adam_states": "8bit"}, "paged_adamw": {"adam_states": "paged"},
                     "paged_adamw_32bit": {"adam_states": "paged"}, "paged_adamw_8bit": {"adam_states": "paged_8bit"},
                     })),
    refuse("optim_args", "AdamW has adam_beta1, adam_beta2, adam_epsilon and weight_decay"),
    refuse("optim_target_modules", "low-rank optimizers are not made here; lora_rank trains fewer weights"),
    accept("label_smoothing_factor", "there are no labels, only sampled tokens", 0.0),
    refuse("neftune_noise_alpha", "noise on embeddings would make old and new log-probs differ"),
    # precision and memory
    Spelling("bf16", "dtype", "on where fp16 is off; as there, products are in bfloat16 and trained weights in float32",
             when({"dtype": "bfloat16"}, {"dtype": Soft("float32")})),
    Spelling("fp16", "dtype", "false; there is no loss scaling here, bfloat16 is safer",
             when({"dtype": "float16"})),
    accept("bf16_full_eval", _PRECISE, False),
    accept("fp16_full_eval", _PRECISE, False),
    Spelling("use_cpu", "device", "false", when({"device": "cpu"})),
    accept("gradient_checkpointing_kwargs", "layers are computed again in one way; the gradients are the same"),
    accept("torch_compile_backend", _COMPILE),
    accept("torch_compile_mode", _COMPILE),
    accept("use_liger_kernel", "log-probs are computed in tiles, without a table of tokens × vocabulary", False),
    accept("liger_kernel_config", "log-probs are computed in tiles already"),
    accept("use_cache", "a scoring pass needs no cache; engines have their own", False),
    accept("torch_empty_cache_steps", "memory is let go of when a pass runs out of it"),
    accept("cast_lm_head_to_fp32", "log-probs are computed in float32, whatever the head's weights are kept in", False),
    accept("pad_to_multiple_of", "rows are packed, or padded to the longest; padding never counts", "auto"),
    # the model
    Spelling("model_init_kwargs", "model_kwargs, dtype, attention", "none; what we have a word for becomes that",
             lambda value: {} if absent(value) else _model_kwargs(value)),
    refuse("router_aux_loss_coef", "the loss has no term for a mixture's router", 0, 0.0),
    always("disable_dropout", "dropout is always 0 here, so that a ratio of 1 is 1; in TRL only when asked for"),
    # data
    Spelling("shuffle_dataset", "shuffle", "true", given("shuffle")),
    Spelling("train_sampling_strategy", "shuffle", "random",
             choice({"random": {}, "sequential": {"shuffle": False}})),
    accept("remove_unused_columns", "every column reaches the rewards, which take those they name", False),
    accept("label_names", "there are no labels"),
    accept("length_column_name", "lengths are counted in tokens", "length"),
    accept("dataloader_drop_last", "the order runs over into the next epoch, so that batches are always full", False),
    accept("dataloader_num_workers", _LOADER, 0),
    accept("dataloader_pin_memory", _LOADER, True),
    accept("dataloader_persistent_workers", _LOADER, False),
    accept("dataloader_prefetch_factor", _LOADER),
    accept("dataloader_multiprocessing_context", _LOADER),
    accept("dataloader_in_order", _LOADER, True),
    refuse("ignore_data_skip", "resumption is exact: it goes on with the prompts that come next"),
    # sampling
    Spelling("top_k", "top_k", "0; -1 and none too are all tokens", _top_k),
    Spelling("min_p", "min_p", "none: all tokens", given("min_p")),
    Spelling("max_grad_norm", "max_grad_norm", "1; 0: never clipped, ours none",
             lambda value: {"max_grad_norm": None if str(value) in ("0", "0.0") else value}),
    Spelling("generation_kwargs", "top_k, min_p, stop", "none; those we have a word for",
             lambda value: {} if absent(value) else _generation_kwargs(value)),
    Spelling("chat_template_kwargs", "chat_template_kwargs", "none", given("chat_template_kwargs", _block)),
    accept("cache_implementation", "the engine chooses its cache; what is sampled is the same"),
    Spelling("use_vllm", "engine, mismatch, mismatch_level, mismatch_high", "false; on, with TRL's correction of what "
             "the two compute differently", together=_mismatch),
    Spelling("vllm_mode", "engine_kwargs", "colocate: in this process; server: base_url", together=_server),
    Spelling("vllm_server_base_url", "engine_kwargs", "none", together=_server),
    Spelling("vllm_server_host", "engine_kwargs", "0.0.0.0", together=_server),
    Spelling("vllm_server_port", "engine_kwargs", "8000", together=_server),
    Spelling("vllm_server_timeout", "engine_kwargs", "240, as ours: deadline", _engine("deadline", float)),
    accept("vllm_group_port", "weights reach a server through files, not a process group", 51216),
    Spelling("vllm_gpu_memory_utilization", "engine_kwargs", "0.3", _engine("gpu_memory_utilization", float)),
    Spelling("vllm_max_model_length", "engine_kwargs", "none: the model's", _engine("max_model_len", int)),
    Spelling("vllm_tensor_parallel_size", "engine_kwargs", "1", _engine("tensor_parallel_size", int)),
    Spelling("vllm_model_impl", "engine_kwargs", "vllm", _engine("model_impl", str)),
    refuse("vllm_enable_sleep_mode", "vLLM keeps its memory during an update; lower gpu_memory_utilization"),
    refuse("vllm_structured_outputs_regex", "a completion that is forced into a form teaches nothing about it; use the "
           "reward regex:PATTERN"),
    Spelling("use_transformers_continuous_batching", "engine", "false", when({"engine": "transformers"})),
    Spelling("use_transformers_paged", "engine", "false", when({"engine": "transformers"})),
    accept("transformers_continuous_batching_config", "the engine batches by itself; what is sampled is the same"),
    accept("ds3_gather_for_generation", "an engine has whole weights, however they are divided for the update", True),
    # the algorithm
    Spelling("loss_type", "loss_type, scale, epsilon_high, mask_truncated, drop_no_signal",
             "dapo; ours grpo. There it is the reduction alone: dr_grpo keeps the std, dapo has no further clip or "
             "filter, unless other keys say so. A preset of the same name is the paper's", _loss_type),
    Spelling("multi_objective_aggregation", "credit, whiten, whiten_eps, whiten_root", "sum_then_normalize",
             choice({"sum_then_normalize": {}, "normalize_then_sum": {
                 "credit": "per_reward", "whiten": "rows", "whiten_eps": 1e-4, "whiten_root": False}})),
    Spelling("ref_model_sync_steps", "ref_sync_steps", "512; EasyDeL 64, with words of its own beside it",
             together=reference),
    Spelling("ref_model_mixup_alpha", "ref_mixup_alpha", "0.6; EasyDeL 0.9, with words of its own beside it",
             together=reference),
    Spelling("sync_ref_model", "ref_sync_steps, ref_mixup_alpha", "false: the other two are then not read",
             together=reference),
    *(Spelling(f"vllm_importance_sampling_{word}", "mismatch, mismatch_level, mismatch_high, mismatch_low", default,
               together=_mismatch) for word, default in (
        ("correction", "true, as here with use_vllm; engine=vllm alone leaves it to the recipe"),
        ("mode", "sequence_mask"),
        ("clip_max", "3"),
        ("clip_min", "none"),
        ("cap", "none: an older word for clip_max"),
    )),
    Spelling("max_tool_calling_iterations", "max_turns", "none; ours 8 completions, one more than rounds of calls",
             given("max_turns", lambda value: whole(value) + 1)),
    # evaluation
    Spelling("num_generations_eval", "eval_samples", "as num_generations; ours 1, greedy", given("eval_samples")),
    accept("per_device_eval_batch_size", "rows_per_generation bounds what is sampled at a time; the metrics stay", 8),
    accept("eval_do_concat_batches", _EVALUATION, True),
    accept("eval_use_gather_object", _EVALUATION, False),
    accept("eval_accumulation_steps", _EVALUATION),
    accept("include_for_metrics", _EVALUATION),
    accept("batch_eval_metrics", _EVALUATION, False),
    accept("prediction_loss_only", _EVALUATION, False),
    # logging
    refuse("log_completions_hub_repo", "samples stay in the run folder"),
    accept("logging_first_step", "log_history and the run folder have every step", False),
    always("logging_nan_inf_filter", "nothing is hidden: a loss that is not finite is counted, then stops the run"),
    accept("log_on_each_node", "the first process alone reports", True),
    accept("log_level", "nothing is logged below warnings; Python's warnings filters say which are shown", "passive"),
    accept("log_level_replica", "the first process alone reports", "warning"),
    accept("include_num_input_tokens_seen", "num_tokens is among the metrics of every step", "no"),
    accept("disable_tqdm", "there is no tqdm bar; train(progress=None) is silent"),
    refuse("trackio_space_id", "set trackio's own environment variables"),
    refuse("trackio_bucket_id", "set trackio's own environment variables"),
    refuse("trackio_static_space_id", "set trackio's own environment variables"),
    # checkpoints and output
    accept("save_only_model", "a checkpoint holds what exact resumption needs, the model among it", False),
    accept("save_on_each_node", "the first process alone writes, once", False),
    always("enable_jit_checkpoint", "SIGTERM ends a run with a checkpoint"),
    refuse("restore_callback_states_from_checkpoint", "a checkpoint holds nothing of callbacks"),
    accept("resume_from_checkpoint", "it is for scripts to read; give it to train(resume_from_checkpoint=…)"),
    refuse("hub_token", "a secret is no setting: `hf auth login`, or HF_TOKEN in the environment"),
    Spelling("hub_private_repo", "hub_private", "none: the account's default; ours true",
             given("hub_private", truth)),
    refuse("hub_strategy", _HUB, "every_save", "end"),
    accept("hub_always_push", "the upload at the end waits for nothing", False),
    refuse("hub_revision", _HUB),
    # machinery
    accept("accelerator_config", "batches are made here, and shared among ranks by their place"),
    *(accept(key, "ranks add up gradients in one fixed order, without DDP", *theirs) for key, *theirs in (
        ("ddp_find_unused_parameters",), ("ddp_bucket_cap_mb",), ("ddp_broadcast_buffers",), ("ddp_static_graph",),
        ("ddp_backend",), ("ddp_timeout", 1800),
    )),
    accept("local_rank", "the launcher says it, in the environment", -1),
    *(refuse(key, _SHARDED, *neutral) for key, *neutral in (("fsdp", []), ("fsdp_config", {}), ("deepspeed",))),
    refuse("parallelism_config", "a model is divided by shard=weights alone, or by vLLM for sampling"),
    refuse("debug", "use torch's own tools", []),
    accept("skip_memory_metrics", "timing.jsonl has the memory of every step", True),
    accept("do_train", "it is for scripts to read; call trainer.train()", False),
    accept("do_eval", "it is for scripts to read; call trainer.evaluate()", False),
    accept("do_predict", "it is for scripts to read; call trainer.predict()", False),
)  # fmt: skip
"""Fields of TRL's GRPOConfig."""

OTHERS = (
    Spelling("prompts_per_step", "groups_per_step", "8"),
    Spelling("repo_id", "model", "EasyDeL: a hub id"),
    Spelling("model_name_or_path", "model", "TRL's command line"),
    Spelling("model_revision", "revision", "TRL's command line: main"),
    Spelling("attn_mechanism", "attention", "EasyDeL vanilla, which is eager", given("attention", _attention)),
    Spelling("attn_implementation", "attention", "TRL's command line: none", given("attention", _attention)),
    Spelling("torch_dtype", "dtype", "the checkpoint's", given("dtype", _dtype)),
    Spelling("processor_repo_id", "tokenizer", "EasyDeL: the model's"),
    Spelling("tokenizer_name_or_path", "tokenizer", "the model's"),
    Spelling("dataset_name", "dataset", "TRL's command line"),
    Spelling("dataset_train_split", "dataset_split", "TRL's command line: train"),
    Spelling("dataset_test_split", "eval_split", "TRL's command line: test"),
    Spelling("reward", "rewards", "none", given("rewards", lambda v: (v,) if isinstance(v, str) else tuple(v))),
    Spelling("max_new_tokens", "max_completion_length", "EasyDeL 256"),
    Spelling("lora_r", "lora_rank", "TRL's command line: 16"),
    Spelling("lora_target_modules", "lora_targets", "all-linear"),
    accept("unsloth_num_chunks", "log-probs are computed in tiles, without a table of tokens × vocabulary", -1),
    refuse("vllm_sampling_params", "an object of vLLM's is no setting; say temperature, top_p, top_k, min_p, "
           "repetition_penalty, and stop in generation_kwargs"),
    Spelling("load_in_4bit", "quantize", "false", when({"quantize": "4bit"})),
    Spelling("load_in_8bit", "quantize", "false", when({"quantize": "8bit"})),
)  # fmt: skip
"""Unsloth's, EasyDeL's, and those of both systems' scripts and command lines."""

TRL = (*FIELDS, *OTHERS)

WORDS = {"trl": (*TRL, *EASYDEL), "rlinf": RLINF}
"""By system, beside those that every room understands."""
