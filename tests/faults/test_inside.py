"""A run folder from a stranger: no link inside it is followed, nothing outside it is read, written or removed."""

import copy
import os
import shutil

import numpy as np
import pytest

from grpo.protocols import State
from grpo.run.files import FolderError, write_atomic
from grpo.run.folder import RunFolder
from grpo.run.inside import descriptor_inside, expect_no_links, open_inside, remove_inside, rename_inside, write_inside
from tests.faults.tiny import train
from tests.unit.worldmodel.test_replay import TICKS, made, play, steps_of

VALUABLE = "what is elsewhere\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    train(path)
    return path


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def elsewhere(tmp_path):
    """A folder of somebody else's, with names that a run prunes."""
    for name in ("file", "tmp-mine/file", "step-00000001/file", "step-00000099/file", "step-00000099.jsonl", ".x.tmp"):
        (tmp_path / "elsewhere" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "elsewhere" / name).write_text(VALUABLE)
    return tmp_path / "elsewhere"


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FILES = (
    "lock", "events.jsonl", "metrics.jsonl", "timing.jsonl", "status.json", "config.json", "curve.png",
    "checkpoints/latest", "samples/step-00000005.jsonl", "checkpoints/step-00000012/state.json", "model/README.md",
)  # fmt: skip
FOLDERS = (
    "checkpoints",
    "samples",
    "checkpoints/tmp-x",
    "checkpoints/step-00000012",
    "model",
    "tensorboard",
    "replay",
    "wandb",
)


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_inside_is_refused_before_anything_is_written(name, run, tmp_path):
    other = elsewhere(tmp_path)
    target = other if name in FOLDERS else other / "file"
    place = run / name
    if place.is_dir():
        shutil.rmtree(place)
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    before, inside = content(other), content(run)
    with pytest.raises(FolderError, match=rf"{name} (is a link|cannot be opened).*put the file"):
        train(run, steps=13)
    assert content(other) == before and content(run) == inside


def test_the_folder_itself_may_be_a_link(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    summary, _ = train(tmp_path / "link", steps=13)
    assert summary.step == 13 and (run / "checkpoints" / "step-00000013").is_dir()


def test_a_new_run_may_begin_in_an_empty_folder_behind_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert train(tmp_path / "link", steps=2)[0].step == 2 and (tmp_path / "real" / "run.json").is_file()


def test_links_that_nothing_is_written_through_stay(run):
    """A tracker's, a user's own name for a checkpoint, data of somebody's."""
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("run-1")
    (run / "best").symlink_to("checkpoints/step-00000012")
    assert train(run, steps=13)[0].step == 13 and (run / "best").is_symlink()


def test_a_model_is_saved_beside_links_but_through_none(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/nowhere")
    expect_no_links(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("/nowhere")
    with pytest.raises(FolderError, match=r"model\.safetensors is a link"):
        expect_no_links(tmp_path)


@pytest.mark.parametrize("path", ["../file", "a/../../file", "/etc/x", "a//b", "", ".", "..", "a\0b"])
def test_a_path_leads_nowhere_else(path, tmp_path):
    for act in (
        lambda: open_inside(tmp_path, path),
        lambda: write_inside(tmp_path, path, "x"),
        lambda: remove_inside(tmp_path, path),
    ):
        with pytest.raises((FolderError, OSError)):
            act()


def test_what_is_opened_written_and_removed_is_reached_through_no_link(tmp_path):
    """Not only looked at beforehand: each of them refuses by itself."""
    other, root = elsewhere(tmp_path), tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(other / "file")
    (root / "folder").symlink_to(other)
    before = content(other)
    for path in ("file", "folder/file"):
        with pytest.raises(FolderError, match="links are not followed"):
            open_inside(root, path)
        with pytest.raises(FolderError, match="links are not followed"):
            descriptor_inside(root, path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for act in (
        lambda: write_inside(root, "folder/file", "x"),
        lambda: remove_inside(root, "folder/file"),
        lambda: rename_inside(root, "folder/file", "other"),
    ):
        with pytest.raises(FolderError, match="links are not followed"):
            act()
    write_inside(root, "file", "mine")
    assert not (root / "file").is_symlink() and (root / "file").read_text() == "mine"
    remove_inside(root, "folder")
    assert not (root / "folder").is_symlink()
    (root / f".file.{os.getpid()}.tmp").symlink_to(other / "file")
    write_atomic(root / "file", "mine again")
    assert content(other) == before


def test_a_pipe_in_a_run_folder_is_not_waited_for(run):
    os.mkfifo(run / "events.jsonl")
    with pytest.raises(FolderError, match="regular file"):
        RunFolder.open(run).events()
    (run / "lock").unlink()
    os.mkfifo(run / "lock")
    with pytest.raises(FolderError, match="regular file"):
        train(run, steps=13)


def test_a_replay_deletes_and_reads_files_of_its_own_only(tmp_path):
    """A checkpoint says which files nobody needs any more; it may come from a stranger."""
    valuable = tmp_path / "valuable.npy"
    np.save(valuable, np.zeros(3))
    replay = made("small", tmp_path)
    play(replay, TICKS)
    state = replay.state()
    for name in (
        "../valuable.npy",
        f"{tmp_path}/valuable.npy",
        "a/../../valuable.npy",
        "..",
        7,
        "valuable",
        "x.npy/..",
    ):
        for where in ("doomed", "file", "latents"):
            values = copy.deepcopy(state.values)
            if where == "doomed":
                values["doomed"].append([0, name])
            else:
                values["chunks"][0][2 if where == "file" else 4] = name
            with pytest.raises(FolderError, match="is no file of"):
                replay.load_state(State(values, state.arrays))
    replay.load_state(state)
    replay.add_batch(steps_of(range(3), TICKS.stop))
    replay.state()  # now what is doomed goes
    assert valuable.exists()
