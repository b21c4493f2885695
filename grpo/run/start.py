"""The one way into a run, for the command and for every room's `train`: open or resume its folder, plan, loop, end.

asked for ─► RunConfig ─► folder? new: config.json, run.json · there: resumed ─► loop ─► Summary
             (its `run` block is kept in config.json, so that whoever resumes carries the run out the same way)
"""

from __future__ import annotations

import re
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.agreement import by_chief
from grpo.capabilities import KeepsFiles
from grpo.config import ConfigError
from grpo.dialects import OWN
from grpo.errors import SamplesFailed, warn
from grpo.protocols import Ranks, State
from grpo.report import StepReport
from grpo.run import checkpoint, open_trackers
from grpo.run.config import ENDLESS, RunConfig
from grpo.run.dialect import run_config
from grpo.run.files import FolderError
from grpo.run.folder import Elsewhere, RunFolder
from grpo.run.guard import expect_not_loading
from grpo.run.lock import locked
from grpo.run.loop import run
from grpo.run.progress import Progress
from grpo.run.signals import INTERRUPTED, PREEMPTED
from grpo.run.stepping import Summary
from grpo.run.trackers import Tracker

_CHECKPOINT = re.compile(r"(?:step|checkpoint)-(\d{1,15})")
MOST = 10_000
"""Reports that `train` returns at most, and returns of episodes in the tutorial's list, the last ones: a run may be
longer than memory is large."""

if TYPE_CHECKING:
    from grpo.run.trainer import Batches, GRPOTrainer


def start(
    trainer: GRPOTrainer,
    how: RunConfig,
    folder: RunFolder | Elsewhere | None,
    *,
    resume: bool | int = False,
    document: Mapping[str, Any] | None = None,
    states: Batches | None = None,
    trackers: Sequence[str | Tracker] = (),
    stop: Callable[[StepReport], bool] = lambda report: False,
    progress: str | Progress | None = "auto",
) -> Summary:
    """Carry out a run as `how` says, in a folder or without one; `document`: what config.json is to say from now on.

    On several ranks the chief alone has the folder, and people see what it prints.
    """
    _expect_possible(trainer, how)
    steps = trainer.total_steps(how)
    trainer.schedule(steps)
    trainer.name, trainer.watched = how.name, progress is not None and trainer.ranks.chief
    # Files that one rank alone has are missing on the others: what is remembered is in memory and checkpoints then.
    if isinstance(folder, RunFolder) and isinstance(trainer.source, KeepsFiles) and trainer.ranks.size == 1:
        trainer.source.folder = folder.path
    if isinstance(folder, RunFolder):
        trainer.settle_in(folder.path)
    summary = run(
        trainer,
        steps if folder is not None else trainer.steps_done + steps,
        folder,
        resume=resume,
        document=document,
        states=states,
        **how.plan() | {"trackers": (*how.trackers, *trackers)},
        progress=progress,
        evaluate=trainer.evaluation if how.evaluate_every else None,
        stop=lambda report: _enough([stop(report), trainer.stops(report)], how, report),
        after=trainer.looked_at_with(),
        saves_too=trainer.saves_too,
        saved=trainer.saved,
    )
    if folder is None or summary.step <= steps:  # else it had done more already, and nothing was done now
        trainer.finish(summary.reason, summary.folder)
    return summary


def _enough(asked: Sequence[bool], how: RunConfig, report: StepReport) -> str:
    """Why a run ends with this step, in words; empty: it does not."""
    if how.reached(report):
        return how.goal(report)
    return "stopped: a callback ended it" if any(asked) else ""


def _expect_possible(trainer: GRPOTrainer, how: RunConfig) -> None:
    if how.evaluate_every is not None and trainer.evaluation is None:
        raise ConfigError(f"run.evaluate_every: {trainer.cannot_evaluate()}")


def create(
    how: RunConfig,
    document: Mapping[str, Any],
    *,
    name: str,
    task: str,
    seed: int,
    argv: Sequence[str] = (),
    overwrite: bool = False,
) -> RunFolder:
    """The folder of a new run, before anything heavy is built: an unwritable place is found at once.

    overwrite: a run that is there goes first; what is no run is left alone.
    """
    now = datetime.now().astimezone()
    path = how.folder(name, task, seed, now)
    if "{timestamp}" in how.logdir:  # two runs in one second
        taken, number = path, 2
        while path.exists():
            path, number = taken.with_name(f"{taken.name}-{number}"), number + 1
    if overwrite:
        clear(path)
    created = now.isoformat(timespec="seconds")
    try:
        return RunFolder.create(path, task=task, config=document, created=created, seed=seed, argv=argv)
    except FolderError:
        _bring_back(path)
        raise


def clear(path: Path) -> None:
    """Put the run that is in a folder aside, unless it is going on; it goes when the new one has begun."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, which is not overwritten; name the folder that it leads to")
    if (path / "run.json").exists():
        with locked(path):
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))


def _aside(path: Path) -> Path:
    """Where the run that is overwritten waits."""
    return path.with_name(f".{path.name}.before")


def _bring_back(path: Path) -> None:
    if _aside(path).exists() and not path.exists():
        _aside(path).rename(path)


def shared(ranks: Ranks, make: Callable[[], RunFolder]) -> RunFolder | Elsewhere:
    """The run's folder, which the chief makes or opens; where it cannot, all ranks say so."""
    if ranks.size == 1:
        return make()
    made: list[RunFolder] = []

    def work() -> State:
        made.append(make())
        return State({"path": str(made[0].path), "config": dict(made[0].config)}, {})

    told = by_chief(ranks, "opening the run's folder", work).values
    return made[0] if made else Elsewhere(Path(told["path"]), told["config"])


def as_before(how: RunConfig, folder: RunFolder | Elsewhere) -> RunConfig:
    """A run that is gone on with is thinned as it was, unless asked otherwise; one older than thinning not at all."""
    saved = folder.config.get("run")
    plan = saved if isinstance(saved, dict) else {}
    unsaid = {name for name in ("keep_samples", "keep_metrics") if name not in how.model_fields_set}
    return how.model_copy(update=run_config({name: plan.get(name) for name in unsaid}).model_dump(include=unsaid))


def discard_unbegun(folder: RunFolder | Elsewhere) -> None:
    """Remove the folder of a run that failed before its first step; the one that it was to overwrite comes back."""
    if not isinstance(folder, RunFolder):
        return
    if not (folder.path / "metrics.jsonl").exists():
        shutil.rmtree(folder.path, ignore_errors=True)
        _bring_back(folder.path)
    else:
        shutil.rmtree(_aside(folder.path), ignore_errors=True)


# --- from Python ----------------------------------------------------------------------------------------------------


def train(
    trainer: GRPOTrainer,
    asked: Mapping[str, Any],
    *,
    states: Batches | None,
    folder: Path | None,
    trackers: Sequence[Tracker],
    callbacks: Sequence[Callable[[StepReport], Any]],
    progress: str | Progress | None,
    resume: bool | str | Path | None,
    overwrite: bool = False,
) -> list[StepReport]:
    """What `GRPOTrainer.train` does: see there."""
    expect_not_loading()
    if overwrite and resume:
        raise ValueError("overwrite begins anew, resume_from_checkpoint goes on; give one of them")
    for name in ("steps", "evaluate_every"):
        if asked.get(name, 1) < 1:
            raise ValueError(f"train() needs at least one step, and one between evaluations; got {name}={asked[name]}")
    kept = folder is not None or bool(trackers) or bool(asked.get("trackers")) or bool(resume)
    if states is not None:
        done = trainer.steps_done if kept else 0  # steps are counted from a folder's first one on
        asked = {**asked, "steps": min(asked.get("steps", ENDLESS), done + _batches(states))}
    how = trainer.planned(asked, kept)
    _expect_possible(trainer, how)  # before there is a folder
    told = Told(trainer.listening(callbacks))
    place, document = None, None
    resumed: bool | int = False
    if kept or trainer.always_kept:
        document = _document(trainer, how)
        place, resumed = _place(trainer, how, document, folder, resume, overwrite)
        if resumed:
            how = as_before(how, place)
            if how.name is None and (called := _called(place)) not in (None, trainer.run_name):
                how = how.model_copy(update={"name": called})
            document = _document(trainer, how)
    try:
        told_too = [*trackers, *_open(how)]
        options: dict[str, Any] = {"states": states, "trackers": told_too, "stop": told.enough, "progress": progress}
        summary = start(trainer, how, place, resume=resumed, document=document, **options)
    finally:
        if place is not None and not resumed:
            discard_unbegun(place)
    if summary.reason in (INTERRUPTED, PREEMPTED) and summary.folder is not None and trainer.watched:
        print("go on with: the same call and resume_from_checkpoint=True")
    if resumed and not told.reports and summary.reason == "done" and trainer.ranks.chief:
        has = f"{summary.folder} has done its {summary.step} steps already"
        warn(f"{has}: nothing was trained; ask for more steps, or begin anew: overwrite=True")
        told.reports.extend(_reports_of(place))
    if summary.reason in ("failures", "unsaved"):
        where = "" if summary.folder is None else f"{summary.folder}: "
        ended = f"{where}the run ended ({summary.reason}) at step {summary.step}"
        raise SamplesFailed(ended + (f"; {summary.why}" if summary.why else "; see events.jsonl"))
    return trainer.told(list(told.reports))


def _batches(states: Batches) -> int:
    """How many there are, where that is certain: the length of anything but a list may be that of one epoch."""
    if not isinstance(states, list | tuple):
        return ENDLESS
    if not states:
        raise ValueError("train() got no states: give it a list of batches, one for each step")
    return len(states)


def _reports_of(place: RunFolder | Elsewhere | None) -> list[StepReport]:
    """The steps that a run has made already, as its folder has them."""
    rows = place.metrics() if isinstance(place, RunFolder) else []
    return [StepReport.kept(row["step"], {name: row[name] for name in row if name != "step"}) for row in rows]


def _open(how: RunConfig) -> list[Tracker]:
    """Runs that the caller has open at trackers, unless these are named already, or none is wanted."""
    if not how.trackers and "trackers" in how.model_fields_set:
        return []
    return [tracker for name, tracker in open_trackers.found().items() if name not in how.trackers]


class Told:
    """The reports of a run as they come: the last `MOST` are kept, the newest with arrays, and told to callbacks."""

    def __init__(self, callbacks: Sequence[Callable[[StepReport], Any]]) -> None:
        self.reports: deque[StepReport] = deque(maxlen=MOST)
        self._callbacks = callbacks

    def enough(self, report: StepReport) -> bool:
        """Take in a step; whether a callback wants it to be the last."""
        if self.reports:
            self.reports[-1].forget()
        self.reports.append(report)
        asked = [callback(report) is False for callback in self._callbacks]
        return any(asked)


def _document(trainer: GRPOTrainer, how: RunConfig) -> dict[str, Any]:
    """What config.json keeps: enough for the command to go on with the run, carried out the same way."""
    plan = how.model_dump(mode="json") | {"name": how.name or trainer.run_name}
    return {"task": trainer.task, "dialect": OWN, **trainer.settings(), "run": plan}


def _called(folder: RunFolder | Elsewhere) -> str | None:
    """What the run in a folder is called already."""
    plan = folder.config.get("run")
    name = plan.get("name") if isinstance(plan, dict) else None
    return name if isinstance(name, str) else None


def _place(
    trainer: GRPOTrainer,
    how: RunConfig,
    document: Mapping[str, Any],
    folder: Path | None,
    resume: bool | str | Path | None,
    overwrite: bool,
) -> tuple[RunFolder | Elsewhere, bool | int]:
    """Where the run's results go, and whether it goes on there, perhaps from which step: the chief looks."""
    if trainer.ranks.size == 1:
        return _looked_up(trainer, how, document, folder, resume, overwrite)
    found: list[tuple[RunFolder, bool | int]] = []

    def work() -> State:
        found.append(_looked_up(trainer, how, document, folder, resume, overwrite))
        place, resumed = found[0]
        return State({"path": str(place.path), "config": dict(place.config), "resumed": resumed}, {})

    told = by_chief(trainer.ranks, "opening the run's folder", work).values
    return found[0] if found else (Elsewhere(Path(told["path"]), told["config"]), told["resumed"])


def _of_checkpoint(path: Path) -> tuple[Path, int | None]:
    """The run's folder, and the step that a path in it names: checkpoints/step-00000010, checkpoint-10."""
    named = _CHECKPOINT.fullmatch(path.name)
    if named is None or (path / "run.json").exists():
        return path, None
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent, int(named[1])


def _looked_up(
    trainer: GRPOTrainer,
    how: RunConfig,
    document: Mapping[str, Any],
    folder: Path | None,
    resume: bool | str | Path | None,
    overwrite: bool,
) -> tuple[RunFolder, bool | int]:
    step = None
    if resume and not isinstance(resume, bool):
        folder, step = _of_checkpoint(Path(resume))
    name, seed = how.name or trainer.run_name, trainer.config.seed
    if folder is not None:  # as it is: braces in a path of one's own mean nothing
        how = how.model_copy(update={"logdir": str(folder).replace("{", "{{").replace("}", "}}")})
    path = how.folder(name, trainer.task, seed, datetime.now().astimezone())
    if overwrite:
        clear(path)
    there = (path / "run.json").exists()
    if resume and not there:
        raise ConfigError(f"{path}: there is no run to resume; leave resume_from_checkpoint out, or name its folder")
    if there and not resume and folder is None and "{timestamp}" not in how.logdir:
        afresh = "give it a name of its own (model_name, run_name), or " if "{name}" in how.logdir else ""
        raise ConfigError(
            f"{path} already holds a run: go on with it by train(resume_from_checkpoint=True), or "
            "begin anew by train(overwrite=True); to keep it, "
            f"{afresh}choose another output_dir (save_directory)"
        )
    if there and (resume or folder is not None):
        found = RunFolder.open(path)
        newest = max((int(at.name.removeprefix("step-")) for at in checkpoint.steps(found)), default=0)
        return found, True if step is None or step >= newest else step
    return create(how, document, name=name, task=trainer.task, seed=seed), False
