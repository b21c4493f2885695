"""Build the wheel and try it with each extra alone, in a fresh virtual environment: `make extras`, minutes each.

`python scripts/wheel_extras.py view control` tries these; `--first torch==2.13.0` installs that before, where
another build of it is at hand. What CI does on its own machines, by the same two commands.
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = runpy.run_path(str(ROOT / "scripts" / "import_extra.py"))["EXTRAS"]


def tried(wheel: Path, extra: str, place: Path, first: list[str]) -> bool:
    """Whether the wheel with this extra installs and imports what it is for."""
    venv.create(place, with_pip=True, clear=True)
    python = str(place / "bin" / "python")
    name = str(wheel) if extra == "none" else f"{wheel}[{extra}]"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    imported = [python, "-I", str(ROOT / "scripts" / "import_extra.py"), extra]
    commands = [*([[*pip, *first]] if first else []), [*pip, name], imported]
    return all(subprocess.run(command, cwd=place).returncode == 0 for command in commands)


def main(words: list[str]) -> int:
    """Try them one after the other; the exit status says whether all went well."""
    parser = argparse.ArgumentParser(description="Try the wheel with each extra alone.")
    parser.add_argument("extras", nargs="*", help="these (all)")
    parser.add_argument("--first", action="append", default=[], metavar="PACKAGE", help="installed before the wheel")
    given = parser.parse_args(words)
    wanted, first = given.extras, given.first
    if unknown := [extra for extra in wanted if extra not in EXTRAS]:
        raise SystemExit(f"no such extra: {', '.join(unknown)}; there are {', '.join(EXTRAS)}")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, ROOT], check=True
        )
        (wheel,) = Path(folder).glob("*.whl")
        for extra in wanted or EXTRAS:
            fine = tried(wheel, extra, Path(folder) / "venv", first)
            failed += [] if fine else [extra]
            print(f"{'ok     ' if fine else 'FAILED '}{extra}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
