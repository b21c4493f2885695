"""RLinf's words for robots: chunks, how episodes begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects import SYSTEMS
from grpo.dialects.spelling import Settings, Spelling, refuse, truth, whole
from grpo.errors import ConfigError


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


OF_TRAIN = (
    *("steps", "env_steps", "stop_at", "evaluate_every", "folder", "trackers", "callbacks", "progress", "overwrite"),
    *("total_timesteps", "verbose"),
)
"""What `train` is asked for, not the trainer's settings."""
THEIR_POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")
"""What Stable-Baselines3 wants named first."""


def expect_settings(env: Any, given: Mapping[str, Any]) -> None:
    """Refuse what belongs elsewhere, and say where; a preset's words are not read here."""
    if isinstance(env, str) and env in THEIR_POLICIES:
        raise ConfigError(
            f"{env}: no policy is named here; GRPOTrainer(env=…) makes a network that fits, actor= another"
        )
    for name in [name for name in OF_TRAIN if name in given]:
        raise ConfigError(f"{name} is for train(): GRPOTrainer(…).train({name}={given[name]!r})")


WORDS = {"rlinf": EMBODIED}
"""By system, beside those that every room understands."""

HERE = dict.fromkeys(SYSTEMS, (Spelling("envs", "num_envs", "the same, as the world-model room calls it"),))
"""Of this room alone, where `envs` is nobody else's word."""
