"""A disk that takes no more lines: samples go first, the run goes on loudly, and ends after three steps."""

import errno
import os
import warnings

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
    with pytest.warns(UserWarning, match=r"run: step 3 was not recorded: .*No space left on device"):
        summary = run(make_trainer(), 8, folder, checkpoint_every=4, progress=None, curve=False)
    assert summary.reason == reason
    assert summary.events["metrics_failed"] == min(failures, 3)
    assert summary.checkpoint is not None
    assert summary.step == (8 if reason == "done" else 5)
    assert ("make room, then resume" in summary.why) == (reason == "unsaved")


def test_a_folder_that_takes_nothing_any_more_is_told_at_once(tmp_path, monkeypatch):
    """Neither lines nor checkpoints, nor the event about it: standard error is all that is left."""

    def full(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    def close_the_disk(report):
        if report.step == 2:
            folder.close()
            monkeypatch.setattr(os, "write", full)
            monkeypatch.setattr("grpo.run.checkpoint.save_file", full)

    folder = make_folder(tmp_path / "run")
    with warnings.catch_warnings(record=True, action="always") as told:
        summary = run(make_trainer(), 9, folder, checkpoint_every=1, stop=close_the_disk, progress=None, curve=False)
    assert (summary.reason, summary.exit_code) == ("unsaved", 1)
    texts = [str(warning.message) for warning in told]
    assert any("run: step 3 was not recorded" in text for text in texts)
    assert any("was not saved, the older ones are kept" in text for text in texts)
    assert sum("events.jsonl cannot be written" in text for text in texts) == 1


def test_a_run_that_could_not_be_saved_says_why_at_its_end(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("grpo.run.checkpoint.save_file", full)
    with pytest.warns(UserWarning, match="step 1 was not saved"):
        summary = run(
            make_trainer(), 9, make_folder(tmp_path / "run"), checkpoint_every=1, progress="plain", curve=False
        )
    assert (summary.reason, summary.step) == ("unsaved", 3)
    assert "ended=unsaved\nwhy=step 3 was not saved" in capsys.readouterr().out
