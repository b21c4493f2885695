"""The learning rate of each step. It follows from the step's number, so that a run that is resumed has the same one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grpo.errors import ConfigError, nearest
from grpo.report import StepReport

if TYPE_CHECKING:
    import torch

Factor = Callable[[int, int | None], float]
"""Share of the full rate at a step, given how many there will be; None: nobody knows."""

FALLING: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
"""By the share of the run that is done; transformers' formulas."""


def falling(name: str) -> Factor:
    """The schedule of that name."""
    if name not in FALLING:
        known = ["constant", *FALLING]
        raise ConfigError(f"lr_schedule={name} is not one of {', '.join(known)}{nearest(name, known)}")
    left = FALLING[name]

    def factor(step: int, total: int | None) -> float:
        if total is None:
            raise ConfigError(
                f"lr_schedule={name} needs to know the length of the run in steps: set run.steps, or call "
                "train(steps=…); env_steps and stop_at may end it sooner"
            )
        return left(min(1.0, step / total))

    return factor


class LearningRate:
    """Before each step (a `Hook`) the rate, as a share of what the optimizer began with; after it, told of."""

    def __init__(self, factor: Factor, optimizer: torch.optim.Optimizer | None) -> None:
        self.total: int | None = None
        """Steps of the run, once they are known."""
        self._factor = factor
        self._now: float | None = None
        self._full = [] if optimizer is None else [group["lr"] for group in optimizer.param_groups]

    def before(self, trainer: Any) -> None:
        """The rate of this step."""
        factor = self._factor(trainer.steps_done, self.total)
        groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
        for group, full in zip(groups, self._full, strict=True):
            group["lr"] = full * factor
        self._now = float(groups[0]["lr"]) if groups else None

    def after(self, trainer: Any, report: StepReport) -> None:
        """What it was."""
        report.metrics["learning_rate"] = self._now


def scheduled(name: str, optimizer: torch.optim.Optimizer | None) -> LearningRate | None:
    """What carries out the schedule of that name; None: the rate is left alone, a script may change it."""
    return None if name == "constant" else LearningRate(falling(name), optimizer)
