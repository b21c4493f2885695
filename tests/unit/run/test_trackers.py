"""Trackers: what they are told, and how a missing one says so."""

import io
import struct
import sys
import threading
import time
import types

import numpy as np
import pytest
from PIL import Image

from grpo.envs.video import write_video
from grpo.run.folder import RunFolder
from grpo.run.trackers import TrackerError, make_tracker, moving_picture
from tests.faults.tiny import QUICK, make_folder, make_trainer, run, train


def test_tensorboard_files_hold_the_metrics(tmp_path):
    pytest.importorskip("tensorboardX")
    train(tmp_path / "run", 2, trackers=["tensorboard"])
    files = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(files) == 1
    content = files[0].read_bytes()
    assert b"reward_std" in content and b"clip_ratio/low_mean" in content
    train(tmp_path / "run", 3, trackers=["tensorboard"])  # goes on


MODULES = {"tensorboard": "tensorboardX", "comet": "comet_ml"} | {
    n: n for n in ("wandb", "trackio", "mlflow", "swanlab")
}


@pytest.mark.parametrize("name, module", MODULES.items())
def test_a_missing_one_says_how_to_install_it(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    trainer = make_trainer()
    with pytest.raises(TrackerError, match=rf"pip install 'anygrpo\[{name}\]'"):
        run(trainer, 1, make_folder(tmp_path / "run"), trackers=[name], **QUICK)
    assert trainer.steps_done == 0


def test_an_unknown_one_is_named(tmp_path):
    with pytest.raises(TrackerError, match="known: tensorboard, wandb, trackio, mlflow, swanlab, comet"):
        make_tracker("mlfolw", make_folder(tmp_path / "run"))


def fake(name, calls):
    """A tracker that writes down what it is told."""

    class Run:
        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    module = types.ModuleType(name)
    module.Settings = lambda **settings: settings
    module.init = lambda **options: calls.append(options) or Run()
    return module


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_trackers_get_rows_and_redacted_settings(name, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, name, fake(name, calls))
    folder = make_folder(tmp_path / "run", config={"beta": 0.1, "api_key": "very-secret"})
    run(make_trainer(), 2, folder, trackers=[name], **QUICK)
    assert calls[0]["name"].startswith("run")
    run(make_trainer(), 3, folder, trackers=[name], resume=True, **QUICK)
    started = [call for call in calls if isinstance(call, dict)]
    assert started[0] == started[1]  # found again after a resume
    assert calls[0]["config"] == {"beta": 0.1, "api_key": "[redacted]"}
    assert [call[0] for call in calls[1:3]] == [1, 2]
    assert calls[1][1]["reward"] == folder.metrics()[0]["reward"]
    assert "step" not in calls[1][1] and None not in calls[1][1].values()
    assert calls[3] == "finish"


def test_comet_goes_on_under_the_same_key_and_is_told_nothing_else(tmp_path, monkeypatch):
    calls = []

    class Experiment:
        def log_parameters(self, parameters):
            calls.append(parameters)

        def log_metrics(self, metrics, step):
            calls.append((step, metrics))

        def end(self):
            calls.append("end")

    module = types.ModuleType("comet_ml")
    module.ExperimentConfig = lambda **config: config
    module.start = lambda **options: calls.append(options) or Experiment()
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    monkeypatch.delenv("COMET_PROJECT_NAME", raising=False)
    folder = make_folder(tmp_path / "run", config={"beta": 0.1, "api_key": "very-secret"})
    run(make_trainer(), 2, folder, trackers=["comet"], **QUICK)
    run(make_trainer(), 3, folder, trackers=["comet"], resume=True, **QUICK)
    begun = [call for call in calls if isinstance(call, dict) and "experiment_key" in call]
    assert begun[0] == begun[1] and begun[0]["experiment_key"].isalnum() and begun[0]["project_name"] == "grpo"
    assert not any(value for name, value in begun[0]["experiment_config"].items() if name.startswith(("log_", "auto_")))
    assert calls[1] == {"beta": 0.1, "api_key": "[redacted]"} and calls[2][1]["reward"] == folder.metrics()[0]["reward"]
    assert [call[0] for call in calls if isinstance(call, tuple)] == [1, 2, 3] and calls[-1] == "end"


def test_a_tracker_that_is_down_at_the_start_is_left_out(tmp_path, monkeypatch):
    module = types.ModuleType("trackio")

    def init(**options):
        raise ConnectionError("no route")

    module.init = init
    monkeypatch.setitem(sys.modules, "trackio", module)
    summary, _ = train(tmp_path / "run", 2, trackers=["trackio"])
    assert summary.events == {"tracker_failed": 1}


@pytest.mark.parametrize("where", ["log", "close", "init"])
def test_one_that_hangs_is_left_out(where, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.run.trackers.SHORT", 0.1)
    monkeypatch.setattr("grpo.run.trackers.LONG", 0.1)
    told = []

    class Hangs:
        def log(self, step, metrics):
            told.append(step)
            if where == "log":
                threading.Event().wait(10)

        def close(self):
            if where == "close":
                time.sleep(10)

    module = types.ModuleType("trackio")
    module.init = lambda **options: time.sleep(10)
    monkeypatch.setitem(sys.modules, "trackio", module)
    summary, _ = train(tmp_path / "run", 3, trackers=["trackio" if where == "init" else Hangs()])
    assert (summary.reason, summary.step, summary.exit_code) == ("done", 3, 0)
    events = RunFolder.open(tmp_path / "run").events()
    assert [row["event"] for row in events] == ["tracker_failed"]
    assert "did not end in 0.1 s" in events[0]["message"]
    assert told == {"log": [1], "close": [1, 2, 3], "init": []}[where]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "swanlab", "comet"])
def test_the_real_ones_take_a_run_and_its_resumption(name, tmp_path, monkeypatch):
    pytest.importorskip(MODULES[name])
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / "comet"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for steps in (2, 4):
        summary, _ = train(tmp_path / "run", steps, trackers=[name])
        assert "tracker_failed" not in summary.events


# --- what there is to look at ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """Three seconds of 400 × 60 pixels."""
    pytest.importorskip("imageio_ffmpeg")
    frames = [np.full((60, 400, 3), 2 * i, np.uint8) for i in range(90)]
    return write_video(frames, tmp_path_factory.mktemp("film") / "video.mp4", fps=30)


def summaries(folder):
    """Every value in a TensorBoard folder's event files, as (step, value)."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted((folder / "tensorboard").iterdir()):
        content = file.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            yield from ((event.step, value) for value in event.summary.value)
            content = content[16 + size :]


def test_tensorboard_shows_the_video_as_a_moving_picture(film, tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = make_tracker("tensorboard", make_folder(tmp_path / "run"))
    tracker.log(7, {"reward": 1.0})
    tracker.show(7, "video", film)
    tracker.close()
    ((step, value),) = [found for found in summaries(tmp_path / "run") if found[1].HasField("image")]
    assert (step, value.tag) == (7, "video")
    picture = Image.open(io.BytesIO(value.image.encoded_image_string))
    assert picture.format == "GIF" and picture.n_frames == 90 and picture.size == (200, 30)


def test_a_long_film_becomes_a_short_picture_of_the_same_length(film):
    picture = Image.open(io.BytesIO(moving_picture(film, most=20, width=100)))
    assert picture.n_frames == 18 and picture.size == (100, 15)
    seconds = 0.0
    for frame in range(picture.n_frames):
        picture.seek(frame)
        seconds += picture.info["duration"] / 1000
    assert seconds == pytest.approx(3.0, abs=0.3)


class Filmed:
    """A source that leaves a film behind."""

    def __init__(self, inner, film):
        self._inner, self._film = inner, film

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def leave(self, folder):
        return {"video": self._film}


def test_trackers_get_the_video_and_the_project(film, tmp_path, monkeypatch):
    calls = []
    module = fake("wandb", calls)
    module.Video = lambda path, format: ("video", path, format)
    monkeypatch.setitem(sys.modules, "wandb", module)
    trainer = make_trainer()
    trainer.source = Filmed(trainer.source, film)
    run(trainer, 2, make_folder(tmp_path / "run"), trackers=["wandb"], project="poles", **QUICK)
    assert calls[0]["project"] == "poles"
    assert calls[-2:] == [(2, {"video": ("video", str(film), "mp4")}), "finish"]


@pytest.mark.parametrize(
    "name, variable",
    [("wandb", "WANDB_PROJECT"), ("trackio", "TRACKIO_PROJECT"), ("swanlab", "SWANLAB_PROJECT_NAME")],
)
def test_the_project_is_asked_for_then_looked_up_then_ours(name, variable, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, name, fake(name, calls))
    monkeypatch.delenv(variable, raising=False)
    folder = make_folder(tmp_path / "run")
    make_tracker(name, folder)
    monkeypatch.setenv(variable, "from the shell")
    make_tracker(name, folder)
    make_tracker(name, folder, "asked for")
    assert [call["project"] for call in calls] == ["grpo", "from the shell", "asked for"]


def test_one_that_cannot_show_is_not_asked_and_one_that_fails_is_left_out(film, tmp_path):
    class Blind:
        closed = False

        def log(self, step, metrics): ...
        def close(self):
            self.closed = True

    class Broken(Blind):
        def show(self, step, name, path):
            raise ConnectionError("no route")

    blind, broken = Blind(), Broken()
    trainer = make_trainer()
    trainer.source = Filmed(trainer.source, film)
    summary = run(trainer, 2, make_folder(tmp_path / "run"), trackers=[broken, blind], **QUICK)
    assert (summary.reason, summary.events) == ("done", {"tracker_failed": 1})
    assert blind.closed and not broken.closed


class Heard:
    """A tracker that remembers the steps it was told of."""

    def __init__(self):
        self.steps = []

    def log(self, step, metrics):
        self.steps.append(step)

    def close(self):
        pass


def test_a_tracker_gets_every_so_many_steps_what_was_evaluated_and_the_last(tmp_path):
    heard, folder = Heard(), make_folder(tmp_path / "run")
    run(make_trainer(), 8, folder, trackers=[heard], log_every=3, **QUICK)
    assert heard.steps == [3, 6, 8] and len(folder.metrics()) == 8
    heard = Heard()
    judged = {"evaluate": lambda step: {"score": 1.0}, "evaluate_every": 4}
    run(make_trainer(), 6, make_folder(tmp_path / "judged"), trackers=[heard], log_every=3, **QUICK, **judged)
    assert heard.steps == [3, 4, 6]


def test_without_checkpoints_in_between_the_last_is_saved(tmp_path):
    folder = make_folder(tmp_path / "run")
    summary = run(make_trainer(), 6, folder, **QUICK | {"checkpoint_every": None, "keep_last": None})
    assert summary.checkpoint.name == "step-00000006" and len(list(folder.checkpoints.glob("step-*"))) == 1


def test_the_older_word_is_still_taken(tmp_path):
    heard = Heard()
    with pytest.warns(DeprecationWarning, match="trackers"):
        run(make_trainer(), 2, make_folder(tmp_path / "run"), sinks=[heard], **QUICK)
    assert heard.steps == [1, 2]
