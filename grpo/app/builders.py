"""Tasks, and the start and resumption of a run: the command line builds the same objects a script would."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo.app.settings import Layer, Resolved, flag_layer, layer, resolve
from grpo.config import ConfigError, GRPOConfig
from grpo.dialects import OWN
from grpo.errors import SamplesFailed
from grpo.run.config import RunConfig
from grpo.run.files import FolderError
from grpo.run.folder import RunFolder
from grpo.run.loop import run
from grpo.run.progress import printable
from grpo.run.session import Summary
from grpo.run.signals import INTERRUPTED, PREEMPTED
from grpo.run.trackers import TrackerError
from grpo.trainer import Diverged, GRPOTrainer, StepReport

FAILED, BAD_SETTINGS = 1, 2


@dataclass(frozen=True)
class Task:
    """A room by name: its settings class and how its trainer is made. Loaded when asked for."""

    module: str
    config: str
    make: str = "make_trainer"
    extra: str = ""
    """What `pip install 'anygrpo[…]'` must bring first."""
    dialect: str = "dreamer"
    """What flags and keys outside a block are written in."""
    needs: tuple[tuple[str, str], ...] = ()
    """Settings without which nothing can run, each with what to do."""

    def settings(self) -> type[GRPOConfig]:
        """The room's settings class."""
        found: type[GRPOConfig] = self._named(self.config)
        return found

    def trainer(self, config: GRPOConfig) -> GRPOTrainer:
        """The room's trainer."""
        self.expect_whole(config)
        make: Callable[[Any], GRPOTrainer] = self._named(self.make)
        return make(config)

    def front_door(self) -> Any:
        """The room's trainer class, for what a configuration alone cannot say."""
        return self._named("GRPOTrainer")

    def expect_whole(self, config: GRPOConfig) -> None:
        """Make sure that what the room cannot do without is there."""
        for name, remedy in self.needs:
            if not getattr(config, name):
                raise ConfigError(f"no {name} was named; {remedy}")

    def _named(self, name: str) -> Any:
        """Something of the room; loading it brings its libraries along."""
        try:
            return getattr(import_module(self.module), name)
        except ModuleNotFoundError as error:
            if not self.extra or (error.name or "").startswith("grpo"):
                raise
            raise ConfigError(f"this task needs {error.name}: pip install 'anygrpo[{self.extra}]'") from None


TASKS = {
    "bandit": Task("grpo.bandit", "BanditConfig"),
    "control": Task("grpo.control", "ControlConfig", extra="control"),
    "language": Task(
        "grpo.language",
        "LanguageConfig",
        extra="language",
        dialect="trl",
        needs=(
            ("model", "give --model with a hub id, a folder or a .gguf file"),
            ("dataset", "give --dataset with a file or a hub id, or name a data file first"),
        ),
    ),
    "worldmodel": Task("grpo.worldmodel", "WorldModelConfig", extra="worldmodel"),
}


def configs() -> dict[str, Task]:
    """Every task by name; only the chosen one loads its libraries."""
    return dict(TASKS)


def start(resolved: Resolved) -> int:
    """A new run; returns the exit code."""

    def begin() -> Summary:
        TASKS[resolved.task].expect_whole(resolved.config)
        folder = _create(resolved)
        try:
            return _run(resolved, folder, resume=False)
        finally:
            if not (folder.path / "metrics.jsonl").exists():  # it failed before its first step: nothing to keep
                shutil.rmtree(folder.path, ignore_errors=True)

    return _guarded(begin)


def resume(path: Path, flags: Sequence[tuple[str, str]]) -> int:
    """Go on with a run exactly where it stopped; flags may change how it is carried out, not what is learned."""

    def go_on() -> Summary:
        folder = RunFolder.open(path)
        flagged = flag_layer(flags)
        if "logdir" in flagged.run:
            raise ConfigError("a run goes on in its own folder; leave --logdir out, or copy the folder first")
        resolved = saved_settings(folder, flagged)
        return _run(resolved, folder, resume=True, keep=bool(flagged.run))

    return _guarded(go_on)


def saved_settings(folder: RunFolder, *further: Layer) -> Resolved:
    """The settings of a run, from its folder."""
    saved = {key: value for key, value in folder.config.items() if key != "resolved"}
    return resolve([layer({"dialect": OWN, **saved}, f"{folder.path}/config.json"), *further], configs())


def _guarded(job: Callable[[], Summary]) -> int:
    """The job's exit code; what went wrong in one line."""
    try:
        summary = job()
        if summary.reason in (PREEMPTED, INTERRUPTED):
            print(f"go on with: grpo train --resume {summary.folder}")
        return summary.exit_code
    except (FolderError, TrackerError, ConfigError) as error:
        print(f"grpo: {shown(error)}", file=sys.stderr)
        return BAD_SETTINGS
    except (Diverged, SamplesFailed, OSError) as error:
        print(f"grpo: {shown(error)}", file=sys.stderr)
        return FAILED


def shown(text: object) -> str:
    """Text that may quote a model, line by line safe on a terminal."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def _create(resolved: Resolved) -> RunFolder:
    """The run's folder, before anything heavy is built: an unwritable place is found at once."""
    now = datetime.now().astimezone()
    path = resolved.run.folder(resolved.name, resolved.task, resolved.config.seed, now)
    if "{timestamp}" in resolved.run.logdir:  # two runs in one second
        taken, number = path, 2
        while path.exists():
            path, number = taken.with_name(f"{taken.name}-{number}"), number + 1
    return RunFolder.create(
        path,
        task=resolved.task,
        config=_document(resolved),
        created=now.isoformat(timespec="seconds"),
        seed=resolved.config.seed,
        argv=sys.argv,
    )


def _document(resolved: Resolved) -> dict[str, Any]:
    """What the folder keeps: enough to do the same again, and every value in force."""
    every = {f"{block}.{name}": value for block, name, value, _ in resolved.table()}
    return {**resolved.document(), "resolved": every}


def _run(resolved: Resolved, folder: RunFolder, resume: bool, keep: bool = False) -> Summary:
    """The run; `keep`: how it is carried out changed, and the next resumption is to know."""
    how, config = resolved.run, resolved.config
    if hasattr(config, "run"):  # a room whose trainer writes models of its own wants to know where, and their name
        config = config.but(output_dir=str(folder.path), run_name=resolved.name)
    trainer: Any = TASKS[resolved.task].trainer(config)
    if hasattr(trainer.source, "folder"):  # a room that remembers more than memory holds
        trainer.source.folder = folder.path
    try:
        evaluate: Callable[[int], Any] | None = getattr(trainer.source, "evaluate", None)
        if how.evaluate_every is not None and evaluate is None:
            raise ConfigError(f"run.evaluate_every: the task {resolved.task} has no evaluation; leave it out")
        if how.evaluate_every is not None and getattr(trainer.source, "held_out", True) is None:
            how = _without_evaluation(resolved)
        steps = total_steps(trainer, how)
        if hasattr(trainer, "schedule"):
            trainer.schedule(steps)

        def at(point: str) -> None:
            nonlocal keep
            if keep and point == "step":  # not earlier: now the run holds the lock and has accepted the settings
                folder.write_config(_document(resolved))
                keep = False

        summary = run(
            trainer,
            steps,
            folder,
            resume=resume,
            **how.plan(),
            evaluate=evaluate if how.evaluate_every else None,
            stop=partial(_enough, how),
            at=at,
        )
        if summary.step > steps:
            done = f"{folder.path} has done {summary.step} steps already"
            raise ConfigError(f"{done}, more than run.steps={steps}; ask for more with --run.steps")
        if getattr(config, "push_to_hub", False) and summary.reason in ("done", "stopped"):
            print(f"uploaded: {trainer.push_to_hub(folder.path / 'model')}")
        return summary
    finally:
        trainer.source.close()


def _without_evaluation(resolved: Resolved) -> RunConfig:
    """There are no held-out rows: a preset's plan to look at them is given up, a user's is an error."""
    planned = {"evaluate_every": None, "best_by": "reward", "stop_at": None}
    for name in planned:
        asked = not resolved.origins.get(f"run.{name}", "preset").startswith("preset")
        if asked and (name == "evaluate_every" or "eval/" in resolved.run.best_by):
            raise ConfigError(f"run.{name}: there are no held-out rows; give --eval-dataset, or leave it out")
    judged = "eval/" in resolved.run.best_by
    return resolved.run.model_copy(update=planned if judged else {"evaluate_every": None})


def total_steps(trainer: Any, how: RunConfig) -> int:
    """Steps of the run: as given, or as many as the room counts for so many passes over its data, or 100."""
    counted: Callable[[RunConfig], int] | None = getattr(trainer, "total_steps", None)
    if counted is not None:
        return counted(how)
    if how.num_train_epochs is not None and how.steps is None:
        raise ConfigError("run.num_train_epochs: this task has no data set to pass over; use run.steps")
    return how.steps or 100


def _enough(how: RunConfig, report: StepReport) -> bool:
    """Whether the run has reached what it was for."""
    if how.env_steps is not None:
        if "env_steps" not in report:
            raise ConfigError("run.env_steps: this task counts no environment steps; use run.steps")
        if (report["env_steps"] or 0.0) >= how.env_steps:
            return True
    return how.reached(report)
