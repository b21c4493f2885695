"""Steps of a run with nothing on disk: seeded, timed, evaluated, their failures counted. A `Session` adds a folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.errors import SamplesFailed, warn
from grpo.protocols import State
from grpo.report import StepReport
from grpo.run import signals
from grpo.run.budget import WINDOW, FailureBudget
from grpo.run.exhibits import exhibit
from grpo.run.files import Row
from grpo.run.trackers import Trackers
from grpo.seeding import seed_all

if TYPE_CHECKING:
    from grpo.trainer import Trainer

NOTHING_LEARNED = (
    "nothing was learned: in every group all tries got the same reward; look at some with grpo view, then make the "
    "task easier at first, the groups larger, or the reward finer"
)
EXIT_CODES = {"done": 0, "stopped": 0, signals.PREEMPTED: 75, signals.INTERRUPTED: 130}
"""By reason; anything else is 1."""


@dataclass(frozen=True)
class Summary:
    """How a run ended and where its results are."""

    reason: str
    """done · stopped (by `stop`) · interrupted · preempted · failures (over budget) · unsaved (disk)"""
    step: int
    folder: Path | None
    """None: nothing was left on disk."""
    checkpoint: Path | None
    metrics: Row = field(default_factory=dict)
    """Of the last step."""
    events: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    time_split: Mapping[str, float] = field(default_factory=dict)
    """Shares of this process's steps, by what they were spent on."""
    why: str = ""
    """More about the reason, where there is more to say."""
    notes: tuple[str, ...] = ()
    """What happened meanwhile and is worth knowing, the first of each kind."""
    after: tuple[str, ...] = ()
    """Commands that make something of the folder."""
    instead: str = ""
    """What to do where commands cannot."""

    @property
    def outcome(self) -> str:
        """The reason in one word, as a person would say it: a run that reached its goal was not stopped."""
        if self.reason == "stopped" and self.why.startswith("solved"):
            return "solved"
        return "done" if self.reason == "stopped" and not self.why.startswith("stopped") and self.why else self.reason

    @property
    def exit_code(self) -> int:
        """What a command should return."""
        return EXIT_CODES.get(self.reason, 1)


class Stopwatch:
    """Handed to the trainer as `phase`: seconds by name since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.told: Callable[[str], None] = lambda name: None
        """Hears what begins, and an empty name when it has ended."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self.told(name)
        try:
            yield
        finally:
            self.told("")
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """What was measured; start anew."""
        taken, self._seconds = self._seconds, {}
        return taken


class Stepping:
    """What the loop does around one step, one method each; whatever needs a folder does nothing here."""

    def __init__(
        self, trainer: Trainer, failure_budget: float, states: Iterator[Any] | None = None, log_every: int = 1
    ) -> None:
        """states: of each step, where they are the caller's; log_every: steps between what trackers get."""
        self.trainer, self._states = trainer, states
        self.trackers, self._log_every, self._untracked = Trackers(_warned), log_every, False
        self.budget = FailureBudget(failure_budget)
        self.watch = Stopwatch()
        """Handed to the trainer as `phase`."""
        self._taught = False
        """Whether a group of this process's steps had a signal."""
        self._told_unanswered = False
        """Whether somebody was warned that part of an evaluation failed."""
        self._reason: str | None = None
        self._agreed: str | None = None
        self.why = ""
        self.seconds = 0.0
        self._row: Row = {}
        self._began = time.perf_counter()

    def skip(self) -> None:
        """Pass over the states of steps that an earlier process has done."""
        if self._states is not None:
            next(islice(self._states, self.trainer.steps_done, self.trainer.steps_done), None)

    def step(self) -> StepReport | None:
        """One step from its own seed; None where the states are used up."""
        began = time.perf_counter()
        states = None
        if self._states is not None and (states := next(self._states, None)) is None:
            return None
        seed_all(self.trainer.config.seed, self.trainer.steps_done, "train")
        report = self.trainer.step(states)
        self.seconds = time.perf_counter() - began
        return report

    def record(self, report: StepReport, evaluate: Callable[[int], Mapping[str, Any]] | None) -> Row:
        """The step's line, with what an evaluation adds to it."""
        self._row = {"step": report.step, **self.measured(report, evaluate)[0]}
        self.track(evaluate is not None)
        return self._row

    def track(self, evaluated: bool) -> None:
        """Tell the trackers of the step, if it is their turn or something was evaluated."""
        self._untracked = self._row["step"] % self._log_every != 0 and not evaluated
        if not self._untracked:
            self.trackers.log(self._row["step"], self._row)

    def track_last(self) -> None:
        """The last step, where the trackers have not got it."""
        if self._untracked:
            self.trackers.log(self._row["step"], self._row)
            self._untracked = False

    def measured(
        self, report: StepReport, evaluate: Callable[[int], Mapping[str, Any]] | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Metrics of the step, an evaluation's among them, and seconds by phase."""
        metrics = {"samples": len(report.experience), **report.metrics}
        seconds = self.watch.take()
        if evaluate is not None:
            began = time.perf_counter()
            with self.watch("evaluate"):
                seed_all(self.trainer.config.seed, report.step, "evaluate")
                found = evaluate(report.step)
            self.seconds += time.perf_counter() - began
            seconds["evaluate"] = self.watch.take()["evaluate"]  # its completions and rewards are not the step's
            named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in found.items()}
            report.metrics |= named
            metrics |= named
            self._tell_unanswered(report.step, named)
        return metrics, seconds

    def _tell_unanswered(self, step: int, found: Mapping[str, Any]) -> None:
        """Part of an evaluation failed, which its means do not show."""
        failed = sum(value or 0.0 for name, value in found.items() if name.rpartition("/")[2] == "failed")
        if failed:
            message = f"{failed:.0f} tries of the evaluation failed"
            self.tell(step, "evaluation_failed", message)
            if self.trainer.ranks.chief and not self._told_unanswered:
                self._told_unanswered = True
                _warned(step, "evaluation_failed", message)

    def count_failures(self, report: StepReport) -> None:
        """Failed samples: an error on the first step, then counted against the budget."""
        failed, samples = report.metrics.get("failed") or 0.0, float(len(report.experience))
        self.budget.add(failed, report.metrics.get("samples") or samples)
        self._taught = self._taught or _teaches(report)
        if not failed:
            return
        message = f"{failed:.0f} of {samples:.0f} samples failed{self._first_failure(report)}"
        self.tell(report.step, "samples_failed", message)
        if report.step == 1:
            raise SamplesFailed(f"on the first step {message}")
        if self.budget.spent():
            count, most = f"{self.budget.failed:.0f}", f"{self.budget.allowed:.0f}"
            self.why = f"{count} samples failed in {WINDOW} steps, more than the {most} that may (run.failure_budget)"
            self.end("failures")
            self.tell(report.step, "failure_budget_spent", self.why)

    def _first_failure(self, report: StepReport) -> str:
        """What the source shows of the first failed row."""
        try:
            rows, _ = exhibit(report, self.trainer.source, None)
        except Exception as error:
            return f" (and cannot be shown: {type(error).__name__}: {error})"
        return next((f": {row['error']}" for row in rows if row["status"] == "failed" and "error" in row), "")

    @property
    def reason(self) -> str | None:
        """Why the loop ends; None: it goes on."""
        return self._reason

    def over(self, asked: signals.StopSignals) -> str | None:
        """Why no further step is begun; None: one is. On several ranks what all have agreed on, and nothing since."""
        return self.reason or asked.reason if self.trainer.ranks.size == 1 else self._agreed

    def agree(self, asked: signals.StopSignals, save: bool = False) -> bool:
        """At the end of a step: whoever was asked to stop, or wants to, stops all; whether the chief wants to save."""
        ranks = self.trainer.ranks
        if ranks.size == 1:
            return save
        words = {"reason": self.reason, "asked": asked.reason, "why": self.why, "save": save}
        found = [told.values for told in ranks.gather(State(words, {}), "the end of a step")]
        for told in reversed(found):  # of several reasons that of the first rank stands, everywhere
            if told["reason"] is not None:
                self._reason, self.why = told["reason"], told["why"]
        self._agreed = self._reason or next((told["asked"] for told in found if told["asked"] is not None), None)
        return bool(found[0]["save"])

    def end(self, reason: str, why: str = "") -> None:
        """Why the loop ends; the first reason stands."""
        if self._reason is None:
            self._reason, self.why = reason, why or self.why

    def summary(self) -> Summary:
        """How it ended."""
        seconds = time.perf_counter() - self._began
        reason, steps = self.reason or "done", self.trainer.steps_done
        return Summary(reason, steps, None, None, self._row, {}, seconds, why=self.why, notes=self.untaught())

    def untaught(self) -> tuple[str, ...]:
        """The warning that a run ends with whose groups never had a signal."""
        return () if self._taught or not self._row else (NOTHING_LEARNED,)

    # --- what only a folder makes something of ----------------------------------------------------------------------

    def tell(self, step: int, event: str, message: str) -> None:
        """Something worth knowing."""

    def settle(self) -> None:
        """Hear of a save that is under way, if it has ended."""

    def sample(self, report: StepReport, groups: int | None, filmed: bool) -> None:
        """Groups to look at."""

    def go_on(self, sample_every: int) -> None:
        """Told before the first step of a run that is gone on with."""

    def thin_samples(self, step: int, every: int, keep: int) -> None:
        """Of older steps, fewer."""

    def thin_lines(self, step: int, keep: int, evaluate_every: int | None) -> None:
        """Of older steps, fewer lines."""

    def save(self, last: bool = False, planned: bool = True) -> None:
        """A checkpoint."""

    def close(self, curve: bool) -> None:
        """What is left when the loop has ended: the trackers' last row."""
        self.track_last()


class Following(Stepping):
    """A rank beside the chief, which has the folder: it steps, evaluates and agrees, and writes nothing."""

    def begin(self, told: State) -> None:
        """Go on from the checkpoint that the chief has read, where there is one."""
        if told.values["state"] is not None:
            self.trainer.load_state(State(told.values["state"], told.arrays))
        if told.values["resumed"]:
            self.skip()

    def count_failures(self, report: StepReport) -> None:
        """An error on the first step, on every rank; later ones are counted by the chief, who has seen them all."""
        if report.step < 2:
            super().count_failures(report)

    def save(self, last: bool = False, planned: bool = True) -> None:
        """What is this rank's own goes to the chief."""
        self._take_part("a checkpoint")

    def close(self, curve: bool) -> None:
        """The chief makes something of the best policy, and needs the last one back; how it ended is its word."""
        self._reason = self._take_part("what is left")

    def _take_part(self, what: str) -> str | None:
        """Give the chief what is this rank's own, if it wants that; why it ends, if it does."""
        told = self.trainer.ranks.broadcast(None, what).values
        if told["go"]:
            self.trainer.state()
        return None if told["reason"] is None else str(told["reason"])


def _teaches(report: StepReport) -> bool:
    """Whether a teacher did, or tries of a group got different rewards; or, where a baseline compares with others too,
    any did.
    """
    if report.metrics.get("teacher_kl"):
        return bool(report.metrics.get("grad_norm"))
    if report.metrics.get("reward", 0.0) is None:  # nobody got one
        return False
    if report.metrics.get("frac_reward_zero_std") != 1.0:
        return True
    rows = report.experience.rollouts
    judged = rows.reward_parts_NK if rows.reward_N is None else rows.reward_N
    got = judged if rows.reward_NT is None else rows.reward_NT[rows.mask_NT]
    alike = got is not None and bool(((got == got[:1]) | ((got != got) & (got[:1] != got[:1]))).all())
    return not alike and bool(report.metrics.get("grad_norm"))


def _warned(step: int, event: str, message: str) -> None:
    """What a folder would keep as an event."""
    warn(f"step {step}: {message}")
