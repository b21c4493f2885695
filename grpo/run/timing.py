"""Where the time of a run went, from the rows of timing.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grpo.run.files import Row

LEAST = 0.01
"""Share from which on something is named."""
OWN = {"reference": "reference", "update": "update", "evaluate": "evaluation", "checkpoint": "checkpoint"}
"""Phases that stand for themselves, and what people call them."""


def time_split(rows: Iterable[Row]) -> dict[str, float]:
    """Shares of the whole, which sum to 1; empty where nothing was measured.

    Language models: `rollout` is all of a step's `collect` but the wait for rewards, which is `reward`. Rooms without a
    `generate` of their own: `collect`. `other` is what no phase covers.
    """
    seconds: dict[str, float] = {}

    def spend(name: str, amount: float) -> None:
        seconds[name] = seconds.get(name, 0.0) + amount

    for row in rows:
        wait = row.get("rewards_wait", 0.0)
        spend("rollout" if "generate" in row else "collect", row.get("collect", 0.0) - wait)
        spend("reward", wait)
        for phase, name in OWN.items():
            spend(name, row.get(phase, 0.0))
        inside = ("collect", "reference", "update", "evaluate")  # a checkpoint is taken between steps
        spend("other", max(row["total"] - sum(row.get(phase, 0.0) for phase in inside), 0.0))
    whole = sum(seconds.values())
    return {name: amount / whole for name, amount in seconds.items() if amount > 0.0}


def in_words(shares: Mapping[str, float]) -> str:
    """rollout 38 %, reward 2 %, update 60 %"""
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= LEAST)
