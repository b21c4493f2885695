"""RLinf's words for robots: chunks, how episodes begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects import SYSTEMS
from grpo.dialects.spelling import Settings, Spelling, refuse, truth, whole


def _lambda(words: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Settings]:
    """It stands in every block of that system; without a critic nothing reads it."""
    return {key: {key: value} if ours.get("advantage") == "critic" else {} for key, value in words.items()}


EMBODIED = (
    Spelling("num_action_chunks", "action_chunk", "8; ours 1", lambda value: {"action_chunk": whole(value)}),
    Spelling("gae_lambda", "gae_lambda", "0.95; not read where adv_type=grpo", together=_lambda),
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
)
"""Of the `algorithm:` block of its embodied configurations; those with one meaning everywhere are elsewhere."""


WORDS = {"rlinf": EMBODIED}
"""By system, beside those that every room understands."""

HERE = dict.fromkeys(SYSTEMS, (Spelling("envs", "num_envs", "the same, as the world-model room calls it"),))
"""Of this room alone, where `envs` is nobody else's word."""
