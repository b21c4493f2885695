"""How a run is carried out: steps, folder, checkpoints, trackers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from grpo.config import ConfigError, Worded

ENDLESS = 10**9
"""Steps of a run that something else ends."""

_ARGUMENTS = {
    *("checkpoint_every", "checkpoint_minutes", "keep_last", "keep_best", "best_by", "evaluate_every"),
    *("failure_budget", "sample_every", "keep_samples", "keep_metrics", "log_every", "trackers", "project"),
}


class RunConfig(Worded):
    """How a run is carried out: nothing here changes what is learned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int | None = Field(None, ge=1)
    """Rollout-and-update steps in all; None: as num_train_epochs says, else three of them, else 100."""
    num_train_epochs: float | None = Field(None, gt=0)
    """Instead: passes over the data set, where the task has one."""
    name: str | None = None
    """What the run is called; None: as its preset, or its environment, data or model."""
    logdir: str = "runs/{name}-{timestamp}"
    """The run's folder; {name}, {task}, {timestamp} and {seed} are filled in."""
    checkpoint_every: int | None = Field(25, ge=1)
    """Steps between checkpoints; None: the last alone, which is always saved."""
    checkpoint_minutes: float | None = Field(10.0, ge=0)
    """Minutes without one after which a checkpoint is saved too, and so is the first step where the next would come
    later than that; 0 or None: never. Each of these stays until the next checkpoint, and is not counted below."""
    keep_last: int | None = Field(2, ge=1)
    """Newest checkpoints that are kept; None: all."""
    keep_best: int = Field(1, ge=0)
    """Best checkpoints that are kept beside them."""
    best_by: str = "reward"
    """The metric that decides which is best: the highest, or with a leading minus the lowest."""
    evaluate_every: int | None = Field(None, ge=1)
    """Steps between evaluations, where the task has one; None: never."""
    stop_at: float | None = None
    """Ends the run once `best_by` reaches this."""
    env_steps: int | None = Field(None, ge=1)
    """Ends the run after so many environment steps, where the task counts them."""
    sample_every: int = Field(10, ge=1)
    """Steps between samples of what was tried and how it was judged; the first and the last step are always kept."""
    keep_samples: int | None = Field(500, ge=2)
    """Samples that stay, half of them the newest, older ones ever further apart; up to half as many more meanwhile.
    None: all."""
    keep_metrics: int | None = Field(20_000, ge=1000)
    """Lines that metrics.jsonl and timing.jsonl hold, thinned alike; evaluations count by themselves. None: all."""
    log_every: int = Field(1, ge=1)
    """Steps between what trackers get; the run folder has every step."""
    trackers: tuple[str, ...] = ()
    """Trackers that get the metrics too: tensorboard, wandb, trackio, mlflow, swanlab, comet. The run folder always has
    them. A run that a script has open at one of these gets them without being named, unless an empty list is given."""
    failure_budget: float = Field(0.01, ge=0, le=1)
    """Share of the samples of the last 100 steps that may fail before the run stops."""
    project: str | None = None
    """The project's name at wandb, trackio, swanlab, comet or mlflow (an experiment there); None: WANDB_PROJECT,
    TRACKIO_PROJECT, SWANLAB_PROJECT_NAME, COMET_PROJECT_NAME, MLFLOW_EXPERIMENT_NAME, or grpo."""

    def plan(self) -> dict[str, Any]:
        """The arguments of `grpo.run.loop.run` that are settings."""
        return self.model_dump(include=_ARGUMENTS)

    def reached(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether the environment made `env_steps`, or `best_by` is as good as `stop_at` asks for."""
        if self.env_steps is not None:
            if "env_steps" not in metrics:
                raise ConfigError("run.env_steps: this task counts no environment steps; use run.steps")
            if (metrics["env_steps"] or 0.0) >= self.env_steps:
                return True
        value = metrics.get(self.best_by.removeprefix("-"))
        if self.stop_at is None or value is None:
            return False
        return value <= self.stop_at if self.best_by.startswith("-") else value >= self.stop_at

    def goal(self, metrics: Mapping[str, float | None]) -> str:
        """In words what `reached` found: of a policy that is as good as asked for, or of steps that are used up."""
        name = self.best_by.removeprefix("-")
        if self.stop_at is not None and self.model_copy(update={"env_steps": None}).reached(metrics):
            return f"solved: {name} reached {metrics[name]:.4g} (run.stop_at={self.stop_at:g})"
        return f"{metrics.get('env_steps') or 0:.0f} environment steps are done (run.env_steps={self.env_steps})"

    def folder(self, name: str, task: str, seed: int, now: datetime) -> Path:
        """`logdir` with its words filled in."""
        words = {"name": name, "task": task, "seed": seed, "timestamp": now.strftime("%Y%m%d-%H%M%S")}
        try:
            return Path(self.logdir.format(**words))
        except (KeyError, IndexError, ValueError):
            known = ", ".join(f"{{{word}}}" for word in words)
            raise ConfigError(f"run.logdir={self.logdir!r}: the words that are filled in are {known}") from None
