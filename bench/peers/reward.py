"""A reward that costs nothing and differs from row to row, for steps that are only timed."""

from __future__ import annotations

import zlib
from typing import Any


def variety(completions: list[str], **_: Any) -> list[float]:
    """A number that any other text changes: groups whose rewards are equal would go forward only, and be cheaper."""
    return [float(zlib.crc32(text.encode()) % 1000) for text in completions]
