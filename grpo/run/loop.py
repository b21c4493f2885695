"""The loop around `trainer.step`.

    lock the folder ─► resume? newest valid checkpoint ─► trainer, metrics.jsonl cut back to its step
          │
          ▼
    ┌► seed from (seed, step) ─► trainer.step ─► evaluate? ─► metrics.jsonl · timing.jsonl ─► trackers, progress
    │                               │ Diverged: dump, raise            │
    │                               ▼                                  ▼
    └──── enough steps? signal? stop()? ◄── checkpoint? ◄── failures within budget? ◄── samples?
          │
          ▼
    last checkpoint ─► curve.png ─► what the source leaves (a video) ─► Summary
                                       (its exit_code: 0 done · 1 failed · 75 preempted · 130 interrupted)

Checkpoints are taken only between steps: a run that is cut inside one does it again, with the same numbers. Their files
are written while training goes on; the last one, and whatever reads them, waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from grpo.errors import SamplesFailed
from grpo.run import checkpoint
from grpo.run.folder import RunFolder
from grpo.run.lock import locked
from grpo.run.progress import SHOWN, Progress, make_progress
from grpo.run.session import Session, Summary
from grpo.run.signals import StopSignals
from grpo.run.trackers import Tracker
from grpo.trainer import GRPOTrainer, StepReport

__all__ = ["SamplesFailed", "Summary", "run"]


def run(
    trainer: GRPOTrainer,
    steps: int,
    folder: RunFolder,
    *,
    resume: bool | int = False,
    checkpoint_every: int | None = 50,
    keep_last: int | None = 2,
    keep_best: int = 0,
    best_by: str = "reward",
    sample_every: int | None = 10,
    sample_groups: int | None = 4,
    trackers: Sequence[str | Tracker] = (),
    project: str | None = None,
    log_every: int = 1,
    progress: str | Progress | None = "auto",
    evaluate: Callable[[int], Mapping[str, Any]] | None = None,
    evaluate_every: int | None = None,
    stop: Callable[[StepReport], bool] | None = None,
    failure_budget: float = 0.01,
    harmless: frozenset[str] = checkpoint.HARMLESS,
    curve: bool = True,
    at: Callable[[str], None] = lambda point: None,
    sinks: Sequence[str | Tracker] | None = None,
) -> Summary:
    """Train until `steps` are done in all, leaving everything in `folder`.

    resume: True goes on from the newest valid checkpoint (from the start where there is none), a number from the
        checkpoint of that step; settings other than `harmless` must then be those it was saved under.
    checkpoint_every: steps between checkpoints (None: the last alone, which is always saved).
    keep_last, keep_best: checkpoints that stay: the newest (None: all), and those with the highest `best_by`, a metric
        (with a leading minus: the lowest).
    sample_every, sample_groups: which groups are kept to look at (None: never; all of the step).
    trackers: who gets the metrics too: `tensorboard`, `wandb`, `trackio`, or your own; `project`: its name there;
        `log_every`: steps between what they get (the last step too).
    progress: auto, live, plain, None.
    evaluate: gives further metrics for a step, every `evaluate_every` steps; never moves the training's randomness.
    stop: ends the run, with a checkpoint, once it returns True. failure_budget: share of samples that may fail.
    at: told each point of a save (`checkpoint.POINTS`) and each step's beginning (`step`).
    sinks: what `trackers` was called before.
    """
    if sinks is not None:
        warnings.warn("run(sinks=…) is run(trackers=…) now", DeprecationWarning, stacklevel=2)
        trackers = sinks
    every = steps if checkpoint_every is None else checkpoint_every
    if steps < 1 or every < 1 or log_every < 1 or (evaluate is None) != (evaluate_every is None):
        raise ValueError(
            "run() needs steps, checkpoint_every and log_every ≥ 1, and evaluate together with evaluate_every"
        )
    with ExitStack() as closing:
        closing.enter_context(locked(folder.path))
        closing.callback(folder.close)
        session = Session(trainer, folder, keep_last, keep_best, best_by, failure_budget, at, log_every)
        closing.enter_context(session)
        session.begin(resume, harmless)
        session.announce(steps)
        closing.callback(session.trackers.close)
        session.trackers.open(trackers, project)
        shown = make_progress(progress) if progress is None or isinstance(progress, str) else progress
        closing.callback(shown.close)
        shown.names = (*getattr(trainer.source, "headline", ()), *SHOWN)
        shown.start(folder.path, trainer.steps_done, steps)
        closing.callback(setattr, trainer, "phase", trainer.phase)
        trainer.phase = session.watch
        if hasattr(trainer.source, "stopwatch"):
            closing.callback(setattr, trainer.source, "stopwatch", trainer.source.stopwatch)
            trainer.source.stopwatch = session.watch
        asked = closing.enter_context(StopSignals())
        while session.reason is None and trainer.steps_done < steps and asked.reason is None:
            report = session.step()
            session.saving.settle(wait=False)
            due = evaluate_every is not None and report.step % evaluate_every == 0
            row = session.record(report, evaluate if due else None)
            shown.step(row, session.seconds)
            if sample_every is not None and report.step % sample_every == 0:
                session.sample(report, sample_groups)
            session.count_failures(report)
            if stop is not None and stop(report):
                session.end("stopped")
            judged = due and keep_best and best_by.removeprefix("-").startswith("eval/")
            if report.step % every == 0 or judged:  # only what was evaluated can be the best
                session.save()
        session.end("done" if trainer.steps_done >= steps else asked.reason or "done")
        session.save(last=True)
        session.track_last()
        if curve:
            session.draw()
        if session.reason in ("done", "stopped"):
            session.leave()
        summary = session.summary()
        shown.finish(summary)
        return summary
