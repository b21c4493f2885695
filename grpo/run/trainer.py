"""The trainer with its door to a run: `train`, the same in every room, with or without a folder.

    GRPOTrainer(config, policy, reward_model=reward).train(steps=100)                    # nothing on disk
    GRPOTrainer(config, policy, reward_model=reward).train(steps=100, folder="runs/a")   # all a run leaves; resumes

A room inherits this, hands its parts (policy, source, reference, optimizer, hooks) to the constructor, and says here
what is different about its runs: their name, what they are judged by, how long they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo.report import StepReport
from grpo.run.door import door
from grpo.run.progress import Progress
from grpo.run.runs import Runs
from grpo.run.trackers import Tracker
from grpo.trainer import Trainer

Batches = Iterable[Sequence[Any]]
"""States for each step, where they are the caller's."""


class GRPOTrainer(Runs, Trainer):
    """Your policy, your reward, one trainer; see `grpo.trainer.Trainer` for what it is made of."""

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
