"""Install only files whose hashes are known: `lock.py install ARGS`. Alone it writes them anew, for the pins."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS, LOCK = ROOT / "constraints.txt", ROOT / "constraints.lock"
INDEX = "https://pypi.org/simple"
# PyTorch's builds for one kind of device are not on that index: you name the place that they come from.
UNLISTED = re.compile(r"torch-[\d.]+\+(cpu|cu\d+|rocm[\d.]+|xpu)-")
# PyTorch has files for these alone, and `make` runs on no Windows.
PLATFORM = re.compile(r"any$|manylinux.*_(x86_64|aarch64)|macosx.*_(arm64|universal2)")


def pip(*args: str, silent: bool = False, **variables: str) -> bool:
    """Run this interpreter's pip and say whether it succeeded; where it did not, it has printed why, unless silent."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, env=os.environ | variables, capture_output=silent).returncode == 0


def install(args: list[str], lock: Path = LOCK) -> None:
    """Download what `args` need, check every file, install those; a project in a folder is left to the caller."""
    wanted = ["-c", str(PINS), "--only-binary=:all:", "--no-build-isolation", *args]
    with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:
        report = Path(folder, "report.json")
        if pip("install", "-qqq", "--dry-run", "--no-index", "--report", str(report), *wanted, silent=True):
            found = json.loads(report.read_text())["install"]
            if not any("archive_info" in package["download_info"] for package in found):
                return  # all of it is here already
        if not pip("download", "-d", folder, *wanted):
            raise SystemExit("pip could not download what is needed, see above; nothing is installed")
        files = sorted(Path(folder).glob("*.whl"))
        check(files, lock)
        names = ["==".join(file.name.split("-")[:2]) for file in files]
        # The variable takes the place of other links of yours, so that these very files are installed.
        if names and not pip("install", "--no-index", "--no-deps", *names, PIP_FIND_LINKS=folder):
            raise SystemExit("pip could not install what it had downloaded, see above")


def check(files: list[Path], lock: Path) -> None:
    """Refuse all of the files if one has a hash that the lock does not list, or that TORCH_SHA256 denies."""
    known = set(re.findall(r"--hash=sha256:(\w{64})", lock.read_text()))
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest not in known and UNLISTED.match(file.name):
            expected = os.environ.get("TORCH_SHA256")
            if expected and digest != expected.lower():
                raise SystemExit(f"{file.name}: TORCH_SHA256 is {expected}, this is {digest}; nothing is installed")
            if not expected:
                print(
                    f"{file.name}: its hash is NOT checked, {lock.name} lists no builds for one kind of device; set "
                    f"TORCH_SHA256 to check it (this file: {digest})"
                )
        elif digest not in known:
            raise SystemExit(
                f"{file.name}: {lock.name} does not list sha256:{digest}; nothing is installed. If its version "
                f"is that of {PINS.name}, the file was changed: find out by whom. Otherwise pin it there, and run "
                f"`python scripts/lock.py`, which writes {lock.name}."
            )


def entry(pin: str) -> str:
    """Return the lines of one pin: its wheels for those platforms and for Python 3.11 and newer."""
    name, version = pin.split("==")
    with urllib.request.urlopen(f"{INDEX}/{re.sub('[-_.]+', '-', name).lower()}/", timeout=60) as page:
        links = re.findall(r'/([^/"#]+)\.whl#sha256=(\w{64})"', page.read().decode())
    hashes = set()
    for file, digest in links:
        _, found, *_, python, abi, platform = file.split("-")
        old = re.match(r"cp2|cp3\d$|cp310|pp", python) and abi != "abi3"
        if found == version and not old and PLATFORM.search(platform):
            hashes.add(f"--hash=sha256:{digest}")
    if not hashes:
        raise SystemExit(f"{INDEX} lists no wheel of {pin}")
    return " \\\n    ".join([pin, *sorted(hashes)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["install"]:
        install(sys.argv[2:])
    else:
        with ThreadPoolExecutor(8) as pool:
            entries = pool.map(entry, re.findall(r"^\w\S+==\S+", PINS.read_text(), re.MULTILINE))
            LOCK.write_text("\n".join([f"# Made by scripts/lock.py from {PINS.name} and {INDEX}.", *entries, ""]))
