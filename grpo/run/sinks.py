"""Mirrors of metrics.jsonl, which is the truth: TensorBoard, Weights & Biases, Trackio, or anything with two methods.

Each library is optional and loaded by the function that bears its name.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from grpo.run.folder import Row, RunFolder


class Sink(Protocol):
    """Where metrics may go besides the run folder."""

    def log(self, step: int, metrics: Mapping[str, float]) -> Any: ...
    def close(self) -> Any: ...


class SinkError(RuntimeError):
    """A sink that cannot be made, with the command that helps."""


class Mirrors:
    """The sinks of a run. One that fails is reported once and left out from then on: training does not wait for it."""

    def __init__(self, folder: RunFolder) -> None:
        self._sinks: list[Sink] = []
        self._folder, self._step = folder, 0

    def open(self, sinks: Sequence[str | Sink]) -> None:
        """Make those given by name. A missing library is an error, a tracker that is down an event."""
        for sink in sinks:
            try:
                self._sinks.append(make_sink(sink, self._folder) if isinstance(sink, str) else sink)
            except SinkError:
                raise
            except Exception as error:  # whatever a tracker may raise
                self._report(str(sink), error)

    def log(self, step: int, row: Row) -> None:
        """Pass on what metrics.jsonl got, without the missing values."""
        self._step = step
        metrics = {name: value for name, value in row.items() if name != "step" and value is not None}
        for sink in list(self._sinks):
            self._try(sink, partial(sink.log, step, metrics))

    def close(self) -> None:
        """Finish them all."""
        while self._sinks:
            sink = self._sinks[-1]
            self._try(sink, sink.close)
            self._sinks = [other for other in self._sinks if other is not sink]

    def _try(self, sink: Sink, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # whatever a tracker may raise
            self._sinks.remove(sink)
            self._report(type(sink).__name__, error)

    def _report(self, name: str, error: Exception) -> None:
        message = f"{name} failed and is left out: {type(error).__name__}: {error}"
        self._folder.event(self._step, "sink_failed", message)


def make_sink(name: str, folder: RunFolder) -> Sink:
    """The sink of this name for this run; what it is told of the settings has its secrets taken out already."""
    makers: dict[str, Callable[[RunFolder], Sink]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
    }
    if name not in makers:
        raise SinkError(f"unknown sink {name!r}; known: {', '.join(makers)}")
    return makers[name](folder)


class TensorBoard:
    """Event files in the run folder's `tensorboard/`: `tensorboard --logdir runs`."""

    def __init__(self, folder: RunFolder) -> None:
        module = _load("tensorboardX", "tensorboard")
        rows = folder.metrics()  # on resume, what was drawn after this step is drawn again
        self._writer = module.SummaryWriter(
            str(folder.path / "tensorboard"), purge_step=rows[-1]["step"] + 1 if rows else None
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WeightsAndBiases:
    """A wandb run named like the folder; resumed under the same id."""

    def __init__(self, folder: RunFolder) -> None:
        module = _load("wandb", "wandb")
        # No code, command line, console or machine facts: they may hold what was taken out of the settings.
        quiet = module.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", "grpo"),
            name=folder.path.name,
            id=_identity(folder),
            resume="allow",
            dir=str(folder.path),
            config=folder.config,
            settings=quiet,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


class Trackio:
    """A Trackio run named after the folder; resumed under the same name."""

    def __init__(self, folder: RunFolder) -> None:
        module = _load("trackio", "trackio")
        project = os.environ.get("TRACKIO_PROJECT", "grpo")
        self._run = module.init(project=project, name=_identity(folder), resume="allow", config=folder.config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write the rest."""
        self._run.finish()


def _identity(folder: RunFolder) -> str:
    """The folder's name and a few digits of its run.json: the same after a resume, different for a namesake."""
    digits = hashlib.sha256((folder.path / "run.json").read_bytes()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', folder.path.name)}-{digits}"


def _load(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise SinkError(f"the {extra} sink needs {module}: pip install 'anygrpo[{extra}]'") from error
