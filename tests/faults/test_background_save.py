"""Checkpoints written beside the training: same files, same order, of the right step, and nobody leaves early."""

import os
import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch

from grpo.protocols import State
from grpo.run import checkpoint
from grpo.run.folder import RunFolder
from grpo.run.saving import Saving
from grpo.run.signals import LeaveAtOnce, StopSignals
from tests.faults.tiny import QUICK, fingerprint, make_folder, make_trainer, run, train

LONG = 120
"""Seconds after which a test that hangs has failed."""


class Points:
    """Counts the points of a run, and holds a save up at one of them until a step begins."""

    def __init__(self, hold=None, until=0):
        self.seen, self.count, self._hold, self._until = [], Counter(), hold, until
        self._begun = threading.Event()

    def __call__(self, point):
        self.seen.append(point)
        self.count[point] += 1
        if point == "step" and self.count[point] == self._until:
            self._begun.set()
        if (point, self.count[point]) == (self._hold, 1):
            assert self._begun.wait(LONG), "training does not go on while a checkpoint is written"


@pytest.mark.parametrize("point", checkpoint.POINTS)
def test_training_goes_on_wherever_a_save_is(point, tmp_path, whole):
    summary, _ = train(tmp_path / "run", at=Points(point, until=5))
    assert (summary.reason, summary.checkpoint.name) == ("done", "step-00000012")
    assert fingerprint(tmp_path / "run") == whole[1]


def test_one_is_finished_before_the_next_begins(tmp_path):
    points = Points()
    train(tmp_path / "run", 6, checkpoint_every=1, at=points)
    assert [point for point in points.seen if point != "step"] == [*checkpoint.POINTS] * 6


class Counting:
    """A source with an array that it changes in place."""

    def __init__(self, inner):
        self._inner, self.total, self.sums = inner, np.zeros(3), torch.zeros(3)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def collect(self, request):
        self.total += 1
        self.sums += 1
        return self._inner.collect(request)

    def state(self):
        return State({"inner": dict(self._inner.state().values)}, {"total": self.total, "sums": self.sums})


def test_a_checkpoint_is_of_its_own_step_however_late_it_is_written(tmp_path):
    trainer, kept = make_trainer(), {}
    trainer.source = Counting(trainer.source)

    def look(report):
        if report.step == 3:
            kept.update(values=trainer.state().values, arrays=trainer.state().arrays)
        return report.step == 5

    run(trainer, 9, make_folder(tmp_path / "run"), stop=look, at=Points("folder", until=5), **QUICK)
    found = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000003").state
    assert found.values == checkpoint.json.loads(checkpoint.dumps(kept["values"]))
    assert found.values["steps_done"] == 3 and found.arrays["source/total"].tolist() == [3.0, 3.0, 3.0]
    assert found.arrays["source/sums"].tolist() == [3.0, 3.0, 3.0]
    for name, array in kept["arrays"].items():
        assert np.array_equal(np.asarray(found.arrays[name]), np.asarray(array)), name


def writing():
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def test_a_failure_is_told_as_soon_as_it_has_happened_and_the_next_save_is_waited_for(monkeypatch, tmp_path):
    count, real, told = iter(range(100)), checkpoint.save_file, {}

    def save_file(arrays, path):
        if next(count) == 0:
            raise OSError(28, "No space left on device", str(path))
        real(arrays, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    folder = make_folder(tmp_path / "run")

    def at(point):
        if point == "step":
            for thread in writing():
                thread.join(LONG)

    def look(report):
        told[report.step] = folder.counts["checkpoint_failed"]

    summary = run(make_trainer(), 9, folder, stop=look, at=at, **QUICK)
    assert [told[step] for step in (3, 4, 5)] == [0, 1, 1]
    assert summary.reason == "done" and summary.events["checkpoint_failed"] == 1
    (event,) = [event for event in folder.events() if event["event"] == "checkpoint_failed"]
    assert event["step"] == 3 and "No space left" in event["message"]
    assert [path.name for path in checkpoint.steps(folder)] == ["step-00000006", "step-00000009"]


def test_a_mistake_of_ours_ends_the_run(monkeypatch, tmp_path):
    def wrong(*_, **__):
        raise ValueError("no such thing")

    monkeypatch.setattr(checkpoint, "publish", wrong)
    with pytest.raises(ValueError, match="no such thing"):
        train(tmp_path / "run")


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_whoever_leaves_waits_for_it(error, tmp_path, whole):
    leaving = threading.Event()

    def at(point):
        if point == "arrays":
            assert leaving.wait(LONG)

    def stop(report):
        if report.step == 4:
            leaving.set()
            raise error

    with pytest.raises(error):
        train(tmp_path / "run", stop=stop, at=at)
    assert writing() == []
    folder = RunFolder.open(tmp_path / "run")
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["latest", "step-00000003"]
    train(tmp_path / "run")  # at once: nobody holds the lock
    assert fingerprint(tmp_path / "run") == whole[1]


def test_whoever_is_called_away_from_waiting_for_it_waits_again(tmp_path):
    """By a second Ctrl-C: the save ends with the file it is at, before the run is left, and is not called whole."""
    waiting, away = threading.Event(), threading.Event()

    def at(point):
        if point == "arrays":
            assert waiting.wait(LONG)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            assert away.wait(LONG)

    saving = Saving(make_folder(tmp_path / "run"), None, 0, at)
    with StopSignals() as listener:
        listener.reason = "interrupted"  # by the first
        saving.save(checkpoint.snapshot(make_trainer().state(), 3))
        with pytest.raises(LeaveAtOnce):
            waiting.set()
            saving.settle()
    threading.Timer(0.2, away.set).start()
    saving.finish(cut=True)
    assert away.is_set() and writing() == []
    assert saving.step is None and list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_the_last_one_is_there_when_the_run_returns(tmp_path):
    summary, _ = train(tmp_path / "run", 3)
    assert checkpoint.resume_point(RunFolder.open(tmp_path / "run")).step == summary.step == 3
    assert writing() == []


def test_killed_with_training_ahead_of_the_save(forge, whole, tmp_path):
    """Metrics, and perhaps samples, of steps that no checkpoint has: done again."""
    path = tmp_path / "run"
    assert forge(path, hurt=[["step", 6, signal.SIGKILL.value]])["code"] == -signal.SIGKILL
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]


def test_what_a_checkpoint_costs_is_in_the_times(tmp_path):
    train(tmp_path / "run", 5)
    assert ["checkpoint" in row for row in RunFolder.open(tmp_path / "run").timing()] == [
        False,
        False,
        False,
        True,
        False,
    ]


def test_where_no_thread_can_start_the_save_is_written_at_once(tmp_path, whole, monkeypatch):
    """What is under way, and never ends, was waited for."""
    begun = threading.Thread.start

    def full(thread):
        if type(thread).__name__ == "_Publication":
            raise RuntimeError("can't start new thread")
        begun(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    summary, _ = train(tmp_path / "run")
    assert (summary.reason, summary.checkpoint.name) == ("done", "step-00000012")
    assert fingerprint(tmp_path / "run") == whole[1]
