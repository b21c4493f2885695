"""DreamerV3's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.spelling import Settings, Spelling, choice

_script = choice({"train_grpo": {}, "train": {}})
_platforms = {"metal": "mps", "mps": "mps", "cuda": "cuda", "gpu": "cuda", "cpu": "cpu", "auto": "auto"}


def _jax(block: Any) -> Settings:
    """`jax: {platform: …}`: where to compute. Nothing of JAX is needed for it."""
    if not isinstance(block, Mapping) or set(block) != {"platform"}:
        raise ValueError(f"of this block only platform is known, got {block!r}")
    return choice({name: {"device": ours} for name, ours in _platforms.items()})(block["platform"])


DREAMER = (
    Spelling("script", "", "train; here a command: grpo train. train_grpo and train are accepted", _script),
    Spelling("jax", "device", "platform cuda: cuda, metal (mps here) or cpu, of torch; jax-metal is not needed", _jax),
    Spelling("imag_length", "horizon", "15; ours 32"),
    Spelling("replay_size", "replay_capacity", "5e6; ours 200,000 steps"),
    Spelling("actent", "entropy_coef", "3e-4"),
)
"""Of its command line and its configurations."""

IN_RUN_BLOCK = ("train_ratio", "envs")
"""Words that it writes into its run block; here they are settings of the task."""

WORDS = {"dreamer": DREAMER}
"""By system, beside those that every room understands."""
