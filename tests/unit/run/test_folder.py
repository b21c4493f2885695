"""The run folder: written once, read back, cut back, refused where it must be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo.run.files import write_atomic
from grpo.run.folder import FolderError, RunFolder, metric_name, run_path

ABOUT = {"task": "bandit", "config": {"beta": 0.1, "path": Path("x")}, "created": "2026-11-15", "seed": 3}


@pytest.fixture
def folder(tmp_path):
    with_close = RunFolder.create(tmp_path / "run", **ABOUT)
    yield with_close
    with_close.close()


def test_what_is_created_can_be_opened(folder):
    again = RunFolder.open(folder.path)
    assert again.config == {"beta": 0.1, "path": "x"}
    assert {name: again.about[name] for name in ("schema", "task", "created", "seed")} == {
        "schema": 1,
        "task": "bandit",
        "created": "2026-11-15",
        "seed": 3,
    }
    assert {"python", "torch", "numpy"} <= set(again.about["versions"])
    assert sorted(path.name for path in folder.path.parent.iterdir()) == ["run"]


def test_lines_come_back_as_written(folder):
    folder.append_metrics(1, {"reward": 0.1, "kl": None, "bad": float("inf"), "count": np.int64(3)})
    folder.append_timing(1, {"collect": 0.5}, 0.75)
    folder.event(1, "odd", "a\nb \ud800", file="x")
    folder.event(1, "odd", "again")
    assert folder.metrics() == [{"step": 1, "reward": 0.1, "kl": None, "bad": None, "count": 3.0}]
    assert folder.timing() == [{"step": 1, "total": 0.75, "collect": 0.5}]
    assert [(e["event"], e["count"], e["message"]) for e in folder.events()] == [
        ("odd", 1, "a\nb \ud800"),
        ("odd", 2, "again"),
    ]


def test_reading_while_a_line_is_being_written(folder):
    folder.append_metrics(1, {"reward": 0.5})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert folder.metrics() == [{"step": 1, "reward": 0.5}]


def test_a_broken_line_is_named(folder):
    (folder.path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(FolderError, match=r"metrics\.jsonl:2: not a JSON line"):
        folder.metrics()


def test_cut_back_to_a_step(folder):
    for step in range(1, 6):
        folder.append_metrics(step, {"reward": step / 3})
        folder.append_timing(step, {}, 0.1)
        folder.write_samples(step, [{"row": 0}], {"mask": np.ones((1, 1), bool)})
        (folder.path / "samples" / f"step-{step:08d}-film-9.mp4").write_bytes(b"film")
    kept = (folder.path / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]
    folder.truncate_after(3)
    assert (folder.path / "metrics.jsonl").read_text() == "".join(kept)
    assert [row["step"] for row in folder.timing()] == [1, 2, 3]
    assert folder.sample_steps() == [1, 2, 3] and folder.film_steps() == {1, 2, 3}
    folder.append_metrics(4, {})
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3, 4]


def test_samples_come_back(folder):
    arrays = {"logp": np.array([[-1.5, 0.0]], np.float16), "mask": np.array([[True, False]])}
    folder.write_samples(10, [{"row": 0, "text": "\x1b[31mred\0 \ud800"}], arrays)
    rows, found = folder.samples(10)
    assert rows[0]["text"] == "\x1b[31mred\0 \ud800"
    assert found["logp"].dtype == np.float16
    np.testing.assert_array_equal(found["mask"], arrays["mask"])


def test_objects_are_refused_in_samples(folder):
    with pytest.raises(ValueError, match="pickle"):
        folder.write_samples(1, [], {"evil": np.array([object()])})
    assert list((folder.path / "samples").iterdir()) == []


def test_nothing_is_overwritten(folder, tmp_path):
    with pytest.raises(FolderError, match="already holds a run; resume it"):
        RunFolder.create(folder.path, **ABOUT)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("mine")
    with pytest.raises(FolderError, match="not empty"):
        RunFolder.create(tmp_path / "model", **ABOUT)
    assert (tmp_path / "model" / "config.json").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", **ABOUT)


def test_what_is_no_run_folder_is_refused(folder, tmp_path):
    with pytest.raises(FolderError, match=r"no run\.json"):
        RunFolder.open(tmp_path)
    (folder.path / "run.json").write_text("{}")
    with pytest.raises(FolderError, match="no schema"):
        RunFolder.open(folder.path)
    (folder.path / "run.json").write_text("[1")
    with pytest.raises(FolderError, match=r"run\.json cannot be read"):
        RunFolder.open(folder.path)


def test_a_newer_schema_is_refused_with_the_remedy(folder):
    about = folder.about | {"schema": 2}
    (folder.path / "run.json").write_text(json.dumps(about))
    with pytest.raises(FolderError, match=r"schema 2, this one reads up to 1.*pip install -U anygrpo"):
        RunFolder.open(folder.path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "old")

    def fail(file):
        file.write(b"new")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_atomic(path, fail)
    assert [left.name for left in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_half_a_line_is_taken_back(folder, monkeypatch):
    folder.append_metrics(1, {"reward": 1.0})
    real = os.write

    def short(descriptor, content):
        return real(descriptor, content[:5])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="part of a line"):
        folder.append_metrics(2, {"reward": 2.0})
    folder.event(2, "full", "must not raise")
    monkeypatch.undo()
    assert folder.counts["events_lost"] == 1
    folder.append_metrics(2, {"reward": 2.0})
    assert [row["step"] for row in folder.metrics()] == [1, 2]


@pytest.mark.parametrize(
    "name, safe",
    [
        ("clip_ratio/low_mean", "clip_ratio/low_mean"),
        ("../../x", "__/__/x"),
        ("/abs", "abs"),
        ("a\x1b[0m\n<b>", "a__0m__b_"),
        ("", "_"),
        ("x" * 300, "x" * 100),
    ],
)
def test_metric_names_are_made_safe(name, safe):
    assert metric_name(name) == safe


def test_run_names(tmp_path):
    assert run_path(tmp_path, "bandit-20261115-101500") == tmp_path / "bandit-20261115-101500"


def test_reading_loads_no_framework(folder):
    read = f"RunFolder.open({str(folder.path)!r}).metrics()"
    code = f"import sys; from grpo.run.folder import RunFolder; {read}; print({{'torch', 'jax'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.stdout.strip() == "set()", done.stderr


def test_a_write_that_was_cut_is_cleared_away(folder):
    (folder.path / "samples" / ".step-00000001.npz.123.tmp").write_bytes(b"half")
    (folder.path / ".metrics.jsonl.123.tmp").write_bytes(b"half")
    folder.truncate_after(0)
    assert not list(folder.path.rglob("*.tmp"))
