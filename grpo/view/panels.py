"""Which curves a run's page shows first, and which belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

HEADLINE = (
    "reward", "return", "success", "eval/accuracy", "eval/return", "regret_total", "best_arm_probability",
    "completions/mean_length", "episode_length", "frac_reward_zero_std", "kl", "teacher_kl", "entropy",
)  # fmt: skip
"""What a run is about, before what all share."""
PANELS: tuple[tuple[str, str], ...] = (
    ("Reward", r"reward|reward_std|rewards/.*|return|return_std|success|regret|regret_total|avg_reward"),
    ("Evaluation", r"eval/.*|before/.*|warm_start/.*"),
    ("Signal", r"frac_reward_zero_std|attempts|failed|truncated|completions/clipped_ratio|best_arm_probability"),
    ("Policy", r"kl|kl_divergence|teacher_kl|approx_kl|ratio|entropy"),
    ("Clipping", r"clip_ratio/.*"),
    ("Staleness", r"staleness(/max)?|mismatch_kl"),
    ("Lengths", r"length|completions/.*length|episode_length"),
    ("Arms", r"arm_probability/.*"),
    ("World model", r"world/.*|model/.*|imagined/.*|critic/.*|replay_.*"),
    ("Optimiser", r"loss|policy_loss|grad_norm|learning_rate|updates|updates_skipped"),
    ("Progress", r"num_tokens|epoch|env_steps|episodes|samples"),
)
"""Curves that belong together, by name; what fits nowhere comes last."""


def headline(names: Iterable[str]) -> list[str]:
    """Up to eight of a run's metrics."""
    there = {*names}
    return [name for name in HEADLINE if name in there][:8]


def panels(names: Iterable[str]) -> list[list[Any]]:
    """Title and metrics of each panel, in order."""
    left = list(names)
    made: list[list[Any]] = []
    for title, pattern in PANELS:
        mine = [name for name in left if re.fullmatch(pattern, name)]
        left = [name for name in left if name not in mine]
        made += [[title, mine]] if mine else []
    return made + ([["Other", left]] if left else [])
