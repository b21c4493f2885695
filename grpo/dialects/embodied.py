"""RLinf's words for robots: chunks, levels, which groups are kept, how episodes begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.spelling import Settings, Spelling, refuse, truth, whole


def discount(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """They stand in every block of that system, and its GRPO reads neither: it judges whole episodes."""
    read = {"gamma"} if ours.get("credit") != "trajectory" else set()
    read |= {"gae_lambda"} if ours.get("advantage") == "critic" else set()
    return {key: {key: value} if key in read else {} for key, value in words.items()}


def bounds(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """filter_rewards is a switch: off, the bounds beside it mean nothing."""
    if not truth(words.get("filter_rewards", False)):
        return {"filter_rewards": {"filter_rewards": False}} if "filter_rewards" in words else {}
    return {key: {key: True if key == "filter_rewards" else value} for key, value in words.items()}


def starts(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """num_group_envs groups play at a time, rollout_epoch times over: their product learns in one step."""
    times = whole(words.get("rollout_epoch", 1))
    if "num_group_envs" not in words:
        if times != 1:
            raise ValueError("rollout_epoch needs num_group_envs: a step has the product of both; or groups_per_step")
        return {}
    return {"num_group_envs": {"groups_per_step": whole(words["num_group_envs"]) * times}}


_CRITIC = "its GRPO has no critic; here advantage=critic has settings of its own"

EMBODIED = (
    Spelling("num_action_chunks", "action_chunk", "8; ours 1", lambda value: {"action_chunk": whole(value)}),
    Spelling("gamma", "gamma", "0.99; not read where adv_type=grpo", together=discount),
    Spelling("gae_lambda", "gae_lambda", "0.95; not read where adv_type=grpo", together=discount),
    Spelling("filter_rewards", "filter_rewards", "false", together=bounds),
    Spelling("rewards_lower_bound", "rewards_lower_bound", "0.1; read with filter_rewards", together=bounds),
    Spelling("rewards_upper_bound", "rewards_upper_bound", "0.9; read with filter_rewards", together=bounds),
    Spelling("num_group_envs", "groups_per_step", "8, times rollout_epoch", together=starts),
    Spelling("rollout_epoch", "groups_per_step", "1, times num_group_envs", together=starts),
    Spelling("reward_coef", "reward_scale", "5"),
    Spelling(
        "ignore_terminations",
        "end_on_success",
        "false: an episode is over with its first success",
        lambda value: {"end_on_success": not truth(value)},
    ),
    refuse("auto_reset", "nothing resets by itself, so that a group never mixes initial states"),
    refuse("use_fixed_reset_state_ids", "a group always begins from one state", True),
    refuse("use_ordered_reset_state_ids", "starts come from the seed", True, False),
    refuse("value_clip", _CRITIC, 0.2),
    refuse("huber_delta", _CRITIC, 10.0, 10),
)
"""Of the `algorithm:` block of its embodied configurations; those with one meaning everywhere are elsewhere."""
