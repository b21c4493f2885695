"""Mirrors: what they are told, and how a missing one says so."""

import sys
import types

import pytest

from grpo.run.sinks import SinkError, make_sink
from tests.faults.tiny import QUICK, make_folder, make_trainer, run, train


def test_tensorboard_files_hold_the_metrics(tmp_path):
    pytest.importorskip("tensorboardX")
    train(tmp_path / "run", 2, sinks=["tensorboard"])
    files = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(files) == 1
    content = files[0].read_bytes()
    assert b"reward_std" in content and b"clip_ratio/low_mean" in content
    train(tmp_path / "run", 3, sinks=["tensorboard"])  # goes on


@pytest.mark.parametrize("name, module", [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")])
def test_a_missing_one_says_how_to_install_it(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    trainer = make_trainer()
    with pytest.raises(SinkError, match=rf"pip install 'anygrpo\[{name}\]'"):
        run(trainer, 1, make_folder(tmp_path / "run"), sinks=[name], **QUICK)
    assert trainer.steps_done == 0


def test_an_unknown_one_is_named(tmp_path):
    with pytest.raises(SinkError, match="known: tensorboard, wandb, trackio"):
        make_sink("mlflow", make_folder(tmp_path / "run"))


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


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_rows_and_redacted_settings(name, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, name, fake(name, calls))
    folder = make_folder(tmp_path / "run", config={"beta": 0.1, "api_key": "very-secret"})
    run(make_trainer(), 2, folder, sinks=[name], **QUICK)
    assert calls[0]["name"].startswith("run")
    run(make_trainer(), 3, folder, sinks=[name], resume=True, **QUICK)
    started = [call for call in calls if isinstance(call, dict)]
    assert started[0] == started[1]  # found again after a resume
    assert calls[0]["config"] == {"beta": 0.1, "api_key": "[redacted]"}
    assert [call[0] for call in calls[1:3]] == [1, 2]
    assert calls[1][1]["reward"] == folder.metrics()[0]["reward"]
    assert "step" not in calls[1][1] and None not in calls[1][1].values()
    assert calls[3] == "finish"


def test_a_tracker_that_is_down_at_the_start_is_left_out(tmp_path, monkeypatch):
    module = types.ModuleType("trackio")

    def init(**options):
        raise ConnectionError("no route")

    module.init = init
    monkeypatch.setitem(sys.modules, "trackio", module)
    summary, _ = train(tmp_path / "run", 2, sinks=["trackio"])
    assert summary.events == {"sink_failed": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_real_ones_take_a_run_and_its_resumption(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for steps in (2, 4):
        summary, _ = train(tmp_path / "run", steps, sinks=[name])
        assert "sink_failed" not in summary.events
