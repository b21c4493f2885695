"""Tasks, and the start and resumption of a run: the command line builds the same objects a script would."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.agreement import here
from grpo.app.loading import loading
from grpo.app.ranks import excuse, expect_alike, expect_divided, say
from grpo.app.settings import COMMAND_LINE, Layer, Resolved, flag_layer, layer, resolve
from grpo.app.trust import expect_trusted, untrusted
from grpo.config import ConfigError, GRPOConfig
from grpo.dialects import OWN
from grpo.errors import RankFailed, RanksDiffer, RanksLost, Refused, SamplesFailed, Unanswered, install
from grpo.report import Diverged
from grpo.run import start as door
from grpo.run.config import RunConfig
from grpo.run.folder import Elsewhere, RunFolder
from grpo.run.progress import told
from grpo.run.redaction import hidden_in
from grpo.run.signals import INTERRUPTED, PREEMPTED
from grpo.run.stepping import Summary

if TYPE_CHECKING:
    from grpo.run.trainer import GRPOTrainer

FAILED, BAD_SETTINGS = 1, 2


@dataclass(frozen=True)
class Task:
    """A room by name: its settings class and how its trainer is made. Loaded when asked for."""

    module: str
    config: str
    make: str = "make_trainer"
    speaker: str = ""
    """Module and function that make one which needs no reward; empty: the same."""
    judged: str = ""
    """Module and function that make one to look at; empty: the same."""
    handed_over: str = ""
    """Module and function that find in a run's folder what a script had handed over as an object; empty: nothing."""
    planner: str = ""
    """Module and function that say what a step will take; empty: nobody can."""
    prepared: str = ""
    """Module and function that make a new run's trainer sooner, of what one like it has left; empty: nothing can."""
    extra: str = ""
    """What `pip install 'anygrpo[…]'` must bring first."""
    library: str = ""
    """What that brings first of all: missed before anything else is asked for."""
    dialect: str = "dreamer"
    """What flags and keys outside a block are written in."""
    needs: tuple[tuple[str, str], ...] = ()
    """Settings without which nothing can run, each with what to do."""

    def settings(self) -> type[GRPOConfig]:
        """The room's settings class."""
        found: type[GRPOConfig] = self._named(self.config)
        return found

    def trainer(self, config: GRPOConfig, folder: Path | None = None) -> GRPOTrainer:
        """The room's trainer; folder: of the run that is gone on with."""
        given = self._whole(config, folder)
        module, _, name = self.prepared.partition(":")
        if name and folder is None:
            with loading():
                found: GRPOTrainer | None = self._named(name, module)(config)
            if found is not None:
                return found
        make: Callable[..., GRPOTrainer] = self._named(self.make)
        return make(config, **given)

    def looked_at(self, config: GRPOConfig, judged: bool, folder: Path) -> GRPOTrainer:
        """The room's trainer where nothing is learned; not judged: without what judges it, and nothing is evaluated."""
        given = self._whole(config, folder, () if judged else ("dataset",))
        module, _, name = (self.judged if judged else self.speaker).partition(":")
        make: Callable[..., GRPOTrainer] = self._named(name or self.make, module)
        return make(config, **given)

    def _whole(self, config: GRPOConfig, folder: Path | None, spared: Collection[str] = ()) -> dict[str, Any]:
        """What the settings do not say, from the folder; refused where something is missing all the same."""
        module, _, name = self.handed_over.partition(":")
        given: dict[str, Any] = self._named(name, module)(config, folder) if name and folder is not None else {}
        self.expect_whole(config, (*given, *spared))
        return given

    def plan(self, config: GRPOConfig, gpu: str | None, as_json: bool) -> tuple[bool, str]:
        """Whether a step fits on a GPU, and what it takes there by part; nothing of it is made."""
        module, _, name = self.planner.partition(":")
        if not name:
            raise ConfigError(
                f"{self.module.removeprefix('grpo.')}: only steps of language models are planned; networks of this "
                "task are small, and its memory is what its settings hold (environments, replay_capacity)"
            )
        self.expect_whole(config, ("dataset",))
        find: Callable[[Any, str | None, bool], tuple[bool, str]] = self._named(name, module)
        return find(config, gpu, as_json)

    def front_door(self) -> Any:
        """The room's trainer class, for what a configuration alone cannot say."""
        return self._named("GRPOTrainer")

    def lacking(self, config: GRPOConfig, spared: Collection[str] = ()) -> str:
        """What the room cannot do without and is not named, with the remedy, but for what is `spared`."""
        missing = (told for told in self.needs if told[0] not in spared and not getattr(config, told[0]))
        return next((f"no {name} was named; {remedy}" for name, remedy in missing), "")

    def expect_whole(self, config: GRPOConfig, spared: Collection[str] = ()) -> None:
        """Make sure that nothing is lacking."""
        if missing := self.lacking(config, spared):
            if self.library and find_spec(self.library) is None:  # first things first
                raise ConfigError(f"this task needs {self.library}: {install(self.extra)}")
            raise ConfigError(missing)

    def _named(self, name: str, module: str = "") -> Any:
        """Something of the room; loading it brings its libraries along."""
        try:
            with loading():
                return getattr(import_module(module or self.module), name)
        except ModuleNotFoundError as error:
            if not self.extra or (error.name or "").startswith("grpo"):
                raise
            raise ConfigError(f"this task needs {error.name}: {install(self.extra)}") from None


TASKS = {
    "bandit": Task("grpo.bandit", "BanditConfig"),
    "control": Task(
        "grpo.control", "ControlConfig", extra="control", prepared="grpo.control.compiled.prepared:prepared"
    ),
    "language": Task(
        "grpo.language",
        "LanguageConfig",
        extra="language",
        library="transformers",
        speaker="grpo.language.looking:make_speaker",
        judged="grpo.language.looking:make_judged",
        handed_over="grpo.language.model.architecture:handed_over",
        planner="grpo.language.planning.show:planned",
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


def start(resolved: Resolved, overwrite: bool = False) -> int:
    """A new run, where need be in the place of another; returns the exit code."""

    def begin() -> Summary:
        TASKS[resolved.task].expect_whole(resolved.config)
        expect_divided(resolved)
        expect_alike(resolved)
        for remark in resolved.remarks if here().rank == 0 else ():
            print(f"grpo: {remark}", file=sys.stderr)
        config, how = resolved.config, _named(resolved)
        about: dict[str, Any] = {"name": resolved.name, "task": resolved.task, "seed": config.seed, "argv": sys.argv}
        about["overwrite"] = overwrite
        document = document_of(resolved, how)
        folder = door.shared(here(), lambda: door.create(how, document, **about))
        try:
            return _run(resolved, how, folder, resume=False)
        finally:
            door.discard_unbegun(folder)

    return _guarded(begin)


def resume(path: Path, flags: Sequence[tuple[str, str]], trust: bool = False) -> int:
    """Go on with a run exactly where it stopped; flags may change how it is carried out, not what is learned.

    trust: also where that runs code which lies inside of the folder.
    """

    def go_on() -> Summary:
        folder = door.shared(here(), lambda: RunFolder.open(path))
        flagged = flag_layer(flags)
        if "logdir" in flagged.run:
            raise ConfigError("a run goes on in its own folder; leave --logdir out, or copy the folder first")
        resolved = saved_settings(folder, flagged, trust=trust)
        _expect_given_again(resolved, folder)
        expect_alike(resolved)
        return _run(resolved, door.as_before(_named(resolved), folder), folder, resume=True)

    return _guarded(go_on)


def saved_settings(
    folder: RunFolder | Elsewhere, *further: Layer, trust: bool = False, unused: Collection[str] = ()
) -> Resolved:
    """The settings of a run, from its folder; without `trust`, none that run code which came with it.

    unused: settings whose code will not be loaded.
    """
    saved = {key: value for key, value in folder.config.items() if key != "resolved"}
    if saved.get("task") not in (None, *TASKS):
        raise ConfigError(
            f"{folder.path}: a script made this run, with a policy of its own; call train(folder=…) there to go on"
        )
    own = layer({"dialect": OWN, **saved}, str(folder.path / "config.json"))
    resolved = resolve([own, *further], configs())
    if not trust:
        expect_trusted(resolved, folder.path, unused)
    return resolved


def _expect_given_again(resolved: Resolved, folder: RunFolder | Elsewhere) -> None:
    """Refuse to go on with what stands in the place of a secret, where another value was meant."""
    given = dict(resolved.config) | {f"run.{name}": value for name, value in resolved.run if name != "logdir"}
    for name, value in given.items():
        where = hidden_in(value, name)
        if where is not None and not resolved.origins.get(name, "").startswith(COMMAND_LINE):
            raise ConfigError(
                f"{folder.path / 'config.json'}: {where} was taken for a secret and not kept; give {name} again on the "
                f"command line, whole: --{name.replace('_', '-')} …"
            )


def _confirmed(path: Path) -> str:
    """The flag that going on with a run will need, where its settings name code that has to be confirmed."""
    folder = RunFolder.open(path)
    return " --trust" if untrusted(saved_settings(folder, trust=True), folder.path) is not None else ""


def _guarded(job: Callable[[], Summary]) -> int:
    """The job's exit code; what went wrong in one line."""
    try:
        summary = job()
        if summary.reason in (PREEMPTED, INTERRUPTED) and summary.folder is not None:
            print(f"go on with: grpo train --resume {summary.folder}{_confirmed(summary.folder)}")
        return summary.exit_code
    except Refused as error:
        return _failed(told(error), BAD_SETTINGS)
    except (Diverged, SamplesFailed, Unanswered, RankFailed, RanksDiffer, RanksLost, OSError) as error:
        return _failed(told(error), FAILED, is_why=type(error) is not RanksLost)
    except MemoryError as error:
        what = f" ({told(error)})" if str(error) else ""
        return _failed(f"there is not enough memory{what}; lower what is large among the settings", FAILED)


def _failed(why: str, code: int, is_why: bool = True) -> int:
    """Say in one line why a run has ended, to the other ranks too, unless this one has only lost them."""
    say(f"{excuse(why) if is_why else ''}{why}")
    return code


def _named(resolved: Resolved) -> RunConfig:
    """The plan with the run's name in it, so that a run that is resumed is still called so."""
    return resolved.run.model_copy(update={"name": resolved.name})


def document_of(resolved: Resolved, how: RunConfig) -> dict[str, Any]:
    """What the folder keeps: enough to do the same again, and every value in force."""
    named = replace(resolved, run=how)
    every = {f"{block}.{name}": value for block, name, value, _ in named.table()}
    return {**named.document(), "resolved": every}


def _run(resolved: Resolved, how: RunConfig, folder: RunFolder | Elsewhere, resume: bool) -> Summary:
    """Build the room's trainer, and start."""
    trainer = TASKS[resolved.task].trainer(resolved.config, folder.path if resume else None)
    try:
        if how.evaluate_every is not None and trainer.evaluation is None:
            how = _without_evaluation(resolved, how, trainer.cannot_evaluate())
        summary = door.start(trainer, how, folder, resume=resume, document=document_of(resolved, how))
        if summary.step > (steps := trainer.total_steps(how)):
            done = f"{folder.path} has done {summary.step} steps already"
            raise ConfigError(f"{done}, more than run.steps={steps}; ask for more with --run.steps")
        return summary
    finally:
        trainer.source.close()


def _without_evaluation(resolved: Resolved, how: RunConfig, why: str) -> RunConfig:
    """There is nothing to evaluate: a preset's plan to do so is given up, a user's is an error."""
    planned = {"evaluate_every": None, "best_by": "reward", "stop_at": None}
    for name in planned:
        asked = not resolved.origins.get(f"run.{name}", "preset").startswith("preset")
        if asked and (name == "evaluate_every" or "eval/" in how.best_by):
            raise ConfigError(f"run.{name}: {why}")
    judged = "eval/" in how.best_by
    print(f"grpo: the preset's evaluation every {how.evaluate_every} steps is left out: {why}", file=sys.stderr)
    return how.model_copy(update=planned if judged else {"evaluate_every": None})
