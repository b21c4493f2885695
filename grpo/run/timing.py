"""Where the time of a run went, from the rows of timing.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grpo.run.files import Row

LEAST = 0.01
"""Share from which on something is named."""
OWN = {
    "warm_start": "warm start",
    "reference": "reference",
    "teacher": "teacher",
    "update": "update",
    "compiled": "compiled step",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
}
"""Phases that stand for themselves, and what people call them."""
WITHIN = {"rewards_wait": "reward", "play": "play", "world_model": "world model"}
"""Parts of `collect` that are something else to a person."""


def time_split(rows: Iterable[Row]) -> dict[str, float]:
    """Shares of the whole, which sum to 1; empty where nothing was measured.

    Language models: `rollout` is all of a step's `collect` but the wait for rewards, which is `reward`. World models:
    `play`, the updates of the `world model`, and what is left of it, `imagine`. Other rooms: `collect`. `other` is what
    no phase covers.
    """
    seconds: dict[str, float] = {}

    def spend(name: str, amount: float) -> None:
        seconds[name] = seconds.get(name, 0.0) + amount

    for row in rows:
        tries = "rollout" if "generate" in row else "imagine" if "world_model" in row else "collect"
        spend(tries, row.get("collect", 0.0) - sum(row.get(part, 0.0) for part in WITHIN))
        for part, name in WITHIN.items():
            spend(name, row.get(part, 0.0))
        for phase, name in OWN.items():
            spend(name, row.get(phase, 0.0))
        inside = ("collect", *(phase for phase in OWN if phase != "checkpoint"))  # that is taken between steps
        spend("other", max(row["total"] - sum(row.get(phase, 0.0) for phase in inside), 0.0))
    whole = sum(seconds.values())
    return {name: amount / whole for name, amount in seconds.items() if amount > 0.0}


def in_words(shares: Mapping[str, float]) -> str:
    """rollout 38 %, reward 2 %, update 60 %"""
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= LEAST)
