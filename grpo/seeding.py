"""All randomness of a run comes from (seed, step, stream): there is no generator whose state has to be saved."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive(seed: int, step: int, stream: str) -> int:
    """A 63-bit seed, the same on every machine; streams (`train`, `evaluate`, …) never share one."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(seed: int, step: int, stream: str = "train") -> None:
    """Seed Python, NumPy and torch (all devices). Every step begins so, hence nothing has to be restored after it."""
    derived = derive(seed, step, stream)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)
