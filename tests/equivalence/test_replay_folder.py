"""A replay on a disk of its own: the run stays the same, nobody else's files are touched, a small disk is told of."""

import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo.cli import main
from grpo.config import ConfigError
from grpo.run.files import FolderError
from grpo.run.folder import RunFolder
from grpo.worldmodel.config import WorldModelConfig
from grpo.worldmodel.replay.buffer import Replay
from grpo.worldmodel.replay.chunks import ChunkFolder
from grpo.worldmodel.replay.ownership import OWNER, Kept, claimed, sign
from tests.equivalence.test_worldmodel import DISK, Cut, train
from tests.unit.worldmodel.test_replay import step_of
from tests.unit.worldmodel.worlds import make


@pytest.mark.slow
def test_cut_moved_and_resumed_with_less_memory_is_the_run_that_was_not(tmp_path):
    """Steps lie in the named folder alone; run and replay are moved to other disks between the cut and the rest."""
    long = {"prefill": 100, "steps_per_collect": 30, "batch_length": 6} | DISK
    train(tmp_path / "whole", long, steps=5)
    with pytest.raises(Cut):
        train(tmp_path / "cut", long | {"replay_folder": str(tmp_path / "far")}, steps=5, cut_at=4)
    assert not (tmp_path / "cut" / "replay").exists() and list((tmp_path / "far").glob("steps-*.npy"))
    shutil.move(tmp_path / "cut", tmp_path / "moved")
    shutil.move(tmp_path / "far", tmp_path / "farther")
    train(tmp_path / "moved", long | {"replay_folder": str(tmp_path / "farther"), "replay_memory": 50}, steps=5)
    one, other = (learned(tmp_path / name) for name in ("moved", "whole"))
    assert one == other


def learned(path):
    """All that was learned and told, but for how much of the replay was in memory."""
    rows = [{k: v for k, v in row.items() if k != "replay_on_disk"} for row in RunFolder.open(path).metrics()]
    last = (path / "checkpoints" / "latest").read_text().strip()
    arrays = load_file(path / "checkpoints" / last / "arrays.safetensors")
    kept = {name: x.tobytes() for name, x in arrays.items() if "replay/" not in name}
    assert any(name.startswith("source/study/weights") for name in kept)
    return rows, kept


CHUNK = "steps-00000-00000000.npy"


def run_at(path):
    """A folder that looks like a run's."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text("{}")
    return path


def state_of(id, *names, folder=None):
    return Kept(id, folder, frozenset(names))


def test_a_folder_is_one_runs_alone(tmp_path):
    """A run that was killed before its first checkpoint begins again there; another one does not."""
    there, one, other = tmp_path / "replay", run_at(tmp_path / "one"), run_at(tmp_path / "other")
    for _ in range(2):
        assert claimed(there, one, None) is None
    with pytest.raises(ConfigError, match=rf"replay_folder={there} is that of {one}; name another one, or delete"):
        claimed(there, other, None)
    sign(there, one, "1")
    assert claimed(there, one, state_of("1")) == "1"
    with pytest.raises(ConfigError, match=rf"is that of {one}; name another one, or delete"):
        claimed(there, one, None)  # a checkpoint needs the files, that of a run which has moved on, say
    with pytest.raises(ConfigError, match=rf"is that of {one}, another run; name this one's own, /elsewhere$"):
        claimed(there, other, state_of("2", folder="/elsewhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"cannot write to .*; choose a folder you may write to"):
        claimed(tmp_path / "file" / "replay", one, None)
    assert (there / OWNER).read_text().splitlines() == [str(one), "1"]


def test_a_run_that_moved_takes_its_folder_along_and_a_copy_does_not(tmp_path):
    there, first, copy = tmp_path / "replay", run_at(tmp_path / "first"), run_at(tmp_path / "copy")
    claimed(there, first, None)
    sign(there, first, "1")
    (there / CHUNK).write_text("")
    with pytest.raises(ConfigError, match=rf"is that of {first}, which is still there, .* copy the folder without its"):
        claimed(there, copy, state_of("1", CHUNK))
    shutil.copytree(there, tmp_path / "second", ignore=shutil.ignore_patterns(OWNER))
    assert claimed(tmp_path / "second", copy, state_of("1", CHUNK)) == "1"
    shutil.move(first, tmp_path / "moved")
    assert claimed(there, tmp_path / "moved", state_of("1", CHUNK)) == "1"
    assert (there / OWNER).read_text().splitlines() == [str(tmp_path / "moved"), "1"]
    with pytest.raises(ConfigError, match="which is still there"):
        claimed(there, copy, state_of("1", CHUNK))


def test_folders_from_before_runs_had_ids_are_gone_on_with(tmp_path):
    """They say where the run was, and its states say nothing."""
    there, run = tmp_path / "replay", run_at(tmp_path / "run")
    there.mkdir()
    (there / OWNER).write_text(f"{run}\n")
    (there / CHUNK).write_text("")
    assert claimed(there, run, state_of(None, CHUNK)) is None
    with pytest.raises(ConfigError, match="which is still there"):
        claimed(there, run_at(tmp_path / "copy"), state_of(None, CHUNK))
    shutil.move(run, tmp_path / "moved")
    assert claimed(there, tmp_path / "moved", state_of(None, CHUNK)) is None
    assert (there / OWNER).read_text() == f"{tmp_path / 'moved'}\n"


def test_a_folder_with_anything_else_in_it_is_refused_and_stays_as_it_is(tmp_path):
    run, other = run_at(tmp_path / "run"), run_at(tmp_path / "other")
    for name in ("my_dataset.npy", CHUNK):
        data = tmp_path / f"with {name}"
        data.mkdir()
        (data / name).write_text("mine")
        for kept in (None, state_of("1"), state_of("1", "steps-00000-00000007.npy")):
            with pytest.raises(ConfigError, match=rf"is not empty \({name}\), .*; name a folder .*replay say"):
                claimed(data, run, kept)
        assert [path.name for path in data.iterdir()] == [name]
    with pytest.raises(ConfigError, match=rf"lies in another run, {other}; name a folder of its own"):
        claimed(other / "replay", run, state_of("1"))
    with pytest.raises(
        ConfigError, match=r"has none of the 1 files that the checkpoint needs; they were in /far: name"
    ):
        claimed(tmp_path / "new", run, state_of("1", CHUNK, folder="/far"))
    assert not (tmp_path / "new").exists() and not (other / "replay").exists()
    (data / ".hidden").write_text("")
    assert claimed(data, run, state_of("1", CHUNK)) == "1"  # brought here by hand: the state knows them


def test_a_resumed_run_sweeps_files_of_its_own_only(tmp_path, monkeypatch):
    """Whatever lies beside them, in a folder that was named relative to where the run began."""
    far, settings = tmp_path / "far", {"prefill": 100, "steps_per_collect": 30, "batch_length": 6} | DISK
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Cut):
        train(tmp_path / "run", settings | {"replay_folder": "far"}, steps=3, cut_at=3)
    assert len((far / OWNER).read_text().splitlines()) == 2
    beside = [far / name for name in ("my_dataset.npy", "steps-1-2.npy", ".mine.npy.1.tmp")]
    left = far / "steps-00001-00000099.npy"
    for path in (*beside, left):
        np.save(path.open("wb"), np.zeros(3))
    kept = {path.name: path.read_bytes() for path in far.glob("steps-*.npy")}
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(ConfigError, match="which is still there"):
        train(tmp_path / "copy", settings | {"replay_folder": "far"}, steps=3)
    assert {path.name: path.read_bytes() for path in far.glob("steps-*.npy")} == kept
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    with pytest.raises(ConfigError, match=rf"has none of the \d+ files .*; they were in {far}: name"):
        train(tmp_path / "run", settings | {"replay_folder": "far"}, steps=3)
    assert not (tmp_path / "cwd" / "far").exists()
    train(tmp_path / "run", settings | {"replay_folder": "../far"}, steps=3)
    assert all(path.exists() for path in beside) and not left.exists()


def test_the_folder_is_the_same_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = WorldModelConfig(env="CartPole-v1", replay_folder="far")
    assert config.replay_folder == str(tmp_path / "far") == config.model_dump()["replay_folder"]


def test_a_run_without_a_folder_has_no_files_to_name_a_place_for(tmp_path):
    trainer = make(replay_folder=str(tmp_path / "far"))
    with pytest.raises(ConfigError, match="this one has no folder; give it one"):
        trainer.step()
    trainer.source.close()


@pytest.mark.parametrize("setting", ["replay_folder", "replay_memory"])
def test_several_ranks_remember_in_memory_and_say_so_before_there_is_a_folder(setting, tmp_path, monkeypatch, capsys):
    """From the command, before a rank is started; from Python, as the trainer is made."""
    value = {"replay_folder": tmp_path / "far", "replay_memory": 500}[setting]
    words = ["train", "dreamer", "--env", "CartPole-v1", f"--{setting}", str(value), "--ranks", "2"]
    assert main([*words, "--logdir", str(tmp_path / "run")]) == 2
    assert f"{setting}={value} is for one process: 2 ranks remember in memory" in capsys.readouterr().err
    monkeypatch.setattr("grpo.worldmodel.trainer.here", lambda: SimpleNamespace(size=2))
    with pytest.raises(ConfigError, match=f"{setting}={value} is for one process: 2 ranks remember in memory"):
        make(**{setting: value if setting == "replay_memory" else str(value)})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_of_before_anything_is_played(tmp_path, monkeypatch):
    small, sizes = {"capacity": 1000, "length": 5, "latent": (64, 2, 4)}, {}
    for dtype in ("float32", "float16"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Replay(folder=tmp_path / dtype, latent_dtype=dtype, **small).add(step_of(0, 0))
        monkeypatch.setattr(ChunkFolder, "free", 1000)
        with pytest.warns(
            UserWarning, match=r"1000 steps of \d+ bytes .* lower replay_capacity, set replay_latents"
        ) as w:
            Replay(folder=tmp_path / f"{dtype} again", latent_dtype=dtype, **small).add(step_of(0, 0))
        sizes[dtype] = int(str(w[0].message).split(" steps of ")[1].split()[0])
        monkeypatch.undo()
    assert sizes["float32"] - sizes["float16"] == 64 * 2


def test_half_of_the_digits_are_kept_of_latents_where_that_is_asked_for():
    exact, half = make(), make(replay_latents="float16")
    for trainer in (exact, half):
        trainer.step()
    one, other = (trainer.source.replay.peek(8, 0).deter_BD for trainer in (exact, half))
    assert (other == other.astype(np.float16)).all() and not (one == one.astype(np.float16)).all()
    np.testing.assert_allclose(one, other, atol=2e-3)
    for trainer in (exact, half):
        trainer.source.close()
