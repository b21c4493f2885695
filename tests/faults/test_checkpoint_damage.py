"""Damaged, missing and unwritable checkpoints: named, passed over, never half used."""

import errno
import json
import resource
import shutil
import signal

import pytest
import torch

from grpo.run import checkpoint
from grpo.run.checkpoint import CheckpointError
from grpo.run.folder import FolderError, RunFolder
from tests.faults.tiny import QUICK, fingerprint, make_folder, make_trainer, run, train


@pytest.fixture
def halfway(whole, tmp_path):
    """A finished run that can be damaged: checkpoints of steps 9 and 12."""
    shutil.copytree(whole[0], tmp_path / "run")
    return tmp_path / "run"


def flip(path):
    content = bytearray(path.read_bytes())
    at = -3 if path.suffix == ".safetensors" else len(content) // 2  # in a number; the header would not parse
    content[at] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def unlink(path):
    path.unlink()


@pytest.mark.parametrize("name", ["arrays.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, cut, unlink])
def test_damage_is_named_and_the_one_before_is_taken(damage, name, halfway, whole):
    broken = halfway / "checkpoints" / "step-00000012"
    damage(broken / name)
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(broken)
    with pytest.raises(FolderError):
        train(halfway, resume=12)  # asked for by name: that one or none
    summary, _ = train(halfway)
    assert summary.events["checkpoint_damaged"] == 1
    assert fingerprint(halfway) == whole[1]
    assert (halfway / "checkpoints" / "aside-step-00000012").exists()


def test_nothing_valid_is_an_error_and_nothing_is_thrown_away(halfway):
    """Beginning again would cut the metrics back to nothing; that is for the user to decide."""
    for path in checkpoint.steps(RunFolder.open(halfway)):
        (path / "manifest.json").unlink()
    before = (halfway / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        train(halfway)
    assert (halfway / "metrics.jsonl").read_bytes() == before
    assert sum(row["event"] == "checkpoint_damaged" for row in RunFolder.open(halfway).events()) == 2


def test_an_older_one_can_be_asked_for(halfway, whole):
    summary, _ = train(halfway, resume=9)
    assert fingerprint(halfway) == whole[1]
    assert summary.events["checkpoint_set_aside"] == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; there: 9, 12"):
        train(halfway, resume=4)


def test_newest_is_by_number_not_by_time(halfway):
    (halfway / "checkpoints" / "step-00000009" / "state.json").touch()
    (halfway / "checkpoints" / "step-00000100").mkdir()  # younger, higher, and nothing in it
    found = checkpoint.resume_point(RunFolder.open(halfway))
    assert found.step == 12


def test_state_without_its_optimizer_is_an_error(tmp_path):
    folder, trainer = make_folder(tmp_path / "run"), make_trainer()
    trainer.step()
    state = trainer.state()
    values = {name: value for name, value in state.values.items() if name != "optimizer"}
    checkpoint.save(folder, checkpoint.State(values, state.arrays), 1, settings=trainer.config.model_dump(mode="json"))
    with pytest.raises(ValueError, match="optimizer"):
        train(tmp_path / "run")
    assert folder.metrics() == []


def test_arrays_that_went_missing_are_an_error(tmp_path):
    """Adam would silently begin anew: the lists in the two files have to agree, even where hashes do."""
    folder, trainer = make_folder(tmp_path / "run"), make_trainer()
    trainer.step()
    path = checkpoint.save(folder, trainer.state(), 1)
    arrays = checkpoint.load_file(path / "arrays.safetensors")
    del arrays["optimizer/0/exp_avg"]
    checkpoint.save_file(arrays, path / "arrays.safetensors")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["arrays.safetensors"] = checkpoint._hash(path / "arrays.safetensors")
    del manifest["self"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"self": checkpoint.fingerprint(manifest)}))
    with pytest.raises(CheckpointError, match="optimizer/0/exp_avg"):
        checkpoint.load(path)


def test_other_settings_are_refused_with_the_difference(halfway):
    folder = RunFolder.open(halfway)
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.05 → 0\.1"):
        run(make_trainer(learning_rate=0.1), 15, folder, resume=True, **QUICK)
    assert run(make_trainer(rows_per_microbatch=3), 13, folder, resume=True, **QUICK).step == 13


def test_a_newer_format_is_refused_with_the_remedy(halfway):
    path = halfway / "checkpoints" / "step-00000012"
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"schema": 99}))
    with pytest.raises(FolderError, match="pip install -U anygrpo"):
        train(halfway)  # and does not go back to an older one, which would set this one aside


def full_disk(monkeypatch, fails):
    """The nth writes of an arrays file (from 0) find no room."""
    count, real = iter(range(1000)), checkpoint.save_file

    def save_file(arrays, path):
        if next(count) in fails:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(arrays, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)


def test_full_disk_keeps_the_old_one_and_goes_on(monkeypatch, whole, tmp_path):
    full_disk(monkeypatch, {1, 2})
    seen = []
    summary, _ = train(tmp_path / "run", stop=lambda report: seen.append(names(tmp_path / "run")))
    assert seen[9] == [
        "latest",
        "step-00000003",
    ]  # two saves have failed by step 10: temporary ones gone, old one there
    assert summary.exit_code == 0
    assert summary.events["checkpoint_failed"] == 2
    assert fingerprint(tmp_path / "run") == whole[1]


def test_three_failures_in_a_row_end_the_run(monkeypatch, tmp_path):
    full_disk(monkeypatch, {1, 2, 3, 4})
    summary, _ = train(tmp_path / "run", 30)
    assert (summary.reason, summary.exit_code, summary.step) == ("unsaved", 1, 12)
    assert names(tmp_path / "run") == ["latest", "step-00000003"]
    message = RunFolder.open(tmp_path / "run").events()[0]["message"]
    assert "No space left" in message and "older ones are kept" in message


def test_no_room_found_by_the_arrays_writer_itself(tmp_path):
    """safetensors reports a failed write as an error of its own, which must count as a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder, state = make_folder(tmp_path / "run"), checkpoint.State({}, {"big": torch.zeros(100_000)})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
        with pytest.raises(OSError):
            checkpoint.save(folder, state, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(folder.checkpoints.iterdir()) == []


def test_samples_are_the_first_to_go(monkeypatch, tmp_path):
    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunFolder, "write_samples", no_room)
    summary, _ = train(tmp_path / "run", sample_every=1)
    assert summary.exit_code == 0
    assert summary.events["samples_off"] == 1


def names(path):
    return sorted(left.name for left in (path / "checkpoints").iterdir())
