"""How much memory the process holds, for timing.jsonl: it depends on the machine, so it is no metric."""

from __future__ import annotations

import resource
import sys

_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in which `ru_maxrss` is counted."""


def memory() -> dict[str, float]:
    """The most so far, in GiB: resident on the host, and allocated on the GPU where one is used."""
    found = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT / 2**30}
    torch = sys.modules.get("torch")  # who has not imported it has allocated nothing
    if torch is not None and torch.cuda.is_available():
        found["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found
