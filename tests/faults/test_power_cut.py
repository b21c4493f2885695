"""What a power cut must find: bytes are on the disk before the name that vouches for them, and the name before anything
that relies on it. No disk is cut here: the order of the calls that make it so is looked at."""

import os
from pathlib import Path

import pytest

from grpo.run import checkpoint
from grpo.run.files import write_atomic
from tests.faults.tiny import QUICK, make_folder, make_trainer, run


@pytest.fixture
def calls(monkeypatch):
    """("sync", inode) and ("name", new name), in the order in which they happen."""
    seen, fsync = [], os.fsync

    def synced(descriptor):
        seen.append(("sync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    for function in ("rename", "replace"):
        real = getattr(os, function)

        def named(before, after, *, real=real, **where):
            real(before, after, **where)
            seen.append(("name", Path(after).name))

        monkeypatch.setattr(os, function, named)
    return seen


def first(calls, what, path):
    """When a file or folder was synced first: with all of its bytes, where it is a file."""
    found = path.stat()
    size = (found.st_size,) if path.is_file() else ()
    return next((at for at, call in enumerate(calls) if call[: 2 + len(size)] == (what, found.st_ino, *size)), None)


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_afterwards(calls, tmp_path):
    write_atomic(tmp_path / "file", "content")
    name = calls.index(("name", "file"))
    assert first(calls, "sync", tmp_path / "file") < name
    assert name < first(calls, "sync", tmp_path)


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(calls, tmp_path):
    folder = make_folder(tmp_path / "run")
    calls.clear()
    path = checkpoint.save(folder, make_trainer().state(), 3)
    name = calls.index(("name", "step-00000003"))
    for inside in (*path.iterdir(), path):
        assert first(calls, "sync", inside) is not None, f"{inside.name} was never synced"
        assert first(calls, "sync", inside) < name, inside.name
    assert first(calls[name:], "sync", folder.checkpoints) is not None, "the rename itself was never synced"
    assert name < calls.index(("name", "latest")), "the pointer names what is not there yet"


def test_a_checkpoint_is_never_newer_than_its_metrics(calls, tmp_path):
    folder = make_folder(tmp_path / "run")
    calls.clear()
    run(make_trainer(), 3, folder, **QUICK)
    name = calls.index(("name", "step-00000003"))
    for lines in ("metrics.jsonl", "timing.jsonl"):
        assert first(calls[:name], "sync", folder.path / lines) is not None, lines
