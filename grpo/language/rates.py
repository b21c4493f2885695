"""The learning rate over a run, by transformers' schedules or one of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.optimizers import SGD


def rate_of(config: LanguageConfig, given: Any) -> Callable[[int, int | None], float]:
    """The factor on the learning rate at a step, given how many there will be."""
    if given is not None:
        lambdas = getattr(given, "lr_lambdas", None)
        if not lambdas:
            raise ConfigError("a scheduler must be a LambdaLR (transformers.get_scheduler), so that a run can resume")
        return lambda step, total: float(lambdas[0](step))
    if config.lr_schedule == "constant" and not config.warmup_steps and not config.warmup_ratio:
        return lambda step, total: 1.0
    from transformers import get_scheduler

    name = {"constant": "constant_with_warmup"}.get(config.lr_schedule, config.lr_schedule)
    dummy = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def factor(step: int, total: int | None) -> float:
        needs = name != "constant_with_warmup"
        if total is None and (needs or config.warmup_ratio):
            raise ConfigError(f"lr_schedule={config.lr_schedule} needs to know the length of the run; call train()")
        warmup = config.warmup_steps or round(config.warmup_ratio * (total or 0))
        made = get_scheduler(name, dummy, num_warmup_steps=warmup, num_training_steps=total)
        return float(made.lr_lambdas[0](step))

    try:
        factor(0, 10)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"lr_schedule={config.lr_schedule}: {error}") from None
    return factor
