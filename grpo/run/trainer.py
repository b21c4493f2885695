"""The trainer with its door to a run: `train`, the same in every room, with or without a folder.

    GRPOTrainer(config, policy, reward_model=reward).train(steps=100)                    # nothing on disk
    GRPOTrainer(config, policy, reward_model=reward).train(steps=100, folder="runs/a")   # all a run leaves; resumes

A room inherits this, hands its parts (policy, source, reference, optimizer, hooks) to the constructor, and says here
what is different about its runs: their name, what they are judged by, how long they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from grpo.capabilities import Evaluates, Exports
from grpo.config import ConfigError
from grpo.errors import install
from grpo.rates import LearningRate
from grpo.report import StepReport
from grpo.run.config import ENDLESS, RunConfig
from grpo.run.door import door
from grpo.run.progress import Progress
from grpo.run.trackers import Tracker
from grpo.trainer import Trainer

Batches = Iterable[Sequence[Any]]
"""States for each step, where they are the caller's."""


class GRPOTrainer(Trainer):
    """Your policy, your reward, one trainer; see `grpo.trainer.Trainer` for what it is made of."""

    task: ClassVar[str] = "own"
    """What a run's folder calls this room."""
    measure: ClassVar[str] = "reward"
    """The metric that says how good a policy is, as the steps report it; evaluations call it eval/…"""
    evaluates_every: ClassVar[int] = 50
    """Steps between two evaluations where nobody says."""
    sample_every: ClassVar[int] = 10
    """Steps between samples that are kept, where nobody says."""
    always_kept: ClassVar[bool] = False
    """Whether a run has a folder, whoever asks for one."""

    commands: ClassVar[tuple[str, ...]] = ("view",)
    """What makes something of the folder of a run of this room."""

    name: str | None = None
    """What the run that is under way is called, where somebody said."""
    watched: bool = False
    """Whether somebody watches that run: what is worth knowing may be printed."""

    __init__ = door(Trainer.__init__)

    @door
    def step(self, states: Sequence[Any] | None = None) -> StepReport:
        """Sample a group from each start, compare, learn."""
        return super().step(states)

    @door
    def train(
        self,
        first: int | Batches | str | Path | None = None,
        /,
        steps: int | None = None,
        *,
        states: Batches | None = None,
        env_steps: int | None = None,
        stop_at: float | None = None,
        evaluate_every: int | None = None,
        folder: str | Path | None = None,
        trackers: Sequence[str | Tracker] | None = (),
        project: str | None = None,
        callbacks: Sequence[Callable[[StepReport], Any]] = (),
        progress: str | Progress | None = "auto",
        total_updates: int | None = None,
        total_timesteps: int | None = None,
        verbose: int | None = None,
        resume_from_checkpoint: bool | str | Path | None = None,
        overwrite: bool = False,
    ) -> list[StepReport]:
        """Train; the reports of all steps (of the last 10,000) come back, the last with its arrays, too.

        steps: how many; states: a batch for each of them, where they are yours. Either may come first, without a name.
        Other words: `total_updates` for steps, `total_timesteps` for env_steps, `verbose=0` for no progress.
        env_steps, stop_at: end sooner, after so many steps of the environment, or once evaluations are so good.
        evaluate_every: steps between evaluations, where the room has some.
        folder: where everything a run leaves goes: metrics, checkpoints, curve; a run that is there is gone on with.
        trackers: tensorboard, wandb, trackio, mlflow, swanlab, comet or objects of your own, with the project's name
            there. A run that you have open at one of these is logged into, and left open, without; None: none at all.
        callbacks: get each report; one that returns False ends the training. progress: auto, live, plain, None.
        resume_from_checkpoint: True: there must be a run; a path: that folder, or checkpoint. overwrite: it goes first.
        """
        from grpo.run.start import train  # here: only a run needs files, signals and locks

        if isinstance(first, bool | str | Path):  # as transformers' trainers take it
            resume_from_checkpoint = first
        elif isinstance(first, int):
            steps = first
        elif first is not None:
            states = first
        asked = {
            "steps": steps if total_updates is None else total_updates,
            "env_steps": env_steps if total_timesteps is None else total_timesteps,
            "stop_at": stop_at,
            "evaluate_every": evaluate_every,
            "trackers": () if trackers is None else tuple(name for name in trackers if isinstance(name, str)) or None,
            "project": project,
        }
        return train(
            self,
            {name: value for name, value in asked.items() if value is not None},
            states=states,
            folder=None if folder is None else Path(folder),
            trackers=[tracker for tracker in trackers or () if not isinstance(tracker, str)],
            callbacks=callbacks,
            progress=None if verbose == 0 else progress,
            resume=resume_from_checkpoint,
            overwrite=overwrite,
        )

    # --- what a room may say about its runs -------------------------------------------------------------------------

    @property
    def run_name(self) -> str:
        """What a person would call a run of this trainer."""
        return self.task

    @property
    def evaluation(self) -> Callable[[int], Mapping[str, Any]] | None:
        """Measures the policy of a step; None where there is nothing to measure it on."""
        return self.source.evaluate if isinstance(self.source, Evaluates) else None

    def cannot_evaluate(self) -> str:
        """Why `evaluation` is None, and what to do."""
        return f"the task {self.task} has no evaluation; leave it out"

    def planned(self, asked: Mapping[str, Any], kept: bool) -> RunConfig:
        """How a run is carried out, from what `train` was asked for; `kept`: something of it will stay."""
        if not {"steps", "env_steps", "stop_at"} & set(asked):
            raise ValueError("train() needs total_updates, steps, env_steps or stop_at; or states, a batch a step")
        looks = self.evaluation is not None and ("stop_at" in asked or kept)
        every = asked.get("evaluate_every", self.evaluates_every if looks else None)
        given = {"steps": ENDLESS, **asked, "evaluate_every": every}
        best_by = f"eval/{self.measure}" if every else self.measure
        return RunConfig(**given, checkpoint_every=every or 50, best_by=best_by, sample_every=self.sample_every)

    def settings(self) -> dict[str, Any]:
        """The settings as a run's folder keeps them: those that were given, as the command line would write them."""
        kept = self.config.model_dump(mode="json", exclude_unset=True)
        return {**kept.pop("recipe", {}), **kept}

    def looked_at_with(self) -> tuple[Sequence[str], str]:
        """Commands that make something of this run's folder, with what they lack; what to do in place of others."""
        lacks = {"export": f"({install('export')})"} if find_spec("onnx") is None else {}
        lacks = lacks if isinstance(self, Exports) else {}
        return [f"{name} {lacks.get(name, '')}".rstrip() for name in self.commands], ""

    def settle_in(self, folder: Path) -> None:
        """Told where a run's results go, before its first step: to keep there what is needed beside checkpoints."""

    def total_steps(self, how: RunConfig) -> int:
        """Steps of a run, where its plan may count in something else."""
        if how.num_train_epochs is not None and how.steps is None:
            raise ConfigError("run.num_train_epochs: this task has no data set to pass over; use run.steps")
        return how.steps or 100

    def schedule(self, steps: int) -> None:
        """Told how many steps a run will have, before its first."""
        for hook in self.hooks:
            if isinstance(hook, LearningRate):
                hook.total = None if steps >= ENDLESS else steps

    def listening(self, callbacks: Sequence[Any]) -> Sequence[Callable[[StepReport], Any]]:
        """Those of `train`'s callbacks that are plain functions; a room may know others, and keep them to itself."""
        return callbacks

    def stops(self, report: StepReport) -> bool:
        """Told each step; True ends the run."""
        return False

    def saves_too(self, report: StepReport) -> bool:
        """Whether a checkpoint is wanted after this step, beside those that are due."""
        return False

    def saved(self, step: int) -> None:
        """Told of a checkpoint of this step, once its arrays are copied."""

    def finish(self, reason: str, folder: Path | None) -> None:
        """Told how a run ended, after its last."""

    def told(self, reports: list[StepReport]) -> list[StepReport]:
        """What `train` returns."""
        return reports
