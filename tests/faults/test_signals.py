"""Ctrl-C, SIGTERM and SIGHUP: a checkpoint, the right exit code, and exactly the same run afterwards."""

import os
import random
import signal
import threading

import pytest

from grpo.run import checkpoint
from grpo.run.folder import RunFolder
from tests.faults.tiny import QUICK, fingerprint, make_folder, make_trainer, run

INT, TERM, HUP = signal.SIGINT.value, signal.SIGTERM.value, signal.SIGHUP.value


@pytest.mark.parametrize("number, code", [(INT, 130), (TERM, 75), (HUP, 75)])
@pytest.mark.parametrize("point", ["step", "arrays"])
def test_a_signal_finishes_the_step_and_publishes_a_checkpoint(point, number, code, forge, whole, tmp_path):
    path = tmp_path / "run"
    assert forge(path, hurt=[[point, 2, number]])["code"] == code
    folder = RunFolder.open(path)
    step = folder.metrics()[-1]["step"]
    assert step in {"step": (2,), "arrays": (6, 7, 8, 9)}[point]  # training goes on while files are written
    assert checkpoint.load(checkpoint.steps(folder)[-1]).step == step
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]


@pytest.mark.parametrize("seed", range(4))
def test_a_signal_at_a_random_moment(seed, forge, whole, tmp_path):
    path, moment = tmp_path / "run", whole[2] * random.Random(seed).random()
    assert forge(path, kill_after=moment, kill_with=TERM)["code"] in (75, 0, -TERM)  # the last: before run() began
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]


def test_a_signal_before_the_first_step_leaves_nothing_to_resume(forge, whole, tmp_path):
    assert forge(tmp_path / "run", hurt=[["step", 1, TERM]], options={"checkpoint_every": 100})["code"] == 75
    assert forge(tmp_path / "run")["code"] == 0
    assert fingerprint(tmp_path / "run") == whole[1]


def test_a_second_ctrl_c_leaves_at_once_without_half_a_checkpoint(forge, whole, tmp_path):
    path = tmp_path / "run"
    assert forge(path, hurt=[["step", 5, INT], ["arrays", 2, INT]])["code"] == 99  # KeyboardInterrupt came through
    assert [left.name for left in sorted((path / "checkpoints").iterdir())] == ["latest", "step-00000003"]
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]


def test_a_second_ctrl_c_cuts_a_save_beside_the_training_short(forge, whole, tmp_path):
    """Both come from within the save of step 6; it is whole or not there."""
    path = tmp_path / "run"
    assert forge(path, hurt=[["folder", 2, INT], ["arrays", 2, INT]])["code"] == 99
    left = {left.name for left in (path / "checkpoints").iterdir()}
    assert {"latest", "step-00000003"} <= left <= {"latest", "step-00000003", "step-00000006"}
    assert forge(path)["code"] == 0
    assert fingerprint(path) == whole[1]


def test_a_second_sigterm_changes_nothing(forge, tmp_path):
    """Schedulers send several; the checkpoint must still be finished."""
    assert forge(tmp_path / "run", hurt=[["step", 5, TERM], ["arrays", 2, TERM]])["code"] == 75
    assert checkpoint.steps(RunFolder.open(tmp_path / "run"))[-1].name == "step-00000005"


def test_handlers_are_put_back(tmp_path):
    def mine(number, frame): ...

    before, interrupted = signal.signal(signal.SIGTERM, mine), signal.getsignal(signal.SIGINT)  # a shell may ignore it
    try:
        inside = []
        run(
            make_trainer(),
            1,
            make_folder(tmp_path / "run"),
            stop=lambda report: inside.append(signal.getsignal(signal.SIGTERM)),
            **QUICK,
        )
        assert inside != [mine]
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(ZeroDivisionError):
            run(make_trainer(), 1, make_folder(tmp_path / "other"), stop=lambda report: 1 // 0, **QUICK)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is interrupted


def test_a_hang_up_is_left_to_nohup(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        folder, hang_up = make_folder(tmp_path / "run"), lambda report: os.kill(os.getpid(), HUP)
        assert run(make_trainer(), 3, folder, stop=hang_up, **QUICK).reason == "done"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_a_notebook_an_interrupt_returns_a_summary(tmp_path):
    summary = run(
        make_trainer(),
        9,
        make_folder(tmp_path / "run"),
        stop=lambda report: os.kill(os.getpid(), signal.SIGINT),
        **QUICK,
    )
    assert (summary.reason, summary.step, summary.exit_code) == ("interrupted", 1, 130)


def test_runs_in_a_thread_where_no_handler_can_be_set(tmp_path):
    found = []
    work = threading.Thread(target=lambda: found.append(run(make_trainer(), 2, make_folder(tmp_path / "run"), **QUICK)))
    work.start()
    work.join()
    assert found[0].reason == "done"
