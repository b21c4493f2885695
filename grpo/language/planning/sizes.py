"""Sizes of memory as people write them: 40GiB, 24 GB, or a share of the GPU's such as 0.5."""

from __future__ import annotations

import re

from grpo.config import ConfigError

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def memory_limit(word: str | float) -> float:
    """Bytes, or a share of the device's memory, which is at most 1."""
    text = str(word).strip()
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-zA-Z]*)", text)
    unit = "" if found is None else found[2].lower()
    if found is None or (unit and unit not in UNITS):
        raise ConfigError(f"memory={text}: give a size with its unit, such as 40GiB or 24GB, or a share such as 0.5")
    number = float(found[1])
    if not unit and not 0 < number <= 1:
        raise ConfigError(f"memory={text}: a number alone is a share of the GPU's memory, above 0 and at most 1; "
                          f"say {text}GiB if gigabytes are meant")  # fmt: skip
    if unit and number * UNITS[unit] <= 1:
        raise ConfigError(f"memory={text}: nothing fits into that; give a size such as 40GiB")
    return number * UNITS.get(unit, 1)


def limit_bytes(word: str | float, total: int) -> int:
    """The same in bytes, for a device of so much memory."""
    limit = memory_limit(word)
    return int(limit * total) if limit <= 1 else int(limit)
