"""`make` installs files whose hashes constraints.lock lists, and nothing else."""

import hashlib
import re
import runpy
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "lock.py"))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package of one file in a folder that is pip's only source; pip installs into `there`."""
    file = tmp_path / "index" / "tiny_locked-1.0-py3-none-any.whl"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_locked.py", "")
        archive.writestr(
            "tiny_locked-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-locked\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_locked-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_locked-1.0.dist-info/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(file.parent), "TARGET": str(tmp_path / "there")}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return file


def test_every_pin_has_hashes_and_nothing_else_has():
    """Torch as well: not listed are its builds for one device (+cpu), which lie in places of their own."""
    pins = re.findall(r"^\w\S+==\S+$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    locked = re.findall(
        r"^(\S+==\S+) \\\n    --hash=sha256:\w{64}", (ROOT / "constraints.lock").read_text("utf-8"), re.MULTILINE
    )
    assert pins and locked == pins, "write the lock anew: python scripts/lock.py"


def test_a_file_with_another_hash_is_refused(wheel, tmp_path):
    lock = tmp_path / "constraints.lock"
    lock.write_text(f"tiny-locked==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(
        SystemExit, match=r"tiny_locked-1\.0.* does not list sha256:.*nothing is installed.*python scripts"
    ):
        SCRIPT["install"](["tiny-locked"], lock)
    assert not (tmp_path / "there").exists()
    lock.write_text(lock.read_text().replace("0" * 64, hashlib.sha256(wheel.read_bytes()).hexdigest()))
    SCRIPT["check"]([wheel], lock)


def test_only_torch_s_builds_for_one_device_are_taken_unlisted(tmp_path, capsys, monkeypatch):
    lock = tmp_path / "constraints.lock"
    lock.write_text("")
    names = [
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.13.0+rocm7.1-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.13.0-cp311-cp311-any.whl",
        "torch-2.13.0+mine-cp311-cp311-any.whl",
        "torch-2.13.0+cpu2-cp311-cp311-any.whl",
        "numpy-2.4.6+cpu-a-b-c.whl",
    ]
    files = [tmp_path / name for name in names]
    for file in files:
        file.write_bytes(b"")
    monkeypatch.delenv("TORCH_SHA256", raising=False)
    SCRIPT["check"](files[:2], lock)
    assert "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl: its hash is NOT checked" in capsys.readouterr().out
    monkeypatch.setenv("TORCH_SHA256", hashlib.sha256(b"").hexdigest().upper())
    SCRIPT["check"](files[:1], lock)
    assert not capsys.readouterr().out
    monkeypatch.setenv("TORCH_SHA256", "0" * 64)
    with pytest.raises(SystemExit, match="TORCH_SHA256 is 0000"):
        SCRIPT["check"](files[:1], lock)
    for file in files[2:]:
        with pytest.raises(SystemExit, match="does not list sha256"):
            SCRIPT["check"]([file], lock)


def test_what_cannot_be_had_is_said_once(wheel, tmp_path, capfd):
    """By the download: the look at what is here already finds nothing in every new environment, which is no error."""
    with pytest.raises(SystemExit, match="could not download"):
        SCRIPT["install"](["tiny-unheard-of"], tmp_path / "constraints.lock")
    assert capfd.readouterr().err.count("No matching distribution found") == 1
