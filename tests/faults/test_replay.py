"""Replay: bad steps are refused by name, a full disk is survived, a damaged file is named, a kill loses nothing."""

import errno
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from grpo.config import ConfigError
from grpo.run import checkpoint
from grpo.run.files import FolderError
from grpo.run.folder import RunFolder
from grpo.worldmodel.replay.buffer import Replay
from grpo.worldmodel.replay.records import ReplayError
from tests.unit.worldmodel.test_replay import TICKS, made, onehot, play, same, step_of, steps_of


@pytest.fixture(scope="module")
def whole():
    """What nothing happened to."""
    return play(made("memory", None), TICKS)


# --- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", ["where", "reward", "action"])
def test_numbers_that_are_none_are_refused_with_lane_key_and_step(bad, key):
    replay, clean = made("memory", None), made("memory", None)
    for t in range(7):
        replay.add_batch(steps_of(range(3), t))
        clean.add_batch(steps_of(range(3), t))
    steps = steps_of(range(3), 7)
    steps[key].reshape(3, -1)[1, -1] = bad
    with pytest.raises(ReplayError, match=rf"lane 1, step 7: {key} is NaN or infinite"):
        replay.add_batch(steps)
    assert len(replay) == 21  # the other lanes' steps neither
    same(replay.sample(5), clean.sample(5))


def test_what_double_precision_holds_and_single_does_not_is_infinite():
    replay = Replay(1000, 5)
    replay.add(step_of(0, 0) | {"where": np.array([0.0, 1.0])})
    with np.errstate(over="ignore"), pytest.raises(ReplayError, match="lane 0, step 1: where is NaN or infinite"):
        replay.add(step_of(0, 1) | {"where": np.array([0.0, 1e300])})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image": np.zeros((2, 3, 1), np.uint8)}, r"lane 0, step 1: image has the shape \(2, 3, 1\)"),
        (
            {"image": np.zeros((2, 2, 1), np.float32)},
            "lane 0, step 1: image has the type float32, at first it was uint8",
        ),
        ({"where": np.zeros(2)}, "lane 0, step 1: where has the type float64, at first it was float32"),
        ({"action": np.zeros(2, np.float32)}, "lane 0, step 1: action has the shape"),
        ({"reward": np.zeros(2)}, "lane 0, step 1: reward has the shape"),
        ({"smell": 1.0}, "lane 0, step 1: the keys differ from the first step's in smell"),
        ({"is_terminal": True, "is_last": False}, "lane 0, step 1: is_terminal without is_last"),
    ],
)
def test_a_step_that_is_unlike_the_first_is_named(change, said):
    replay = Replay(1000, 5)
    replay.add(step_of(0, 0))
    with pytest.raises(ReplayError, match=said):
        replay.add(step_of(0, 1) | change)
    assert len(replay) == 1


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"reward": 0.0}, "a step has no action, is_first, is_last, is_terminal"),
        (step_of(0, 0) | {"word": np.array("tree")}, "word has the type <U4; steps hold numbers"),
        (step_of(0, 0) | {"action": 1}, "action has the shape"),
    ],
)
def test_a_first_step_that_cannot_be_one_is_refused_and_the_next_may_be(step, said):
    replay = Replay(1000, 5)
    with pytest.raises(ReplayError, match=said):
        replay.add(step)
    replay.add(step_of(0, 0))
    assert len(replay) == 1


@pytest.mark.parametrize("lanes", [[0, 0], [0, 3], [-1, 0]])
def test_lanes_that_are_none_are_refused(lanes):
    with pytest.raises(ReplayError, match="each once, from 0 to 2"):
        made("memory", None).add_batch(steps_of([0, 1], 0), np.array(lanes))


def test_rows_must_be_as_many_as_lanes():
    with pytest.raises(ReplayError, match="2 rows for 3 lanes"):
        made("memory", None).add_batch(steps_of([0, 1], 0))


def test_too_few_steps_for_a_sequence():
    replay = made("memory", None)
    with pytest.raises(ReplayError, match="a sequence has 5 steps, and no lane more than 0 yet"):
        replay.sample(1)
    for t in range(4):
        replay.add_batch(steps_of(range(3), t))
    with pytest.raises(ReplayError, match="no lane more than 4 yet; add steps first"):
        replay.sample(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity": 10}, "capacity=10 is too small for 3 lanes: at least 27"),
        ({"length": 0}, "length=0"),
        ({"memory": 10}, "memory=10 needs a folder"),
        ({"latent_dtype": "int8"}, "latent_dtype='int8'"),
    ],
)
def test_settings_that_cannot_work(options, said):
    with pytest.raises(ConfigError, match=said):
        made("memory", None, **options)


def test_more_than_there_is_memory_for_is_said_at_the_first_step():
    replay = Replay(10**15, 5, chunk=10**12)
    with pytest.raises(ConfigError, match="lower capacity, or give a folder and lower memory"):
        replay.add(step_of(0, 0))


def test_latents_that_are_none_are_refused_and_the_old_ones_stay():
    replay = made("memory", None)
    for t in range(6):
        replay.add_batch(steps_of(range(3), t))
    ids, good = np.array([0, 1, 2]), onehot(np.zeros((3, 2), int))
    replay.write_latents(ids, np.ones((3, 3)), good)
    with pytest.raises(ReplayError, match="NaN or infinite"):
        replay.write_latents(ids, np.full((3, 3), np.nan), good)
    with pytest.raises(ReplayError, match="not one-hot"):
        replay.write_latents(ids, np.zeros((3, 3)), np.full((3, 2, 4), 0.25))
    with pytest.raises(ReplayError, match="have the shapes"):
        replay.write_latents(ids, np.zeros((3, 2)), good)
    with pytest.raises(ConfigError, match="keeps no latents"):
        Replay(1000, 5).write_latents(ids, np.zeros((3, 3)), good)
    sample = replay.peek(40, 0)
    assert set(sample.deter_BD[sample.ids_BT[:, 0] >= 3].ravel()) == {1.0}


# --- disk -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be full: half of a file is written, then no more."""
    state, save = {"full": False, "refused": 0}, np.save

    def written(file, records, **options):
        if state["full"]:
            state["refused"] += 1
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, records, **options)

    monkeypatch.setattr(np, "save", written)
    return state


def test_a_full_disk_is_said_once_and_changes_nothing_while_memory_lasts(disk, whole, tmp_path):
    replay = made("folder", tmp_path)
    samples = play(replay, TICKS[:20])
    disk["full"] = True
    with pytest.warns(UserWarning, match=r"replay: .*No space left on device; the replay goes on in memory") as said:
        samples += play(replay, TICKS[20:40])
    assert len(said) == 1 and disk["refused"] > 1
    assert not list(replay._store._files.path.glob(".*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = replay.state()
        disk["full"] = False
        samples += play(replay, TICKS[40:])
    assert not replay._store._unwritten
    for one, other in zip(whole, samples, strict=True):
        same(one, other)
    again = made("folder", tmp_path)  # a state of the full disk is as good as any
    again.load_state(state)
    for one, other in zip(whole[30:], play(again, TICKS[40:]), strict=True):
        same(one, other)


def test_when_memory_is_full_too_the_step_is_refused_and_nothing_is_lost(disk, whole, tmp_path):
    replay = made("some", tmp_path)
    samples = play(replay, TICKS[:20])
    disk["full"] = True
    with pytest.warns(UserWarning), pytest.raises(FolderError, match="takes no more, and memory is for 40 steps only"):
        for tick in TICKS[20:]:
            samples += play(replay, [tick])
    state = replay.state()
    disk["full"] = False
    samples += play(replay, range(tick, 70))
    for one, other in zip(whole, samples, strict=True):
        same(one, other)
    again = made("some", tmp_path)
    again.load_state(state)
    for one, other in zip(whole[tick - 10 :], play(again, range(tick, 70)), strict=True):
        same(one, other)


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="choose a folder you may write to"):
        Replay(1000, 5, tmp_path / "file" / "replay")


def saved(tmp_path, kind="small"):
    replay = made(kind, tmp_path)
    play(replay, range(30))
    state = replay.state()
    replay.close()
    return state, sorted((tmp_path / "replay").iterdir())


@pytest.mark.parametrize("kind", ["small", "folder"])
@pytest.mark.parametrize("which", ["steps", "latents"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "flipped", "other"])
def test_a_chunk_that_is_missing_or_damaged_is_named(kind, which, damage, tmp_path):
    state, files = saved(tmp_path, kind)
    path = next(path for path in files if path.name.startswith(which))
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-5])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        content[-20] ^= 1
        path.write_bytes(content)
    else:
        with path.open("wb") as file:
            np.save(file, np.zeros(4))
    with pytest.raises(FolderError, match=rf"{path.name} is (missing|damaged).*go on from another checkpoint"):
        made(kind, tmp_path).load_state(state)
    assert {path.name for path in files} - {path.name for path in path.parent.iterdir()} <= {path.name}


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_file_that_breaks_under_a_running_replay_is_named(damage, tmp_path):
    replay = made("small", tmp_path, most_open=1)
    play(replay, range(30))
    for path in (tmp_path / "replay").glob("steps-*"):
        os.truncate(path, path.stat().st_size // 2) if damage == "cut" else path.unlink()
    with pytest.raises(FolderError, match=r"steps-.*npy (is missing|is damaged|ends before)"):
        for _ in range(20):
            replay.sample(4)


def test_a_state_goes_only_with_its_own_settings_and_folder(tmp_path):
    state, _ = saved(tmp_path)
    with pytest.raises(ConfigError, match="length: 5 → 6"):
        made("small", tmp_path, length=6).load_state(state)
    with pytest.raises(ConfigError, match=r"latent: \[3, 2, 4, 'float32'\] → \[3, 2, 4, 'float16'\]"):
        made("small", tmp_path, latent_dtype="float16").load_state(state)
    with pytest.raises(ConfigError, match="saved with a folder"):
        made("memory", tmp_path).load_state(state)
    replay = made("memory", None)
    play(replay, range(30))
    with pytest.raises(ConfigError, match="raise memory"):
        made("small", tmp_path).load_state(replay.state())


SCRIPT = """
import os, signal, sys
from pathlib import Path
from grpo.run import checkpoint
from tests.faults.tiny import make_folder
from tests.unit.worldmodel.test_replay import TICKS, made, play

path = Path(sys.argv[1])
folder, replay = make_folder(path / "run"), made("some", path)
for tick in TICKS:
    if tick % 11 == 0:
        checkpoint.save(folder, replay.state(), tick, keep_last=2)
    if tick == 50:
        (path / "replay" / ".steps-00000-00000099.npy.1.tmp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    play(replay, [tick])
"""


@pytest.mark.slow
def test_killed_and_resumed_from_its_checkpoint(whole, tmp_path):
    command, root = [sys.executable, "-c", SCRIPT, str(tmp_path)], Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, timeout=300, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    found = checkpoint.resume_point(RunFolder.open(tmp_path / "run"))
    assert found.step == 44
    replay = made("some", tmp_path)
    replay.load_state(found.state)
    for one, other in zip(whole[44 - 10 :], play(replay, TICKS[44:]), strict=True):
        same(one, other)
    assert not list((tmp_path / "replay").glob(".*"))
