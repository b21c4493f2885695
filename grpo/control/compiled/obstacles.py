"""What keeps a run from being compiled, in words: the ordinary way does everything, the program some of it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from grpo.control.config import ControlConfig
from grpo.control.networks import Network
from grpo.control.policy import ActorPolicy
from grpo.envs.functions.task import no_jax
from grpo.envs.heads import Categorical, Gaussian
from grpo.envs.spaces import layout


def obstacle(config: ControlConfig, policy: ActorPolicy, space: gym.Space[Any], own: dict[str, Any]) -> str | None:
    """Why not; None: nothing is in the way. `own`: what was passed ready-made, by name."""
    if (why := no_jax()) is not None:
        return why
    given = next((name for name, value in own.items() if value is not None), None)
    if given is not None:
        return f"{given} is of your own"
    if not isinstance(policy.network, Network) or layout(space).pictures or not isinstance(space, gym.spaces.Box):
        return f"its policies read one vector without memory, not {space}" if not config.memory else "memory"
    if type(policy.head) not in (Categorical, Gaussian):
        return f"there is no {type(policy.head).__name__} head"
    return _setting(config) or _algorithm(config)


def _setting(config: ControlConfig) -> str | None:
    """A setting of the room's that only the ordinary way has."""
    held = {
        "group_by": config.group_by not in ("start", "batch"),
        "advantage": config.judged_by in ("auto", "fitted", "critic"),
        "action_chunk": config.action_chunk > 1,
        "logprob_type": config.logprob_type == "token_level",
        "entropy_type": config.entropy_type == "token_level",
        "end_on_success": config.end_on_success,
        "warm_start": config.warm_start is not None,
        "filter_rewards": config.filter_rewards,
        "no_signal": config.no_signal == "resample",
        "select": config.select is not None,
        "rows_per_minibatch": config.rows_per_minibatch is not None,
        "groups_per_minibatch": config.groups_per_minibatch is not None,
        "minibatches": config.minibatches is not None,
        "old_logp": config.old_logp == "recomputed",
        "staleness": bool(config.staleness),
        "env_kwargs": bool(config.env_kwargs),
        "workers": config.workers is not None,
    }
    name = next((name for name, stands in held.items() if stands), None)
    return None if name is None else f"{name}={dict(config)[name]}"


def _algorithm(config: ControlConfig) -> str | None:
    """A column of the recipe that only the ordinary way has."""
    recipe = config.recipe
    held = {
        "beta": bool(recipe.beta),
        "teacher_coef": bool(recipe.teacher_coef),
        "top_entropy": recipe.top_entropy < 1.0,
        "clip_cov": bool(recipe.clip_cov),
        "kl_cov": bool(recipe.kl_cov),
        "m2_limit": recipe.m2_limit is not None,
    }
    name = next((name for name, stands in held.items() if stands), None)
    return None if name is None else f"{name}={recipe.columns()[name]}"
