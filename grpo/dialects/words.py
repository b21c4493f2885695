"""Words about the algorithm: those with one meaning everywhere, then those that differ, by system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.rlinf import RLINF
from grpo.dialects.spelling import Settings, Soft, Spelling, choice, kl_estimator, refuse, switched

OWN = "own"
"""Our own names, where every other word has been translated already: what a run folder keeps."""

_reduction = choice(
    {
        "token-mean": {"reduction": "token_mean"},
        "seq-mean-token-sum": {"reduction": "sequence_sum"},
        "seq-mean-token-mean": {"reduction": "sequence_mean"},
        "seq-mean-token-sum-norm": {"reduction": "fixed_length"},
    }
)
_scale = choice(
    {
        "group": {"scale": "group_std"},
        "true": {"scale": "group_std"},
        "batch": {"scale": "batch_std"},
        "none": {"scale": "none"},
        "false": {"scale": "none"},
    }
)
_level = choice(
    {"token": {"ratio": "token"}, "sequence": {"ratio": "sequence"}, "sequence_token": {"ratio": "sequence_token"}}
)

_annealed = choice({"true": {"lr_schedule": "linear"}, "false": {"lr_schedule": "constant"}})


def _recipe(value: Any) -> Settings:
    """A row of the table by its name; columns of it are a block of ours."""
    return {"loss_type": value} if isinstance(value, str) else {"recipe": value}


def reference(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """sync_ref_model is a switch: off, the keys beside it mean nothing; on, it adds nothing to them."""
    switch = words.get("sync_ref_model")
    if switch is not None and not switched(words, "sync_ref_model"):
        return {"sync_ref_model": {"ref_sync_steps": None, "ref_mixup_alpha": 1.0}}
    if switch is not None and "ref_model_sync_steps" not in words:
        raise ValueError("sync_ref_model=true needs ref_model_sync_steps: every how many steps")
    names = {"ref_model_sync_steps": "ref_sync_steps", "ref_model_mixup_alpha": "ref_mixup_alpha"}
    return {key: {names[key]: value} for key, value in words.items() if key in names}


COMMON = (
    Spelling("recipe", "loss_type", "the same", _recipe),
    Spelling("generate", "group_size", "the same, beside select"),
    Spelling("num_generations", "group_size", "TRL 8, EasyDeL 4"),
    Spelling("num_return_sequences", "group_size", "EasyDeL 4"),
    Spelling("clip_epsilon", "epsilon", "0.2"),
    Spelling("clip_ratio", "epsilon", "0.2"),
    Spelling("ratio_clip_eps", "epsilon", "0.2"),
    Spelling("kl_coeff", "beta", "0.04"),
    Spelling("kl_beta", "beta", "RLinf 0"),
    Spelling("kl_penalty_type", "kl_estimator", "low_var_kl", kl_estimator),
    Spelling("entropy_coeff", "entropy_coef", "0"),
    Spelling("entropy_bonus", "entropy_coef", "0"),
    Spelling("num_epochs_per_update", "num_iterations", "1"),
    Spelling("update_epoch", "num_iterations", "1"),
    Spelling("epochs", "num_iterations", "tutorial 10"),
    Spelling("scale_rewards", "scale", "TRL group; grpo.GRPOConfig none", _scale),
    Spelling("loss_agg_func", "reduction", "token-mean", _reduction),
    Spelling("loss_agg_mode", "reduction", "token-mean", _reduction),
    Spelling("importance_sampling_level", "ratio", "token", _level),
    Spelling("early_stop_imp_ratio", "max_ratio", "5; ours: off unless set"),
    Spelling("top_entropy_quantile", "top_entropy", "1"),
    Spelling("off_policy_mask_threshold", "off_policy_threshold", "off"),
    Spelling("mask_truncated_completions", "mask_truncated", "false"),
    Spelling("use_bias_correction_kl", "kl_importance", "TRL true; ours false, as in the GRPO paper"),
    Spelling("sapo_temperature_pos", "tau_pos", "1.0"),
    Spelling("sapo_temperature_neg", "tau_neg", "1.05"),
    Spelling("clip_ratio_low", "epsilon", "0.2"),
    Spelling("clip_ratio_high", "epsilon_high", "0.2"),
    Spelling("clip_ratio_c", "dual_clip", "verl 3; ours: off unless set"),
    Spelling("ref_model_sync_steps", "ref_sync_steps", "TRL 512, EasyDeL 64", together=reference),
    Spelling("ref_model_mixup_alpha", "ref_mixup_alpha", "TRL 0.6, EasyDeL 0.9", together=reference),
    Spelling("lr", "learning_rate", "of optimizers everywhere; Stable-Baselines3 says learning_rate"),
    Spelling("anneal_lr", "lr_schedule", "CleanRL true; ours constant", _annealed),
    Spelling("n_envs", "num_envs", "Stable-Baselines3 1"),
    Spelling("n_epochs", "num_iterations", "Stable-Baselines3 10"),
    Spelling("clip_range", "epsilon", "Stable-Baselines3 0.2"),
    Spelling("ent_coef", "entropy_coef", "Stable-Baselines3 0"),
    refuse("vf_coef", "there is no critic to weigh; advantage=critic has one, with an optimizer of its own"),
    refuse("n_steps", "whole episodes are played, group_size from each start; group_by=steps has windows of steps"),
    refuse("policy_kwargs", "say hidden=[64,64] and activation=tanh here (net_arch and activation_fn there)"),
    Spelling("starts", "groups_per_step", "8; control 2"),
    Spelling("total_batch_size", "groups_per_step", "EasyDeL 32 prompts"),
    Spelling(
        "sync_ref_model",
        "ref_sync_steps",
        "false: the other two ref_model keys are then not read",
        together=reference,
    ),
)
"""Words with one meaning."""


def _whitening(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """advantage_epsilon is what normalize_advantages adds to the deviation that it divides by."""
    if "normalize_advantages" not in words:
        raise ValueError("advantage_epsilon is read with normalize_advantages=True, which is off here; add it")
    if not switched(words, "normalize_advantages"):
        return {"normalize_advantages": {"whiten": "none"}}
    epsilon = words.get("advantage_epsilon", 1e-8)
    found: dict[str, Settings] = {
        "normalize_advantages": {"whiten": "rows", "whiten_ddof": Soft(0.0), "whiten_root": Soft(False)}
    }
    if "advantage_epsilon" not in words:
        found["normalize_advantages"]["whiten_eps"] = Soft(epsilon)
    return found | ({"advantage_epsilon": {"whiten_eps": epsilon}} if "advantage_epsilon" in words else {})


SYSTEMS: dict[str, tuple[Spelling, ...]] = {
    "grpo": (
        Spelling("batch_size", "groups_per_minibatch", "1024 states an optimizer step; ours: all that were given"),
        Spelling(
            "normalize_advantages",
            "whiten",
            "true (batch std); ours false: A = r − mean, as its own document says",
            together=_whitening,
        ),
        Spelling("advantage_epsilon", "whiten_eps", "1e-8; read with normalize_advantages", together=_whitening),
        Spelling("reference_update_freq", "ref_sync_steps", "1: the reference is overwritten every step; ours: never"),
    ),
    "rlinf": RLINF,
    "tutorial": (Spelling("batch_size", "decisions_per_minibatch", "32 decisions"),),
    OWN: (),
}
"""Words that mean something else elsewhere, by system: those that every room understands."""
