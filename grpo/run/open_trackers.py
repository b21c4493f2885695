"""Runs that the caller has opened at a tracker: they get the metrics too, and stay the caller's to finish.

Only libraries that are loaded already are asked, so that looking for an open run costs nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from grpo.errors import Refused

Metrics = Mapping[str, float]


class TrackerError(Refused, RuntimeError):
    """A tracker that cannot be made or used, with what helps."""


class OpenWandb:
    """A Weights & Biases run. Its own count of steps goes on: rows of the caller's may lie before and between."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Metrics) -> None:
        """One row."""
        self._run.log({"step": step, **metrics})

    def show(self, step: int, name: str, path: Path) -> None:
        """A video beside the curves."""
        video = sys.modules["wandb"].Video(str(path), format=path.suffix[1:])
        self._run.log({"step": step, name: video})

    def close(self) -> None:
        """It is the caller's."""


class OpenTrackio:
    """A Trackio run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Metrics) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """It is the caller's."""


class OpenMLflow:
    """The MLflow run that is active."""

    def __init__(self, run: Any) -> None:
        self._id = run.info.run_id

    def log(self, step: int, metrics: Metrics) -> None:
        """One value a metric."""
        sys.modules["mlflow"].log_metrics(dict(metrics), step=step, run_id=self._id)

    def close(self) -> None:
        """It is the caller's."""


class OpenSwanLab(OpenTrackio):
    """A SwanLab run, which is told the same way."""


class OpenComet:
    """A Comet experiment."""

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    def log(self, step: int, metrics: Metrics) -> None:
        """One row."""
        self._experiment.log_metrics(dict(metrics), step=step)

    def show(self, step: int, name: str, path: Path) -> None:
        """A video beside the curves."""
        self._experiment.log_video(str(path), name=name, step=step)

    def close(self) -> None:
        """It is the caller's."""


class OpenTensorBoard:
    """A SummaryWriter, of torch or of tensorboardX."""

    def __init__(self, writer: Writes) -> None:
        self._writer = writer

    def log(self, step: int, metrics: Metrics) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """It is the caller's to close; what it has been told is on disk."""
        self._writer.flush()


Open = OpenWandb | OpenTrackio | OpenMLflow | OpenComet | OpenTensorBoard


@runtime_checkable
class Writes(Protocol):
    """What a TensorBoard writer does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...
    def flush(self) -> Any: ...


@runtime_checkable
class Experiments(Protocol):
    """What experiments of Comet do."""

    def log_metrics(self, dic: Any, prefix: str | None = None, step: int | None = None) -> Any: ...
    def end(self) -> Any: ...


@runtime_checkable
class Runs(Protocol):
    """What runs of Weights & Biases, of Trackio and of SwanLab do."""

    def log(self, data: Any, step: int | None = None) -> Any: ...
    def finish(self) -> Any: ...


def found() -> dict[str, Open]:
    """The runs that are open in this process, by the tracker's name."""
    made: dict[str, Open] = {}
    if (run := _asked("wandb", "run")) is not None:
        made["wandb"] = OpenWandb(run)
    if (current := _asked("trackio.context_vars", "current_run")) is not None and (run := current.get()) is not None:
        made["trackio"] = OpenTrackio(run)
    if (active := _asked("mlflow", "active_run")) is not None and (run := active()) is not None:
        made["mlflow"] = OpenMLflow(run)
    if (has := _asked("swanlab", "has_run")) is not None and has():
        made["swanlab"] = OpenSwanLab(_asked("swanlab", "get_run")())
    if (running := _asked("comet_ml", "get_running_experiment")) is not None and (run := running()) is not None:
        made["comet"] = OpenComet(run)
    return made


def adopted(given: object) -> Open:
    """A run or a writer of one of these that `train(trackers=[…])` was handed."""
    if isinstance(given, Writes):
        return OpenTensorBoard(given)
    if isinstance(given, Experiments):
        return OpenComet(given)
    if isinstance(given, Runs):
        steps = type(given).__module__.startswith(("trackio", "swanlab"))
        return OpenTrackio(given) if steps else OpenWandb(given)
    raise TrackerError(f"{type(given).__name__} is no tracker: it needs log(step, metrics) and close()")


def _asked(module: str, name: str) -> Any:
    """Something of a module, if that is loaded and has it."""
    loaded = sys.modules.get(module)
    return None if loaded is None else vars(loaded).get(name)
