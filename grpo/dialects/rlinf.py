"""RLinf's words: the `algorithm:` block of its configurations, as far as every room understands it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.spelling import (
    Settings,
    Soft,
    Spelling,
    absent,
    always,
    choice,
    given,
    kl_estimator,
    number,
    refuse,
    switched,
    truth,
    whole,
)

_CRITIC = "its GRPO has no critic; a room with one has settings of its own"
_ACTOR_CRITIC = "that trains a critic too; in control advantage=critic does, with loss_type: actor"
_TURNS = "a conversation is judged as a whole, also by grpo_dynamic; give advantage_mode: trajectory"
_TAUGHT = "that is a recipe here: --recipe opd with a teacher (--teacher PATH for language models, teacher= in Python)"
_MEMORY = "memory alone: passes are cut by tokens_per_microbatch or rows_per_microbatch, with the same gradient"
_ASYNCHRONOUS = "every try is sampled by the policy that learns from it"

_GRPO: Settings = {
    "credit": "trajectory",
    "baseline": "group_mean",
    "scale": "group_std",
    "scale_eps": Soft(1e-6),
}
_ADVANTAGES = choice(
    dict.fromkeys(("grpo", "math_grpo", "embodied_grpo", "grpo_dynamic"), _GRPO)
    | {"raw": {"baseline": "none", "scale": "none"}},
    {
        "gae": _ACTOR_CRITIC,
        "embodied_gae": _ACTOR_CRITIC,
        "reinpp": "that is a recipe here: loss_type: reinforce++, or reinforce++_baseline, and no adv_type",
        "opd": _TAUGHT,
    },
)
_LOSSES = choice(
    {name: {"surrogate": "clip"} for name in ("actor", "ppo", "math_ppo_actor", "embodied_grpo")},
    {
        "actor_critic": _ACTOR_CRITIC,
        "decoupled_actor_critic": _ACTOR_CRITIC,
        "embodied_ppo": _ACTOR_CRITIC,
        "embodied_sac": "soft actor-critic is another algorithm",
        "opd": _TAUGHT,
    },
    otherwise=lambda value: {"loss_type": value},
)


def _entropy(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """calculate_entropy has the entropy reported, and the bonus is read with it alone."""
    bonus = number(words.get("entropy_bonus", 0.0), "entropy_bonus")
    if "calculate_entropy" not in words:
        return {"entropy_bonus": {"entropy_coef": bonus}}
    on = switched(words, "calculate_entropy")
    if bonus and not on:
        raise ValueError(
            f"entropy_bonus={bonus:g} is not read there where calculate_entropy is false, and nothing is silently "
            "dropped here; delete entropy_bonus for no bonus, or calculate_entropy for the bonus"
        )
    found: dict[str, Settings] = {"calculate_entropy": {"report_entropy": on} | ({} if on else {"entropy_coef": 0.0})}
    return found | ({"entropy_bonus": {"entropy_coef": bonus}} if "entropy_bonus" in words else {})


def _clipping(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """ratio_clip_eps on both sides, unless clip_ratio_low or clip_ratio_high says otherwise for its own."""
    said = {key: value for key, value in words.items() if not absent(value)}
    found: dict[str, Settings] = {}
    both, low, high = (said.get(key) for key in ("ratio_clip_eps", "clip_ratio_low", "clip_ratio_high"))
    if low is not None:
        found["clip_ratio_low"] = {"epsilon": low}
    if both is not None:
        found["ratio_clip_eps"] = {"epsilon": both} if low is None else {}
    if high is not None:
        found["clip_ratio_high"] = {"epsilon_high": high}
    elif both is not None and low not in (None, both):
        found["ratio_clip_eps"] = {"epsilon_high": both}
    return found


def _discount(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """It stands in every block of that system, and its GRPO does not read it: it judges whole episodes."""
    return {key: {key: value} if ours.get("credit") != "trajectory" else {} for key, value in words.items()}


def _starts(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """num_group_envs groups play at a time, rollout_epoch times over: their product learns in one step."""
    times = whole(words.get("rollout_epoch", 1))
    if "num_group_envs" not in words:
        if times != 1:
            raise ValueError("rollout_epoch needs num_group_envs: a step has the product of both; or groups_per_step")
        return {}
    return {"num_group_envs": {"groups_per_step": whole(words["num_group_envs"]) * times}}


def _bounds(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """filter_rewards is a switch: off, the bounds beside it mean nothing."""
    if "filter_rewards" not in words and ours.get("filter_rewards"):
        return {key: {key: value} for key, value in words.items()}
    if not switched(words, "filter_rewards"):
        none = {"rewards_lower_bound": None, "rewards_upper_bound": None}
        return {"filter_rewards": {"filter_rewards": False, **none}} if "filter_rewards" in words else {}
    return {key: {key: True if key == "filter_rewards" else value} for key, value in words.items()}


def _engine_mismatch(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """importance_sampling_fix weighs a token by how trainer and engine differ, at most importance_sampling_clip."""
    if not switched(words, "importance_sampling_fix"):
        return {"importance_sampling_fix": {"mismatch": "none"}} if "importance_sampling_fix" in words else {}
    if absent(most := words.get("importance_sampling_clip")):
        raise ValueError("importance_sampling_fix needs importance_sampling_clip: the largest weight")
    columns = {"mismatch": "truncate", "mismatch_level": Soft("token")}
    return {"importance_sampling_fix": columns, "importance_sampling_clip": {"mismatch_high": Soft(most)}}


def _whitened(value: Any) -> Settings:
    if not truth(value):
        return {"whiten": "none"}
    return {"whiten": "decisions", "whiten_ddof": Soft(0.0), "whiten_eps": Soft(1e-5), "whiten_root": Soft(False)}


def _down_sampling(value: Any) -> Settings:
    if isinstance(value, Mapping) and truth(value.get("do_down_sampling", False)):
        raise ValueError("not done here: every try of a group teaches; no_signal=drop leaves equal groups out")
    return {}


RLINF = (
    # advantages
    Spelling("adv_type", "credit, baseline, scale, scale_eps", "grpo: (r − mean) / (std + 1e-6) of whole rows; raw: r",
             _ADVANTAGES),
    refuse("advantage_mode", _TURNS, "trajectory"),
    Spelling("normalize_advantages", "whiten, whiten_ddof, whiten_eps, whiten_root",
             "true: a second normalisation over all decisions", _whitened),
    Spelling("gamma", "gamma", "0.99; not read where adv_type=grpo", together=_discount),
    Spelling("gae_lambda", "", "0.95; its GRPO judges whole episodes and does not read it", lambda value: {}),
    # the loss
    Spelling("loss_type", "surrogate", "actor: the clipped surrogate; any other word names a recipe", _LOSSES),
    Spelling("use_valid_token_scale", "reduction",
             "false; true: token mean over the global batch, which ours always is",
             lambda value: {"reduction": "token_mean"} if truth(value) else {}),
    Spelling("ratio_clip_eps", "epsilon, epsilon_high", "0.2; on a side that clip_ratio_low or _high does not set",
             together=_clipping),
    Spelling("clip_ratio_low", "epsilon", "none: ratio_clip_eps", together=_clipping),
    Spelling("clip_ratio_high", "epsilon_high", "none: ratio_clip_eps", together=_clipping),
    Spelling("clip_ratio_c", "dual_clip", "3 for robots, none for mathematics; ours: off unless set"),
    Spelling("clip_log_ratio_min", "log_ratio_low", "none: not limited; ours -20", given("log_ratio_low")),
    Spelling("clip_log_ratio_max", "log_ratio_high", "none: not limited; ours 20", given("log_ratio_high")),
    Spelling("kl_penalty", "kl_estimator", "kl", kl_estimator),
    Spelling("calculate_entropy", "report_entropy, entropy_coef",
             "false: neither reported nor added, whatever entropy_bonus says; ours then refuses a bonus",
             together=_entropy),
    Spelling("entropy_bonus", "entropy_coef", "0; read where calculate_entropy is on, or not said", together=_entropy),
    Spelling("importance_sampling_fix", "mismatch, mismatch_level", "false", together=_engine_mismatch),
    Spelling("importance_sampling_clip", "mismatch_high", "read with importance_sampling_fix",
             together=_engine_mismatch),
    # batches
    Spelling("n_minibatches", "minibatches", "1", lambda value: {"minibatches": whole(value)}),
    Spelling("recompute_logprobs", "old_logp", "true, since another engine samples; ours: as recorded where ours does",
             lambda value: {"old_logp": "recomputed"} if truth(value) else {}),
    always("shuffle_rollout", "true; minibatches are drawn in an order made from (seed, step, pass)"),
    *(Spelling(key, "", _MEMORY, lambda value: {}) for key in (
        "training_batch_size_per_gpu", "rollout_batch_size_per_gpu", "logprob_forward_micro_batch_size",
        "val_rollout_batch_size_per_gpu",
    )),
    Spelling("num_group_envs", "groups_per_step", "8, times rollout_epoch", together=_starts),
    Spelling("rollout_epoch", "groups_per_step", "1, times num_group_envs", together=_starts),
    Spelling("filter_rewards", "filter_rewards", "false; there a group is left out, here it is sampled again first",
             together=_bounds),
    Spelling("rewards_lower_bound", "rewards_lower_bound", "0.1; read with filter_rewards", together=_bounds),
    Spelling("rewards_upper_bound", "rewards_upper_bound", "0.9; read with filter_rewards", together=_bounds),
    refuse("max_num_gen_batches", "no_signal=resample with max_attempts samples groups without signal again", 1),
    Spelling("down_sampling", "", "off; every try of a group teaches here", _down_sampling, refused=True),
    refuse("loss_scales", "loss_agg_func says how tokens are averaged", []),
    refuse("adv_clip_max", "advantages are not limited; reward_clip limits rewards"),
    # critics and other algorithms
    refuse("value_clip", _CRITIC, 0.2),
    refuse("value_cliprange", _CRITIC),
    refuse("huber_delta", _CRITIC, 10.0, 10),
    refuse("critic_warmup_steps", _CRITIC, 0),
    refuse("use_critic", _CRITIC),
    refuse("use_value_loss", _CRITIC),
    refuse("bootstrap_type", _CRITIC, "always", "standard"),
    refuse("use_reinpp_baseline", "say loss_type: reinforce++_baseline"),
    refuse("reinpp_kl_beta", "say loss_type: reinforce++ with kl_beta", 0, 0.0),
    refuse("staleness_threshold", _ASYNCHRONOUS),
    refuse("behave_weight_threshold", _ASYNCHRONOUS),
)  # fmt: skip
"""Keys of its `algorithm:` block; those of one room alone are in that room's module `dialect`."""
