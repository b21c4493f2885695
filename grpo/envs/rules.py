"""How episodes are played: a record of its own, because settings know it that must not load an environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EpisodeRules:
    """How an episode is played, whoever plays it."""

    action_repeat: int = 1
    """Environment steps that one action lasts."""
    end_on_success: bool = False
    """Whether its first success ends it."""
