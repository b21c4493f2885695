"""A disk that takes no more lines: samples go first, the run goes on loudly, and ends after three steps."""

import errno

import pytest

from grpo.run.folder import RunFolder
from grpo.run.loop import run
from tests.faults.tiny import make_folder, make_trainer


@pytest.mark.parametrize(("failures", "reason"), [(2, "done"), (10, "unsaved")])
def test_metrics_that_cannot_be_written(tmp_path, monkeypatch, failures, reason):
    folder, written = make_folder(tmp_path / "run"), RunFolder.append_metrics
    left = [failures]

    def full(self, step, metrics):
        if step > 2 and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(self, step, metrics)

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    summary = run(make_trainer(), 8, folder, checkpoint_every=4, progress=None, curve=False)
    assert summary.reason == reason
    assert summary.events["metrics_failed"] == min(failures, 3)
    assert summary.checkpoint is not None
    assert summary.step == (8 if reason == "done" else 5)
