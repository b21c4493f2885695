"""Output that goes away: a reader that has had enough, a full disk, closed streams. A run is none the worse for it."""

import io
import os
import subprocess
import sys

import pytest

from grpo.cli import main
from grpo.run import output
from grpo.run.folder import RunFolder
from grpo.run.progress import Plain
from tests.faults.tiny import fingerprint, train


class Gone(io.StringIO):
    """A stream that takes two writes and no more."""

    def __init__(self, error):
        super().__init__()
        self.error, self.left = error, 2

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


class Narrow(io.StringIO):
    """A stream that knows only ASCII."""

    def write(self, text):
        return super().write(text.encode("ascii").decode())


LOST = {
    "a closed pipe": lambda: Gone(BrokenPipeError(32, "Broken pipe")),
    "a full disk": lambda: Gone(OSError(28, "No space left on device")),
    "a lost terminal": lambda: Gone(OSError(5, "Input/output error")),
    "closed meanwhile": lambda: Gone(ValueError("I/O operation on closed file")),
    "closed from the start": lambda: None,
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("progress", ["plain", "live"])
def test_output_that_goes_away_is_said_once(how, progress, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", LOST[how]())
    monkeypatch.setattr(sys, "stderr", LOST[how]())

    def heard(report):
        print("as a warning is printed", file=sys.stderr)
        print("and a callback's own word", flush=True)
        return False

    summary, _ = train(tmp_path / "run", progress=progress, stop=heard)
    monkeypatch.undo()
    assert (summary.reason, summary.exit_code) == ("done", 0)
    told = [row["message"] for row in RunFolder.open(tmp_path / "run").events()]
    assert sorted(text.split(" is gone")[0] for text in told) == ["standard error", "standard output"]
    assert fingerprint(tmp_path / "run") == whole[1]


def test_a_progress_file_that_is_full(tmp_path):
    summary, _ = train(tmp_path / "run", 4, progress=Plain(file=LOST["a full disk"]()))
    assert summary.reason == "done"


def test_what_the_encoding_cannot_say_is_spelled_out(monkeypatch):
    monkeypatch.setattr(sys, "stdout", narrow := Narrow())
    with output.standing():
        print("π → 3")
    assert narrow.getvalue() == "\\u03c0 \\u2192 3\n"
    assert sys.stdout is narrow


def test_a_command_ends_as_it_would_have(tmp_path):
    """In a process of its own: the interpreter flushes once more at its end, and would exit with 120."""
    command = [sys.executable, "-m", "grpo.cli", "train", "bandit", "--run.steps", "30", "--logdir", tmp_path / "run"]
    read, written = os.pipe()
    os.close(read)
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.PIPE, timeout=120)
    os.close(written)
    assert (ended.returncode, ended.stderr) == (0, b"")
    folder = RunFolder.open(tmp_path / "run")
    assert [row["event"] for row in folder.events()] == ["output_lost"]
    assert folder.metrics()[-1]["step"] == 30


@pytest.mark.parametrize("error, code", [(BrokenPipeError(32, "Broken pipe"), 0), (OSError(28, "No space left"), 1)])
def test_what_was_asked_for_and_not_written_is_a_failure(error, code, monkeypatch, capsys):
    """Unlike a run, a table is nothing but what it prints; with a closed pipe its reader has had enough."""
    gone = Gone(error)
    gone.left = 0
    monkeypatch.setattr(sys, "stdout", gone)
    assert main(["presets"]) == code
    assert ("could not be written" in capsys.readouterr().err) == bool(code)


def test_closed_descriptors_are_not_taken_by_files_of_the_run(forge, whole, tmp_path):
    """Else whatever prints would print into metrics.jsonl."""
    assert forge(tmp_path / "run", closed=[0, 1, 2])["code"] == 0
    assert fingerprint(tmp_path / "run") == whole[1]
