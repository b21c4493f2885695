"""Callbacks: plain functions of a report, or transformers' `TrainerCallback` objects, and the history these read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo.language.compat.history import earlier_rows, expect_known, final_row, mean_row, step_row
from grpo.recipes import Recipe
from grpo.run.config import RunConfig
from grpo.run.folder import RunFolder
from grpo.trainer import StepReport, Trainer

if TYPE_CHECKING:
    from grpo.language.compat.state import RunState

MOST = 10_000
"""Rows of `TrainerState.log_history`, the last ones: a run may be longer than memory is large."""


class Callbacks:
    """What a user wants to be told.

    A function gets each report and ends the run by returning False. A `TrainerCallback` gets the events of
    transformers' trainers with `args`, `state` and `control`, whose flags are heeded: should_training_stop,
    should_save, should_evaluate and should_log.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self.callbacks: list[Any] = []
        """Functions and objects, in the order they came."""
        self.known: Mapping[str, Any] = {}
        """What every event hands over besides: model, processing_class, optimizer."""
        self.log_every = 1
        self.control: Any = None
        """transformers' TrainerControl, with the flags that callbacks set."""
        self.running = False
        """Whether a run is under way."""
        self._args: Callable[[], Any] = lambda: None
        self._state: Any = None
        self._waiting: list[dict[str, float]] = []
        self._said: dict[str, float] = {}
        self._began = self._step_began = time.perf_counter()
        self._first, self._samples = 0, 0.0
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """One more, an object or its class."""
        made = callback() if isinstance(callback, type) else callback
        if not callable(made) and not hasattr(made, "on_step_end"):
            raise TypeError(f"{type(made).__name__} is neither a function nor a TrainerCallback")
        self.callbacks.append(made)

    def pop(self, callback: Any) -> Any:
        """Take one away, by itself or its class; None: there is no such."""
        for mine in self.callbacks:
            if mine is callback or (isinstance(callback, type) and type(mine) is callback):
                self.callbacks.remove(mine)
                return mine
        return None

    @property
    def _objects(self) -> list[Any]:
        return [callback for callback in self.callbacks if hasattr(callback, "on_step_end")]

    # --- events -----------------------------------------------------------------------------------------------------

    def attach(self, args: Callable[[], Any], state: RunState, known: Mapping[str, Any]) -> None:
        """What events hand over, from the trainer that is built; args: the settings as they stand."""
        from transformers import TrainerControl

        self._args, self._state, self.known = args, state, known
        self.control = TrainerControl()
        self.tell("on_init_end")

    def begin(self, total: int, how: RunConfig) -> None:
        """A run is planned; what a former one was told, its end included, is forgotten."""
        state, self.log_every = self._state, how.log_every
        self.running, self.control.should_training_stop = True, False
        state.max_steps, state.log_history, state.logging_steps = total, [], how.log_every
        state.eval_steps, state.save_steps = how.evaluate_every or total, how.checkpoint_every or 0
        state.best_metric = state.best_global_step = None
        self._waiting, self._samples, self._first = [], 0.0, -1
        self._began = self._step_began = time.perf_counter()

    def before(self, trainer: Trainer) -> None:
        """A step begins."""
        if not self.running:  # a bare step
            return
        if self._first < 0:
            self._first = self._state.global_step = trainer.steps_done
            if self._first and trainer.run_folder is not None:
                folder = RunFolder.open(trainer.run_folder)
                seconds = {row["step"]: row.get("total") for row in folder.each_step("timing.jsonl")}
                before = ({**row, "step_time": seconds.get(row["step"])} for row in folder.each_step())
                done = (row for row in before if row["step"] <= self._first)
                rows, waiting = earlier_rows(done, self.log_every, MOST, trainer.recipe.reward_weights)
                self._state.log_history[:0], self._waiting = rows, [*waiting, *self._waiting]
            self.tell("on_train_begin")  # now the folder is known, and where the run goes on
            self.tell("on_epoch_begin")
        self._state.global_step, self._step_began = trainer.steps_done, time.perf_counter()
        self.tell("on_step_begin")

    def after(self, trainer: Trainer, report: StepReport) -> None:
        """What scripts logged since the last step goes along with its metrics."""
        report.metrics |= self._said
        self._said = {}

    def step_done(self, report: StepReport, total: int, recipe: Recipe, evaluated: Mapping[str, float]) -> bool:
        """After each step, with what an evaluation found; True: the run shall end."""
        functions = [callback for callback in self.callbacks if callback not in self._objects]
        asked = [function(report) is False for function in functions]
        state, row = self._state, step_row(report, recipe)
        row["step_time"] = time.perf_counter() - self._step_began
        before, epoch = state.epoch, report.metrics.get("epoch")
        state.global_step, state.max_steps, state.epoch = report.step, total, epoch
        state.num_input_tokens_seen = int(row.get("num_tokens", 0))
        self._samples += len(report.experience)
        self._waiting.append(row)
        self.tell("on_step_end")
        if epoch is not None and math.floor(epoch + 1e-9) > math.floor((before or 0.0) + 1e-9):
            self.tell("on_epoch_end")
        if report.step % self.log_every == 0 or self.control.should_log:
            self._log_steps({})
        if evaluated:
            self.evaluated(evaluated)
        expect_known(self.control)
        return any(asked) or bool(self.control.should_training_stop)

    def wishes(self, what: str) -> bool:
        """Whether a callback asked for this since it was last asked (should_save, should_evaluate)."""
        flags = vars(self.control)
        asked, flags[what] = bool(flags[what]), False
        return asked

    def evaluated(self, row: Mapping[str, float]) -> None:
        """An evaluation was made: a row of its own."""
        self.log(row)
        self.tell("on_evaluate", metrics=dict(row))
        args, state = self._args(), self._state
        found = row.get(f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}")
        better = np.greater if args.greater_is_better else np.less
        if found is not None and (state.best_metric is None or better(found, state.best_metric)):
            state.best_metric, state.best_global_step = found, state.global_step

    def log(self, row: Mapping[str, float]) -> None:
        """A row of log_history, with its step and epoch."""
        told = dict(row) | ({} if self._state.epoch is None else {"epoch": self._state.epoch})
        self._state.log_history.append({**told, "step": self._state.global_step})
        del self._state.log_history[:-MOST]
        self.control.should_log = False
        self.tell("on_log", logs=told)

    def say(self, row: Mapping[str, float]) -> None:
        """What a script logs: a row at once, and part of the next step's metrics."""
        self._said |= row
        self.log(row)

    def end(self) -> dict[str, float]:
        """After the last step: the run's own row, with metrics that were still waiting."""
        if self._first < 0:  # it was done already
            self.tell("on_train_begin")
        self.running = False
        steps = max(self._state.global_step - max(self._first, 0), 0)
        rows = [row for row in self._state.log_history if "loss" in row and "train_runtime" not in row]
        last = final_row([*rows, *self._waiting], time.perf_counter() - self._began, steps, self._samples)
        if (
            not self._waiting and rows
        ):  # as in TRL where nothing was logged before: callbacks find their metrics here too
            self._waiting = [{name: value for name, value in rows[-1].items() if name not in ("step", "epoch")}]
        self._log_steps(last)
        self.tell("on_epoch_end")
        self.tell("on_train_end")
        return last

    def _log_steps(self, more: Mapping[str, float]) -> None:
        if self._waiting or more:
            self.log({**mean_row(self._waiting), **more})
        self._waiting = []

    def tell(self, event: str, **more: Any) -> None:
        """An event, to the objects that know it."""
        objects = self._objects
        args = self._args() if objects else None
        for callback in objects:
            heard: Callable[..., Any] | None = getattr(callback, event, None)
            if heard is not None:
                changed = heard(args, self._state, self.control, **self.known, **more)
                self.control = changed or self.control
