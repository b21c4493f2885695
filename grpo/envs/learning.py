"""Learning until an aim is reached, for the rooms that play environments: in a run's folder, or leaving nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo.errors import SamplesFailed
from grpo.report import StepReport
from grpo.run.budget import FailureBudget
from grpo.run.folder import RunFolder
from grpo.run.progress import make_progress
from grpo.trainer import GRPOTrainer

ENDLESS = 10**9


class Aim:
    """When to stop: after so many steps of learning or of the environment, at a greedy return, or by a callback."""

    def __init__(
        self,
        steps: int | None,
        env_steps: int | None,
        stop_at: float | None,
        evaluate_every: int | None,
        callbacks: Sequence[Callable[[StepReport], Any]],
        words: str = "steps",
    ) -> None:
        """words: what the number of steps may be called."""
        if steps is None and env_steps is None and stop_at is None:
            raise ValueError(f"train() needs {words}, env_steps or stop_at")
        if (steps is not None and steps < 1) or (evaluate_every is not None and evaluate_every < 1):
            raise ValueError(
                f"train() needs at least one step, and one between evaluations; got {steps}, {evaluate_every}"
            )
        self.steps = ENDLESS if steps is None else steps
        self.reports: list[StepReport] = []
        """Of all steps; the last has its arrays, the others their metrics."""
        self._env_steps, self._stop_at, self._callbacks = env_steps, stop_at, callbacks

    def reached(self, report: StepReport) -> bool:
        """Take in a step; whether it was the last."""
        if self.reports:
            self.reports[-1].forget()
        self.reports.append(report)
        asked = [callback(report) is False for callback in self._callbacks]
        made, value = report.get("env_steps") or 0.0, report.get("eval/return")
        good = self._stop_at is not None and value is not None and value >= self._stop_at
        return any(asked) or good or (self._env_steps is not None and made >= self._env_steps)


def learn_here(
    trainer: GRPOTrainer,
    aim: Aim,
    every: int | None,
    progress: str | None,
    names: Sequence[str],
    samples: Callable[[StepReport], float],
    refuse: Callable[[StepReport], None],
) -> None:
    """Without leaving anything on disk.

    every: steps between two evaluations. samples: how many a step had; refuse: raises where too many of them failed, or
    one in the first step.
    """
    source: Any = trainer.source
    shown, budget = make_progress(progress), FailureBudget()
    shown.names = tuple(names)
    shown.start(None, trainer.steps_done, aim.steps)
    try:
        for _ in range(aim.steps):
            began = time.perf_counter()
            report = trainer.step()
            budget.add(report["failed"] or 0.0, samples(report))
            if report["failed"] and (report.step == 1 or budget.spent()):
                refuse(report)
            if every is not None and report.step % every == 0:
                found = source.evaluate(report.step)
                report.metrics |= {f"eval/{name}": value for name, value in found.items()}
            shown.step({"step": report.step, **report.metrics}, time.perf_counter() - began)
            if aim.reached(report):
                break
    finally:
        shown.close()


def learn_there(trainer: GRPOTrainer, aim: Aim, every: int | None, place: RunFolder, resume: bool, **how: Any) -> None:
    """In a run's folder; `how`: further arguments of `grpo.run.loop.run`."""
    from grpo.run.loop import run  # here: only a run needs files, signals and locks

    source: Any = trainer.source
    summary = run(
        trainer,
        aim.steps,
        place,
        resume=resume,
        keep_best=1,
        best_by="eval/return" if every else "return",
        checkpoint_every=every or 50,
        evaluate=source.evaluate if every else None,
        evaluate_every=every,
        stop=aim.reached,
        **how,
    )
    if summary.reason in ("failures", "unsaved"):
        raise SamplesFailed(f"{place.path}: the run ended ({summary.reason}) at step {summary.step}; see events.jsonl")


def run_folder(
    folder: str | Path | None, name: str, task: str, trainer: GRPOTrainer, further: Mapping[str, Any] | None = None
) -> tuple[RunFolder, bool]:
    """Where results go, and whether a run is there already; `further`: settings that the config cannot say."""
    now = datetime.now().astimezone()
    path = Path("runs") / f"{name}-{now.strftime('%Y%m%d-%H%M%S')}" if folder is None else Path(folder)
    if (path / "run.json").exists():
        return RunFolder.open(path), True
    config = trainer.config.model_dump(mode="json", exclude_unset=True) | dict(further or {})
    made = RunFolder.create(
        path,
        task=task,
        config={"task": task, **config.pop("recipe", {}), **config},  # as the command line would write it
        created=now.isoformat(timespec="seconds"),
        seed=trainer.config.seed,
        argv=[],
    )
    return made, False
