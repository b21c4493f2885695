"""DreamerV3's words: settings, and the names of its tasks."""

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


_TWO_WORDS = ("ball_in_cup", "point_mass", "humanoid_CMU")
"""Domains of the DeepMind Control Suite whose names have an underscore."""

_OWN = "it registers nothing with Gymnasium: write a class or a function that makes it, and --env your_file.py:NAME"
NOT_HERE = {
    "bsuite": _OWN,
    "crafter": f"{_OWN} (crafter.Env with Gymnasium's spaces, and its five results of a step)",
    "dmlab": _OWN,
    "loconav": _OWN,
    "memmaze": _OWN,
    "minecraft": _OWN,
    "multicpu": "it divides work over JAX devices; here one process does it: leave it out",
    "nethack": "write --env nle:NetHackChallenge-v0, with nle installed",
    "pinpad": _OWN,
    "procgen": _OWN,
}
"""Suites and configurations of its that are no preset, each with what to do."""


def environment(task: str) -> str | None:
    """The id of what it calls `suite_name` (dmc_walker_walk, atari_pong, gym_CartPole-v1); None: no suite of its."""
    suite, _, name = task.partition("_")
    if suite in NOT_HERE:
        raise ValueError(f"{task}: {NOT_HERE[suite]}")
    if suite == "dmc" and name:
        domain = next((two for two in _TWO_WORDS if name.startswith(two)), name.partition("_")[0])
        return f"dm_control/{'ball_in_cup' if domain == 'cup' else domain}-{name[len(domain) + 1 :]}-v0"
    if suite in ("atari", "atari100k") and name:
        return f"ALE/{''.join(word.capitalize() for word in name.split('_'))}-v5"
    return name if suite == "gym" and name else None


DREAMER = (
    Spelling("script", "", "train; here a command: grpo train. train_grpo and train are accepted", _script),
    Spelling("jax", "device", "platform cuda: cuda, metal (mps here) or cpu, of torch; jax-metal is not needed", _jax),
    Spelling("imag_length", "horizon", "15; ours 32"),
    Spelling("replay_size", "replay_capacity", "5e6; ours 200,000 steps"),
    Spelling("reward_fn", "reward", "rewards are in the batch there; here a function may give them"),
    Spelling("actent", "entropy_coef", "3e-4"),
    Spelling(
        "pictures", "pixels", "a task's name says it there (dmc_vision); here any environment may be seen as drawn"
    ),
)
"""Of its command line and its configurations."""

IN_RUN_BLOCK = ("train_ratio", "envs")
"""Words that it writes into its run block; here they are settings of the task."""

WORDS = {"dreamer": DREAMER}
"""By system, beside those that every room understands."""
