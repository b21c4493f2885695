"""All randomness of a run comes from (seed, step, stream): there is no generator whose state has to be saved.

This is the only place that derives a seed. Each stream keeps the way it was first given, so that an older run goes on
with the numbers it began with:

    seed_all           Python's, NumPy's and torch's own generators, before every step and every evaluation
    derive             what the world model draws: acting, imagining, learning, evaluating
    update_generator   the order of minibatches, and ties between decisions that a gate keeps
    start_seeds        starts of environments: odd where the policy is judged, even everywhere else
    mixed              completions and their turns, one seed each
    generator          arms, actions, the replay buffer's draws, the order of prompts, random features
    rounding_seed      stochastic rounding of bfloat16 weights

A worker (`grpo.workers`) seeds itself from the text that comes with each call.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, step: int, stream: str) -> int:
    """A 63-bit seed, the same on every machine; streams (`train`, `evaluate`, …) never share one."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(seed: int, step: int, stream: str = "train") -> None:
    """Seed Python, NumPy and, where it is used, torch (all devices).

    Every step begins so, hence nothing has to be restored after it.
    """
    derived = derive(seed, step, stream)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    if "torch" in sys.modules:  # else nobody draws with it
        sys.modules["torch"].manual_seed(derived)


def update_generator(seed: int, step: int, stream: int) -> torch.Generator:
    """What the trainer itself draws in a step: a pass has stream 0, 1, …, a minibatch −1, −2, …"""
    import torch

    drawn = 0
    for number in (seed, step, stream):
        drawn = (drawn * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % (2**63 - 1)
    return torch.Generator().manual_seed(drawn)


def start_seeds(key: Sequence[int], count: int, held_out: bool) -> list[int]:
    """Seeds for an environment. Held-out ones are odd and all others even, so that no start is in both."""
    drawn = np.random.SeedSequence(key).generate_state(count) >> 1
    return [int(number) for number in (drawn | 1 if held_out else drawn & ~np.uint32(1))]


def mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(*numbers: int) -> np.random.Generator:
    """NumPy's generator from several numbers: (seed, step, attempt), (seed, epoch), …"""
    return np.random.default_rng(numbers)


def rounding_seed(seed: int, step: int, parameter: int) -> int:
    """Of an optimizer's step, for the weights of one parameter that it rounds at random."""
    return (seed * 1_000_003 + step + parameter * 9_973_000_000_039) % 2**63
