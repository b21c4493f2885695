"""The learning rate over a run, by transformers' schedules or one of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.optimizers import SGD

NOT_BY_STEP = dict.fromkeys(
    ("reduce_lr_on_plateau", "greedy"), "follows what was measured, and a rate here follows from the step's number"
)
"""Schedules of transformers' that a run could not resume."""


def rate_of(config: LanguageConfig, given: Any) -> Callable[[int, int | None], float]:
    """The factor on the learning rate at a step, given how many there will be."""
    if given is not None:
        lambdas = getattr(given, "lr_lambdas", None)
        if not lambdas:
            raise ConfigError("a scheduler must be a LambdaLR (transformers.get_scheduler), so that a run can resume")
        return lambda step, total: float(lambdas[0](step))
    if config.lr_schedule == "constant" and not config.warmup_steps and not config.warmup_ratio:
        return lambda step, total: 1.0
    if config.lr_schedule in NOT_BY_STEP:
        raise ConfigError(f"lr_schedule={config.lr_schedule} {NOT_BY_STEP[config.lr_schedule]}; use linear, cosine, …")
    from transformers import get_scheduler

    name = {"constant": "constant_with_warmup"}.get(config.lr_schedule, config.lr_schedule)
    dummy = SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)  # min_lr and lr_end are compared with it

    def factor(step: int, total: int | None) -> float:
        needs = name != "constant_with_warmup"
        if total is None and (needs or config.warmup_ratio):
            raise ConfigError(f"lr_schedule={config.lr_schedule} needs to know the length of the run; call train()")
        warmup = config.warmup_steps or round(config.warmup_ratio * (total or 0))
        made = get_scheduler(name, dummy, warmup, total, dict(config.lr_schedule_kwargs))
        return float(made.lr_lambdas[0](step))

    try:
        factor(0, 10)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"lr_schedule={config.lr_schedule}: {error}") from None
    return factor
