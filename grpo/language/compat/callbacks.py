"""Callbacks: plain functions of a report, or transformers' `TrainerCallback` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo.trainer import StepReport

MOST = 10_000
"""Steps of `TrainerState.log_history`, the last ones: a run may be longer than memory is large."""


class Callbacks:
    """What a user wants to be told.

    A function gets each report and ends the run by returning False; a `TrainerCallback` gets on_train_begin,
    on_step_end, on_log, on_evaluate and on_train_end, and ends it with `control.should_training_stop`.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self.all = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        for callback in self.all:
            if not callable(callback) and not hasattr(callback, "on_step_end"):
                raise TypeError(f"{type(callback).__name__} is neither a function nor a TrainerCallback")
        self._objects = [callback for callback in self.all if hasattr(callback, "on_step_end")]

    def begin(self, total: int) -> None:
        """Before the first step; what a former run was told, its end included, is forgotten."""
        if self._objects:
            from transformers import TrainerControl, TrainerState

            self._state: Any = TrainerState(max_steps=total)
            self._control: Any = TrainerControl()
        self._tell("on_train_begin")

    def step_done(self, report: StepReport, total: int) -> bool:
        """After each step; True: the run shall end."""
        functions = [callback for callback in self.all if callback not in self._objects]
        asked = [function(report) is False for function in functions]
        if not self._objects:
            return any(asked)
        known = {name: value for name, value in report.metrics.items() if value is not None}
        self._state.global_step, self._state.max_steps, self._state.epoch = report.step, total, known.get("epoch")
        self._state.log_history.append({**known, "step": report.step})
        del self._state.log_history[:-MOST]
        self._tell("on_step_end")
        self._tell("on_log", logs=known)
        judged = {name: value for name, value in known.items() if name.startswith("eval/")}
        if judged:
            self._tell("on_evaluate", metrics=judged)
        return any(asked) or bool(self._control.should_training_stop)

    def end(self, total: int) -> None:
        """After the last step."""
        self._tell("on_train_end")

    def _tell(self, event: str, **more: Any) -> None:
        for callback in self._objects:
            changed = getattr(callback, event)(None, self._state, self._control, **more)
            self._control = changed or self._control
