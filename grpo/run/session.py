"""What the loop does around one step, one method each, and what these share."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from grpo.capabilities import Leaves, Measures, Plots
from grpo.errors import line
from grpo.protocols import State
from grpo.report import Diverged, StepReport
from grpo.run import checkpoint, signals
from grpo.run.budget import WINDOW
from grpo.run.exhibits import exhibit
from grpo.run.files import UNFIT, FolderError, Row
from grpo.run.films import StepFilms, illustrate
from grpo.run.folder import RunFolder, versions
from grpo.run.memory import memory
from grpo.run.saving import MAX_UNSAVED, Saving
from grpo.run.stepping import Stepping, Summary
from grpo.run.timing import time_split
from grpo.run.trackers import Trackers

if TYPE_CHECKING:
    from grpo.trainer import Trainer


class Session(Stepping):
    """One process's part of a run, from its beginning or a checkpoint to its end.

    A checkpoint's arrays are copied between steps; its files are written while training goes on (`Saving`). Whatever
    reads checkpoints settles that first, and so does leaving.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        keep_last: int | None,
        keep_best: int,
        best_by: str,
        failure_budget: float,
        at: Callable[[str], None] | None,
        log_every: int = 1,
        states: Iterator[Any] | None = None,
    ) -> None:
        super().__init__(trainer, failure_budget, states, log_every)
        self.folder, self.at = folder, at
        self.keep_best, self.best_by = keep_best, best_by
        self.saving = Saving(folder, keep_last, keep_best, at)
        self.trackers = Trackers(self.tell, folder)
        self.films = StepFilms(folder)
        given = trainer.config.model_dump(mode="json")
        folder.redactor.learn(given)  # a folder that was opened knows only what is in it, where secrets are not
        self.settings = folder.redactor.tree(given)
        self._latest: Row = {}
        self._samples_off = self._samples_failed = False
        self._unrecorded = 0
        self._first = 0
        """Steps that were done when this process took over."""
        self._status: dict[str, Any] = {}

    def begin(self, resume: bool | int, harmless: frozenset[str]) -> State:
        """Take up the run where its checkpoint left it, or make sure that there is nothing to overwrite.

        What other ranks must know of it: they get the checkpoint from here.
        """
        found: checkpoint.Checkpoint | None = None
        trainer, folder = self.trainer, self.folder
        if trainer.ranks.size == 1:  # else all have done that together
            checkpoint.check(trainer.state())
        if resume is not False:
            folder.metrics(), folder.timing()  # damage is told before anything is changed

            def take(found: checkpoint.Checkpoint) -> None:
                defaults = type(trainer.config).model_construct().model_dump(mode="json")
                # What is taken for a secret now may have been written by an older version.
                manifest = found.manifest | {"settings": folder.redactor.tree(found.manifest["settings"])}
                checkpoint.expect_same_settings(manifest, self.settings, harmless, defaults)
                checkpoint.restore(trainer, found)

            found = checkpoint.resume_point(folder, None if resume is True else resume, take)
            if found is not None:
                self.saving.step = found.step
                if found.manifest["versions"] != versions():
                    folder.event(
                        found.step, "versions_changed", "bit-exact resume is promised on the same versions only"
                    )
            elif trainer.steps_done:
                ahead = f"the trainer has done {trainer.steps_done} steps"
                raise checkpoint.CheckpointError(f"{folder.path} has no checkpoint and {ahead}; build it anew")
            checkpoint.sweep(folder, after=trainer.steps_done)
            folder.truncate_after(trainer.steps_done)
            folder.event(trainer.steps_done, "resumed", f"from {found.path.name if found else 'the start'}")
        before: deque[Row] = deque(maxlen=WINDOW)
        for row in folder.each_step():
            before.append(row)
            self._latest |= {name: value for name, value in row.items() if value is not None}
        self._row = before[-1] if before else {}
        self._taught = bool(before)  # what earlier steps taught is not known here
        done = self._row.get("step", 0)
        if resume is False and (before or checkpoint.steps(folder)) and done != trainer.steps_done:
            held = f"{folder.path} already holds {done} steps, the trainer has done {trainer.steps_done}"
            raise checkpoint.CheckpointError(f"{held}; pass resume=True, or create another folder")
        if resume is not False and done != trainer.steps_done:
            folder.event(trainer.steps_done, "metrics_incomplete", f"metrics.jsonl ends at step {done}")
        self.budget.replay(before)
        self._first = trainer.steps_done
        if resume is not False:
            self.skip()
        values = {"resumed": resume is not False, "state": None if found is None else dict(found.state.values)}
        return State(values, {} if found is None else found.state.arrays)

    def announce(self, steps: int, document: Mapping[str, Any] | None = None) -> None:
        """Say what is going on, for the viewer.

        document: what config.json is to say; written where a resumed run is carried out in another way than before.
        """
        if document is not None and self.trainer.steps_done <= steps and self.folder.carried_out_otherwise(document):
            self.folder.write_config(document)
        self._status = {"steps": steps, "recipe": self.trainer.recipe.told(), "reason": None}
        self.folder.write_status(self._status)
        self.trainer.run_folder = self.folder.path

    def step(self) -> StepReport | None:
        """One step from its own seed; one that diverged leaves what it looked like."""
        if self.at is not None:
            self.at("step")
        try:
            return super().step()
        except Diverged as error:
            self._dump(error)
            raise

    def record(self, report: StepReport, evaluate: Callable[[int], Mapping[str, Any]] | None) -> Row:
        """The step's lines, then the trackers."""
        metrics, seconds = self.measured(report, evaluate)
        try:
            row = self.folder.append_metrics(report.step, metrics)
            source = self.trainer.source
            measures = source.measures() if isinstance(source, Measures) else {}
            measures = {**measures, **self.trainer.pace.measures()}
            self.folder.append_timing(report.step, {**seconds, **measures, **memory()}, self.seconds)
            self._unrecorded = 0
        except OSError as error:
            row = {"step": report.step, **metrics}
            self._full(report.step, error)
        self._row = row
        self._latest |= {name: value for name, value in row.items() if value is not None}
        if report.metrics.get("updates_skipped"):
            self.folder.event(
                report.step, "updates_skipped", f"{report.metrics['updates_skipped']:.0f} updates left out"
            )
        self.track(evaluate is not None)
        return row

    def _full(self, step: int, error: OSError) -> None:
        """The disk takes no more lines: samples are given up first, then, after a few steps, the run."""
        self._samples_off = True
        self._unrecorded += 1
        self.folder.alarm(step, "metrics_failed", f"step {step} was not recorded: {error}")
        if self._unrecorded >= MAX_UNSAVED:
            self.why = f"{MAX_UNSAVED} steps in a row were not recorded: {error}; make room, then resume"
            self.end("unsaved")

    def sample(self, report: StepReport, groups: int | None, filmed: bool) -> None:
        """Keep some groups to look at, and films of them; the first thing to be given up when the disk is full."""
        if self._samples_off:
            return
        try:
            rows, arrays = exhibit(report, self.trainer.source, groups, self.trainer.recipe)
            illustrate(self.folder, report, self.trainer.source, rows)
            if filmed:
                self.films.add(report, self.trainer.source, rows)
            self.folder.write_samples(report.step, rows, arrays)
        except OSError as error:
            self._samples_off = True
            self.folder.alarm(report.step, "samples_off", f"no groups are kept from here on: {error}")
        except Exception as error:  # of the room's own code, say: looking on must not end a run
            if not self._samples_failed:
                self._samples_failed = True
                what = f"the groups of step {report.step} were not kept: {type(error).__name__}: {error}"
                self.folder.event(report.step, "samples_not_kept", f"{what}; others that fail are not told")

    def go_on(self, sample_every: int) -> None:
        """Drop groups that were kept because theirs was the last step: a run that was never cut has none."""
        last = self.trainer.steps_done
        if self._first and last > 1 and last % sample_every:
            self.folder.drop_samples(lambda step: step == last)

    def thin_samples(self, step: int, every: int, keep: int) -> None:
        """Groups of older steps, but for every so many, go."""
        with self._thinning(step, "samples"):
            self._thinned(step, "samples", self.folder.thin_samples(step, every, keep), f"run.keep_samples={keep}")

    def thin_lines(self, step: int, keep: int, evaluate_every: int | None) -> None:
        """Lines of older steps, but for every so many, go; a save, which waits for lines to be on the disk, first."""
        self.saving.settle()
        with self._thinning(step, "lines"):
            self._thinned(step, "lines", self.folder.thin_lines(step, keep, evaluate_every), f"run.keep_metrics={keep}")

    def _thinned(self, step: int, what: str, gone: int, setting: str) -> None:
        """Said the first time that something has gone: it does not come back."""
        if gone and not self.folder.counts[name := f"{what}_thinned"]:
            self.folder.event(step, name, f"{gone} {what} of older steps went ({setting}; None: all stay)")

    @contextmanager
    def _thinning(self, step: int, what: str) -> Iterator[None]:
        """A folder that cannot be thinned, or holds lines of somebody else's, grows, and the run goes on."""
        try:
            yield
        except (OSError, FolderError) as error:
            self.folder.event(step, "not_thinned", f"{what} of older steps were not thinned: {error}")

    def tell(self, step: int, event: str, message: str) -> None:
        """A line of events.jsonl."""
        self.folder.event(step, event, message)

    @property
    def reason(self) -> str | None:
        """Why the loop ends; None: it goes on."""
        return "unsaved" if self.saving.given_up else super().reason

    def save(self, last: bool = False, planned: bool = True) -> None:
        """A checkpoint of the step just done, published while training goes on; the last one before this returns.

        One that was not planned stays until the next, and is never the best: what is kept must not depend on the clock.
        """
        with self.watch("checkpoint"):
            self.saving.settle()
            step = self.trainer.steps_done
            wanted = not (self.saving.step == step or step == 0 or (self.reason is not None and not last))
            if not self._everybody(wanted, "a checkpoint"):
                return
            how: dict[str, Any] = {"score": self._score(step) if planned else None, "planned": planned}
            self.saving.save(checkpoint.snapshot(self.trainer.state(), step, settings=self.settings, **how), last)

    def _everybody(self, wanted: bool, what: str) -> bool:
        """Whether all ranks turn to something that the chief wants."""
        self.trainer.ranks.broadcast(State({"go": wanted, "reason": self.reason}, {}), what)
        return wanted

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No save outlives the run; a second Ctrl-C does not wait for more of it than the file it is at."""
        try:
            self.saving.finish(cut=kind is not None and issubclass(kind, KeyboardInterrupt))
        finally:
            if self._status:
                why = {"reason": _ending(kind) or self.reason}
                if error is not None and not isinstance(error, KeyboardInterrupt):
                    why["error"] = _said(error, trace)
                self.folder.write_status(self._status | why)

    def draw(self) -> str:
        """curve.png, if it can be drawn; else why not."""
        try:
            from grpo.run.plot import draw  # here: it loads matplotlib

            source = self.trainer.source
            draw(self.folder, source.panels if isinstance(source, Plots) else ())
            return ""
        except (ImportError, OSError, ValueError, FolderError) as error:
            return f"curve.png was not drawn: {error}"

    def leave(self) -> None:
        """What the source makes of the best policy (a video, say), for the folder and the trackers."""
        source = self.trainer.source
        wanted = self.reason in ("done", "stopped") and isinstance(source, Leaves) and self.saving.step is not None
        if not self._everybody(wanted, "what is left") or not isinstance(source, Leaves):
            return
        last, step = self.trainer.state(), self.trainer.steps_done
        try:
            best = checkpoint.best(self.folder) if self.keep_best else None
            if best is not None:
                self.trainer.load_state(best.state)
            for kind, path in source.leave(self.folder.path).items():
                self.trackers.show(step, kind, path)
        except Exception as error:  # whatever drawing and encoding may raise: the run itself is done
            self.folder.event(step, "nothing_to_show", str(error))
        finally:
            self.trainer.load_state(last)

    def settle(self) -> None:
        """How the save that is under way has ended, if it has."""
        self.saving.settle(wait=False)

    def close(self, curve: bool) -> None:
        """The trackers' last row, the curve, and what the source makes of the policy."""
        name = self.best_by.removeprefix("-")
        if self.keep_best and self._latest and name not in self._latest and self.reason in ("done", "stopped"):
            missing = f"no step has reported {name} (run.best_by)"
            if name.startswith("eval/") and not any(known.startswith("eval/") for known in self._latest):
                missing = "the run ended before its first evaluation (run.evaluate_every)"
            missing += ": the last checkpoint stands for the best"
            self.folder.event(self.trainer.steps_done, "best_by_missing", missing)
        super().close(curve)
        with self.watch("closing"), ThreadPoolExecutor(1) as aside:
            drawn = aside.submit(self.draw) if curve else None
            self.leave()  # in this thread, where Ctrl-C is heard; a film is encoded by a process of its own
            if drawn is not None and (why := drawn.result()):
                self.folder.event(self.trainer.steps_done, "no_curve", why)

    def summary(self) -> Summary:
        """How it ended."""
        saved = self.saving.step
        path = None if saved is None else self.folder.checkpoints / f"step-{saved:08d}"
        return Summary(
            self.reason or "done",
            self.trainer.steps_done,
            self.folder.path,
            path,
            self._row,
            dict(self.folder.counts),
            time.perf_counter() - self._began,
            self._time_split(),
            self.why or self.saving.why,
            (*self.untaught(), *self._told()),
        )

    def _told(self) -> list[str]:
        """The first message of each kind of event of this process, but for what the end tells anyway."""
        first: dict[str, str] = {}
        with suppress(FolderError, *UNFIT):
            for event in self.folder.events():
                if event["step"] >= self._first and event["event"] in self.folder.counts:
                    first.setdefault(event["event"], str(event["message"]))
        every = [*first.values()]  # one that another tells in full is told once
        told = {name: said for name, said in first.items() if not any(said in one and said != one for one in every)}
        return [said if (n := self.folder.counts[name]) == 1 else f"{said} ({n} times)" for name, said in told.items()]

    def _time_split(self) -> dict[str, float]:
        """Of this process's steps; nothing where timing.jsonl holds a line that is not ours."""
        try:
            return time_split(row for row in self.folder.each_step("timing.jsonl") if row["step"] > self._first)
        except (FolderError, *UNFIT):
            return {}

    def _score(self, step: int) -> float | None:
        """The metric `best_by` of this very step, turned so that higher is better; None where it was not measured."""
        if not self.keep_best:
            return None
        name = self.best_by.removeprefix("-")
        value = self._row.get(name) if self._row.get("step") == step else None
        if value is None:
            return None
        return -value if self.best_by.startswith("-") else float(value)

    def _dump(self, error: Diverged) -> None:
        """The metrics and arrays of the step that did it, for looking at."""
        self.record(error.report, None)
        self.track_last()
        self.folder.event(error.report.step, "diverged", str(error))
        try:
            shown = exhibit(error.report, self.trainer.source, None)
            self.folder.write_samples(error.report.step, *shown, kind="diverged")
        except Exception as reason:  # what is raised is that it diverged
            self.folder.event(error.report.step, "samples_not_kept", f"{type(reason).__name__}: {reason}")


def _said(error: BaseException, trace: TracebackType | None) -> str:
    """An exception in a line, with the place it came from."""
    frames = traceback.extract_tb(trace)
    return f"{line(error)} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else line(error)


def _ending(kind: type[BaseException] | None) -> str | None:
    """Why a run was left by an exception."""
    if kind is None:
        return None
    if issubclass(kind, KeyboardInterrupt):
        return signals.INTERRUPTED
    return "diverged" if issubclass(kind, Diverged) else kind.__name__
