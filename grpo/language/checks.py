"""Settings of the room that cannot go together, refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from grpo.errors import ConfigError
from grpo.language.compat.arguments import updates
from grpo.language.data.columns import named_in
from grpo.language.engines import sampler_flaw
from grpo.language.planning.sizes import memory_limit

if TYPE_CHECKING:
    from grpo.language.config import LanguageConfig

ONLY_WHOLE = "weights=bfloat16 is for training all weights; an adapter's few are kept in float32"


SWITCHES = {
    "lora_rank": ("lora_alpha", "lora_targets"),
    "use_adaptive_entropy": ("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
    "log_completions": ("num_completions_to_print", "log_unique_prompts"),
    "warm_start_steps": ("warm_start_batch", "warm_start_learning_rate"),
}
"""Settings that mean nothing unless another one is on."""


def unswitched(config: LanguageConfig, given: Collection[str]) -> dict[str, str]:
    """Those of the given settings that mean nothing without another one, each with what it needs."""
    off = {switch: names for switch, names in SWITCHES.items() if not getattr(config, switch)}
    recipe, needs = config.recipe, dict[str, str]()
    if config.teacher is not None and not recipe.teacher_coef:
        needs["teacher"] = f"recipe {config.loss_type} has no teacher; set teacher_coef, or use recipe opd"
    if recipe.teacher_sees == "prompt":
        needs["teacher_template"] = "it needs teacher_sees=answer or success"
    if not str(config.teacher).startswith("http"):
        needs["teacher_timeout"] = "it needs a teacher on a server, teacher=http://host:port"
    if recipe.teacher_sees != "success":
        needs["teacher_success"] = "it needs teacher_sees=success"
    if config.teacher is not None or recipe.teacher_sees == "prompt":
        needs["teacher_decay"] = "it needs a model that teaches itself (opsd, sdpo), without teacher"
    if recipe.baseline != "role_mean":
        needs["role_column"] = "it needs baseline=role_mean (recipe rae)"
    if recipe.baseline != "optimal_value":
        needs["value_samples"] = "it needs baseline=optimal_value (recipe a_star_po)"
    needs |= {name: f"it needs {switch}" for switch, names in off.items() for name in names}
    return {name: need for name, need in needs.items() if name in given}


def notices(config: LanguageConfig) -> list[str]:
    """What may be meant otherwise, in words."""
    found = []
    if (times := updates(config)) > 1 and config.says("max_steps") and (steps := config.run.steps):
        found.append(
            f"max_steps={steps} counts samplings, each with {times} updates: {steps * times} in all, where TRL would "
            f"make {steps}; max_steps={-(-steps // times)} makes as many, or import from grpo.language.trl"
        )
    by_tokens = config.recipe.reduction in ("token_mean", "fixed_length")
    if "ratio" in config.changed and config.recipe.ratio == "sequence" and by_tokens:
        found.append(
            f"a ratio of whole sequences with loss_type={config.loss_type}, which adds up tokens, weighs each sequence "
            "by its length; GSPO's objective is loss_type=grpo with it, or the recipe gspo"
        )
    return found


def expect_choice(config: LanguageConfig, rewarded: bool) -> None:
    """Refuse to choose by rewards among tries that nobody rewards."""
    if not rewarded and config.select is not None and config.select_by in ("variance", "extremes"):
        raise ConfigError(
            f"select_by={config.select_by} compares rewards, and there is none; take select_by=length or random, or "
            "give reward_funcs, or set rewards to a built-in name or file.py:function"
        )


def check(config: LanguageConfig) -> None:
    """What the room alone knows."""
    if config.memory is not None:
        memory_limit(config.memory)
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError("warmup_steps and warmup_ratio say the same thing; give one of them")
    if config.quantize != "none" and not (config.lora_rank or config.adapter):
        raise ConfigError(f"quantize={config.quantize}: quantised weights cannot be trained; set lora_rank or adapter")
    if config.weights == "bfloat16" and (config.lora_rank or config.adapter):
        raise ConfigError(ONLY_WHOLE)
    if config.weights == "bfloat16" and config.ref_sync_steps is not None and config.ref_mixup_alpha < 1:
        raise ConfigError("ref_mixup_alpha below 1 is rounded away where weights=bfloat16; leave it out")
    if config.weights == "bfloat16" and config.dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"weights=bfloat16 are computed with in bfloat16; dtype={config.dtype} cannot go with them")
    if config.weights == "bfloat16" and 0 < config.teacher_decay < 1:
        raise ConfigError("teacher_decay between 0 and 1 is rounded away where weights=bfloat16; use 0 or 1")
    if config.lora_rank and config.adapter:
        raise ConfigError("adapter goes on with a trained adapter, lora_rank makes a new one; give one of them")
    shown = named_in(config.teacher_template) - {"prompt"}
    if config.recipe.teacher_coef and ("answer" not in shown if config.recipe.teacher_sees == "success" else not shown):
        raise ConfigError(
            "teacher_template has no {answer} or other column, so that the teacher would be told nothing; write one in"
        )
    if config.entropy_coef_min > config.entropy_coef_max:
        raise ConfigError("entropy_coef_min is above entropy_coef_max; exchange them")
    if config.tools and config.environment:
        raise ConfigError("give tools or an environment; an environment can offer its own tools")
    if config.speculate and (config.tools or config.environment):
        raise ConfigError("speculate is for one answer to a prompt; leave it out with tools or an environment")
    if config.speculate and config.repetition_penalty != 1.0:
        raise ConfigError("speculate cannot check drafts under a repetition_penalty; leave one of them out")
    known = config.servers or "base_url" in config.engine_kwargs
    if flaw := sampler_flaw(config.engine, config.servers, bool(known), bool(config.staleness), bool(config.speculate)):
        raise ConfigError(flaw)
    if config.recipe.kl_estimator == "exact":
        raise ConfigError("kl_estimator=exact needs whole distributions over the vocabulary; use k3")
