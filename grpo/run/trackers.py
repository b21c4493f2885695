"""Trackers get what metrics.jsonl has: TensorBoard, W&B, Trackio, MLflow, SwanLab, Comet, or anything with two methods.

Each library is optional and loaded by the function that bears its name.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from grpo.errors import install, nearest
from grpo.run import open_trackers
from grpo.run.folder import Row, RunFolder
from grpo.run.limits import at_most
from grpo.run.open_trackers import TrackerError as TrackerError

SHORT, LONG = 30.0, 120.0
"""Seconds that a tracker may take for a row; to begin, to show a file, to end with what is still to be sent."""


@runtime_checkable
class Tracker(Protocol):
    """Where metrics may go besides the run folder."""

    def log(self, step: int, metrics: Mapping[str, float]) -> Any: ...
    def close(self) -> Any: ...


@runtime_checkable
class ShowsFiles(Protocol):
    """A tracker that can show a file, a video say, beside the curves."""

    def show(self, step: int, name: str, path: Path) -> Any: ...


class Trackers:
    """Those of a run. One that fails or hangs is reported once and left out from then on."""

    def __init__(self, tell: Callable[[int, str, str], None], folder: RunFolder | None = None) -> None:
        """tell: hears of one that fails, with the step, an event's name and a sentence."""
        self._trackers: list[Tracker] = []
        self._tell, self._folder, self._step = tell, folder, 0

    def open(self, trackers: Sequence[str | Tracker], project: str | None = None) -> None:
        """Make those given by name, or log into the run that is open there. A missing library is an error, a tracker
        that is down an event."""
        there = open_trackers.found()
        for tracker in trackers:
            try:
                if isinstance(tracker, Tracker):
                    self._trackers.append(tracker)
                elif not isinstance(tracker, str):
                    self._trackers.append(open_trackers.adopted(tracker))
                elif tracker in there:
                    self._trackers.append(there[tracker])
                else:
                    make = partial(make_tracker, tracker, self._folder, project)
                    self._trackers.append(at_most(LONG, "its beginning", make))
            except TrackerError:
                raise
            except Exception as error:  # whatever a tracker may raise
                self._report(str(tracker), error)

    def log(self, step: int, row: Row) -> None:
        """Pass on what metrics.jsonl got, without the missing values."""
        self._step = step
        metrics = {name: value for name, value in row.items() if name != "step" and value is not None}
        for tracker in list(self._trackers):
            self._try(tracker, partial(tracker.log, step, metrics), "log()", SHORT)

    def show(self, step: int, name: str, path: Path) -> None:
        """Pass on a file to look at, to those that can show it."""
        for tracker in list(self._trackers):
            if isinstance(tracker, ShowsFiles):
                self._try(tracker, partial(tracker.show, step, name, path), "show()", LONG)

    def close(self) -> None:
        """Finish them all."""
        while self._trackers:
            tracker = self._trackers[-1]
            self._try(tracker, tracker.close, "close()", LONG)
            self._trackers = [other for other in self._trackers if other is not tracker]

    def _try(self, tracker: Tracker, call: Callable[[], Any], what: str, seconds: float) -> None:
        try:
            at_most(seconds, what, call)  # in this thread: many trackers know only the one they were begun in
        except Exception as error:  # whatever a tracker may raise
            self._trackers.remove(tracker)
            self._report(type(tracker).__name__, error)

    def _report(self, name: str, error: Exception) -> None:
        message = f"{name} failed and is left out: {type(error).__name__}: {error}"
        self._tell(self._step, "tracker_failed", message)


def make_tracker(name: str, folder: RunFolder | None, project: str | None = None) -> Tracker:
    """The tracker of this name for this run; what it is told of the settings has its secrets taken out already."""
    makers: dict[str, Callable[[RunFolder, str | None], Tracker]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
        "mlflow": MLflow,
        "swanlab": SwanLab,
        "comet": Comet,
    }
    if name not in makers:
        raise TrackerError(f"unknown tracker {name!r}{nearest(name, list(makers))}; known: {', '.join(makers)}")
    if folder is None:
        raise TrackerError(f"{name}: a run without a folder logs only into what is open already; give it a folder")
    return makers[name](folder, project)


class TensorBoard:
    """Event files in the run folder's `tensorboard/`: `tensorboard --logdir runs`."""

    def __init__(self, folder: RunFolder, project: str | None = None) -> None:
        module = self._module = _load("tensorboardX", "tensorboard")
        rows = deque(folder.each_step(), maxlen=1)  # on resume, what was drawn after this step is drawn again
        self._writer = module.SummaryWriter(
            str(folder.path / "tensorboard"), purge_step=rows[-1]["step"] + 1 if rows else None
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def show(self, step: int, name: str, path: Path) -> None:
        """A video as a moving picture among the images."""
        picture = moving_picture(path)
        image = self._module.proto.summary_pb2.Summary.Image(encoded_image_string=picture, colorspace=3)
        value = self._module.proto.summary_pb2.Summary.Value(tag=name, image=image)
        self._writer.file_writer.add_summary(self._module.proto.summary_pb2.Summary(value=[value]), step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WeightsAndBiases:
    """A wandb run named like the folder; resumed under the same id."""

    def __init__(self, folder: RunFolder, project: str | None = None) -> None:
        module = self._module = _load("wandb", "wandb")
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
            project=project or os.environ.get("WANDB_PROJECT", "grpo"),
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

    def show(self, step: int, name: str, path: Path) -> None:
        """A video beside the curves."""
        self._run.log({name: self._module.Video(str(path), format=path.suffix[1:])}, step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


class Trackio:
    """A Trackio run named after the folder; resumed under the same name."""

    def __init__(self, folder: RunFolder, project: str | None = None) -> None:
        module = _load("trackio", "trackio")
        project = project or os.environ.get("TRACKIO_PROJECT", "grpo")
        self._run = module.init(project=project, name=_identity(folder), resume="allow", config=folder.config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write the rest."""
        self._run.finish()


class MLflow:
    """An MLflow run named like the folder, found again by a tag; the run that is active in this process stays so."""

    def __init__(self, folder: RunFolder, project: str | None = None) -> None:
        module = self._module = _load("mlflow", "mlflow")
        self._client = module.MlflowClient()
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "grpo")
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        mark = _identity(folder)
        known = self._client.search_runs([place], f"tags.grpo_run = '{mark}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"grpo_run": mark, "mlflow.runName": folder.path.name}
        self._id = self._client.create_run(place, tags=tags).info.run_id
        settings = {name: value for name, value in folder.config.items() if name != "resolved"}
        self._client.log_batch(self._id, params=[module.entities.Param(n, str(v)[:500]) for n, v in settings.items()])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One value a metric."""
        self._module.log_metrics(dict(metrics), step=step, run_id=self._id)

    def show(self, step: int, name: str, path: Path) -> None:
        """A file beside the curves."""
        self._client.log_artifact(self._id, str(path))

    def close(self) -> None:
        """Say that it is over."""
        self._client.set_terminated(self._id)


class SwanLab:
    """A SwanLab experiment named like the folder; resumed under the same id."""

    def __init__(self, folder: RunFolder, project: str | None = None) -> None:
        module = self._module = _load("swanlab", "swanlab")
        # No requirements, git, console or machine facts: they may hold what was taken out of the settings.
        silent = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
        quiet = module.Settings(terminal={"proxy_type": "none"}, probe=silent, interactive=False)
        self._run = module.init(
            project=project or os.environ.get("SWANLAB_PROJECT_NAME", "grpo"),
            name=folder.path.name,
            id=_identity(folder),
            resume="allow",
            log_dir=str(folder.path / "swanlab"),
            config=folder.config,
            settings=quiet,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, name: str, path: Path) -> None:
        """A video as a moving picture beside the curves: it takes no other."""
        self._run.log({name: self._module.Video(io.BytesIO(moving_picture(path)))}, step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


class Comet:
    """A Comet experiment named like the folder; gone on with under the same key."""

    def __init__(self, folder: RunFolder, project: str | None = None) -> None:
        module = _load("comet_ml", "comet")
        # No code, git, console or machine facts: they may hold what was taken out of the settings.
        names = ("code", "graph", "git_metadata", "git_patch", "env_details")
        quiet: dict[str, Any] = {f"log_{name}": False for name in names}
        quiet |= {"parse_args": False, "auto_output_logging": False, "auto_log_co2": False, "display_summary_level": 0}
        quiet |= dict.fromkeys(("auto_param_logging", "auto_metric_logging"), False)
        self._run = module.start(
            project_name=project or os.environ.get("COMET_PROJECT_NAME", "grpo"),
            experiment_key=hashlib.sha256(_identity(folder).encode()).hexdigest()[
                :32
            ],  # 32 letters and digits, no more
            experiment_config=module.ExperimentConfig(name=folder.path.name, **quiet),
        )
        self._run.log_parameters({name: value for name, value in folder.config.items() if name != "resolved"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log_metrics(dict(metrics), step=step)

    def show(self, step: int, name: str, path: Path) -> None:
        """A video beside the curves."""
        self._run.log_video(str(path), name=name, step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._run.end()


def moving_picture(path: Path, most: int = 200, width: int = 320) -> bytes:
    """A video as a GIF of at most so many frames and pixels across."""
    from PIL import Image  # here: matplotlib brings it

    frames_of = import_module("imageio_ffmpeg").read_frames(str(path))
    about = next(frames_of)
    shape = (about["size"][1], about["size"][0], 3)
    frames = [np.frombuffer(frame, np.uint8).reshape(shape) for frame in frames_of]
    every = -(-len(frames) // most)
    zoom = -(-shape[1] // width)
    pictures = [Image.fromarray(frame[::zoom, ::zoom].copy()) for frame in frames[::every]]
    made = io.BytesIO()
    later, pause = pictures[1:], int(1000 * every / about["fps"])
    pictures[0].save(made, format="GIF", save_all=True, append_images=later, duration=pause, loop=0)
    return made.getvalue()


def _identity(folder: RunFolder) -> str:
    """The folder's name and a few digits of its run.json: the same after a resume, different for a namesake."""
    digits = hashlib.sha256((folder.path / "run.json").read_bytes()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', folder.path.name)}-{digits}"


def _load(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise TrackerError(f"the {extra} tracker needs {module}: {install(extra)}") from error
