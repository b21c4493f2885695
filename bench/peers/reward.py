"""A reward that costs nothing and differs from row to row, for steps that are only timed."""

from __future__ import annotations

from typing import Any


def variety(completions: list[str], **_: Any) -> list[float]:
    """Different characters in each completion."""
    return [float(len(set(text))) for text in completions]
