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

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo.agreement import by_chief
from grpo.capabilities import Headlines, Timed
from grpo.errors import SamplesFailed, warn
from grpo.protocols import State
from grpo.report import StepReport
from grpo.run import checkpoint, thinning
from grpo.run.films import SELDOM
from grpo.run.folder import Elsewhere, RunFolder
from grpo.run.lock import locked
from grpo.run.output import standing
from grpo.run.progress import SHOWN, Progress, ShowsPhases, make_progress
from grpo.run.saving import Waited
from grpo.run.session import Session
from grpo.run.signals import StopSignals
from grpo.run.stepping import Following, Stepping, Summary
from grpo.run.trackers import Tracker

if TYPE_CHECKING:
    from grpo.trainer import Trainer

__all__ = ["Options", "SamplesFailed", "Summary", "run"]


@dataclass(frozen=True)
class Options:
    """How the loop goes round; a `RunConfig` says most of it."""

    checkpoint_every: int | None = 50
    """Steps between checkpoints; None: the last alone, which is always saved."""
    checkpoint_minutes: float | None = 10.0
    """Minutes after which one is saved even so; 0 or None: never."""
    keep_last: int | None = 2
    """Newest checkpoints that stay; None: all."""
    keep_best: int = 0
    """Checkpoints with the highest `best_by` that stay beside them."""
    best_by: str = "reward"
    """A metric; with a leading minus the lowest is the best."""
    sample_every: int | None = 10
    """Steps between groups that are kept to look at, the first and the last step's beside them; None: never."""
    sample_groups: int | None = 4
    """How many of them; None: all of the step."""
    keep_samples: int | None = None
    """Steps of which groups are kept, older ones thinned (`grpo.run.thinning`); None: all."""
    keep_metrics: int | None = None
    """Lines of metrics.jsonl and timing.jsonl, thinned alike; None: all."""
    trackers: Sequence[str | Tracker] = ()
    """`tensorboard`, `wandb`, `trackio`, `mlflow`, or your own."""
    project: str | None = None
    """Its name at the trackers."""
    log_every: int = 1
    """Steps between what trackers get; they get the last step too."""
    evaluate: Callable[[int], Mapping[str, Any]] | None = None
    """Gives further metrics for a step; never moves the training's randomness."""
    evaluate_every: int | None = None
    """Steps between two evaluations."""
    stop: Callable[[StepReport], bool | str] | None = None
    """Ends the run, with a checkpoint, once it returns True, or why in words."""
    after: tuple[Sequence[str], str] = ((), "")
    """Commands that make something of the folder, which the end names, and what else to do; in words."""
    saves_too: Callable[[StepReport], bool] = lambda report: False
    """Whether a checkpoint is wanted after this step, whatever is due; asked after `stop`."""
    saved: Callable[[int], None] = lambda step: None
    """Told of the step of a checkpoint that the loop has taken."""
    failure_budget: float = 0.01
    """Share of samples that may fail."""
    harmless: frozenset[str] = checkpoint.HARMLESS
    """Settings that may differ from those of the checkpoint that is resumed."""
    curve: bool = True
    """Whether curve.png is drawn at the end."""
    at: Callable[[str], None] | None = None
    """Told each point of a save (`checkpoint.POINTS`) and each step's beginning (`step`): for tests."""

    clock: Callable[[], float] = time.monotonic
    """Seconds from anywhere, for `checkpoint_minutes`."""

    def __post_init__(self) -> None:
        """What cannot be."""
        every = 1 if self.checkpoint_every is None else self.checkpoint_every
        if every < 1 or self.log_every < 1 or (self.evaluate is None) != (self.evaluate_every is None):
            raise ValueError(
                "run() needs steps, checkpoint_every and log_every ≥ 1, and evaluate together with evaluate_every"
            )


def run(
    trainer: Trainer,
    steps: int,
    folder: RunFolder | Elsewhere | None = None,
    *,
    resume: bool | int = False,
    document: Mapping[str, Any] | None = None,
    states: Iterable[Sequence[Any]] | None = None,
    progress: str | Progress | None = "auto",
    **options: Any,
) -> Summary:
    """Train until `steps` are done in all, leaving everything in `folder`, or nothing without one.

    resume: True goes on from the newest valid checkpoint (from the start where there is none), a number from the
        checkpoint of that step; settings must then be those it was saved under.
    document: what config.json is to say, where a resumed run is carried out in another way than before.
    states: of each step, where they are the caller's; the run ends with them. progress: auto, live, plain, None.
    options: the fields of `Options`.
    """
    if "sinks" in options:
        warn("run(sinks=…) is run(trackers=…) now", DeprecationWarning)
        options["trackers"] = options.pop("sinks")
    how = Options(**options)
    if steps < 1:
        raise ValueError(f"run() needs at least one step, got steps={steps}")
    trainer.pace.until = steps
    batches = None if states is None else iter(states)
    chief = trainer.ranks.chief
    with ExitStack() as closing:
        asked = StopSignals()  # entered below: without a folder there is nothing to save
        session = _taken_up(trainer, folder, resume, batches, how, closing)
        if isinstance(session, Session):
            session.announce(steps, document)
        closing.callback(session.trackers.close)
        session.trackers.open(how.trackers if chief else (), how.project)
        shown = _shown(progress if chief else None, session, folder, steps, closing)
        if folder is not None:
            closing.enter_context(asked)
        _timed(session, closing)
        _go_round(session, steps, how, asked, shown)
        session.end(session.over(asked) or "done" if trainer.steps_done < steps else "done")
        session.save(last=True)
        session.close(how.curve)
        commands, instead = how.after
        summary = replace(session.summary(), after=tuple(commands), instead=instead)
        shown.finish(summary)
        return summary


def _taken_up(
    trainer: Trainer,
    folder: RunFolder | Elsewhere | None,
    resume: bool | int,
    states: Iterator[Any] | None,
    how: Options,
    closing: ExitStack,
) -> Stepping:
    """What goes round: alone, with a folder, or beside the chief who has it; all from where its checkpoint left it."""
    sessions: list[Stepping] = []

    def entered(session: Stepping) -> Stepping:
        sessions.append(session)
        closing.enter_context(standing(lambda what: session.tell(trainer.steps_done, "output_lost", what)))
        return session

    def begun() -> State:
        assert isinstance(folder, RunFolder)
        closing.enter_context(locked(folder.path))
        closing.callback(folder.close)
        kept = (how.keep_last, how.keep_best, how.best_by, how.failure_budget, how.at, how.log_every)
        entered(session := Session(trainer, folder, *kept, states))
        closing.enter_context(session)
        return session.begin(resume, how.harmless)

    if folder is None:
        return entered(Stepping(trainer, how.failure_budget, states, how.log_every))
    if trainer.ranks.size > 1:
        checkpoint.check(trainer.state())
    told = by_chief(trainer.ranks, "taking up the run", begun)
    if isinstance(folder, Elsewhere):
        entered(following := Following(trainer, how.failure_budget, states, how.log_every))
        following.begin(told)
    return sessions[0]


def _go_round(session: Stepping, steps: int, how: Options, asked: StopSignals, shown: Progress) -> None:
    """Step after step, until there are enough, or somebody or something ends it."""
    trainer, kept, report = session.trainer, 0, None
    judged_by_evaluation = bool(how.keep_best) and how.best_by.removeprefix("-").startswith("eval/")
    every, waited = min(how.checkpoint_every or steps, steps), Waited(how.checkpoint_minutes, how.clock)
    session.agree(asked)
    if how.sample_every and trainer.steps_done < steps:
        session.go_on(how.sample_every)
    while session.over(asked) is None and trainer.steps_done < steps:
        if (made := session.step()) is None:
            break
        report = made
        session.settle()
        due = _due(report.step, how.evaluate_every)
        row = session.record(report, how.evaluate if due else None)
        shown.step(row, session.seconds)
        if how.sample_every and (report.step in (1, steps) or _due(report.step, how.sample_every)):
            _sample(session, report, how)  # before the checkpoint: a run that is cut after it has them
            kept = report.step
        _thin(session, report.step, how)
        session.count_failures(report)
        if how.stop is not None and (said := how.stop(report)):
            session.end("stopped", said if isinstance(said, str) else "")
        planned = _due(report.step, every) or (due and judged_by_evaluation)  # only what was evaluated can be the best
        planned = how.saves_too(report) or planned
        long = report.step < steps and waited.too_long(every - 1 if report.step == 1 else 0)
        saves = session.agree(asked, planned or long)
        if how.sample_every and kept != report.step and session.over(asked) is not None:
            _sample(session, report, how)
            kept = report.step
        if saves:
            session.save(planned=planned)
            how.saved(report.step)
            waited.restart()
    if report is not None and how.sample_every and kept != report.step:
        _sample(session, report, how)


def _sample(session: Stepping, report: StepReport, how: Options) -> None:
    """Groups to look at, and a film but of the first steps."""
    session.sample(report, how.sample_groups, filmed=_due(report.step, how.sample_every) or report.step >= SELDOM)


def _thin(session: Stepping, step: int, how: Options) -> None:
    """Let go of what older steps left."""
    if how.sample_every and how.keep_samples and thinning.due(step, how.sample_every, how.keep_samples):
        session.thin_samples(step, how.sample_every, how.keep_samples)
    if how.keep_metrics and thinning.due(step, 1, how.keep_metrics):
        session.thin_lines(step, how.keep_metrics, how.evaluate_every)


def _shown(
    progress: str | Progress | None,
    session: Stepping,
    folder: RunFolder | Elsewhere | None,
    steps: int,
    closing: ExitStack,
) -> Progress:
    """What a person sees, with the source's own metrics in front."""
    shown = make_progress(progress) if progress is None or isinstance(progress, str) else progress
    closing.callback(shown.close)
    source = session.trainer.source
    shown.names = (*(source.headline if isinstance(source, Headlines) else ()), *SHOWN)
    if isinstance(shown, ShowsPhases):
        session.watch.told = shown.phase
    shown.start(None if folder is None else folder.path, session.trainer.steps_done, steps)
    return shown


def _timed(session: Stepping, closing: ExitStack) -> None:
    """Trainer and source say what their time is spent on, for as long as the run goes on."""
    trainer, source = session.trainer, session.trainer.source
    closing.callback(setattr, trainer, "phase", trainer.phase)
    trainer.phase = session.watch
    if isinstance(source, Timed):
        closing.callback(setattr, source, "stopwatch", source.stopwatch)
        source.stopwatch = session.watch


def _due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens at this one."""
    return every is not None and step % every == 0
