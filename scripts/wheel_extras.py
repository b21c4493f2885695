"""Build the wheel and try it with each extra alone, in a fresh virtual environment: `make extras`, minutes each.

`python scripts/wheel_extras.py view control` tries these. What CI does on its own machines, by the same two commands.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = runpy.run_path(str(ROOT / "scripts" / "import_extra.py"))["EXTRAS"]


def tried(wheel: Path, extra: str, place: Path) -> bool:
    """Whether the wheel with this extra installs and imports what it is for."""
    venv.create(place, with_pip=True, clear=True)
    python = str(place / "bin" / "python")
    name = str(wheel) if extra == "none" else f"{wheel}[{extra}]"
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", name]
    imported = [python, "-I", str(ROOT / "scripts" / "import_extra.py"), extra]
    return all(subprocess.run(command, cwd=place).returncode == 0 for command in (install, imported))


def main(wanted: list[str]) -> int:
    """Try them one after the other; the exit status says whether all went well."""
    if unknown := [extra for extra in wanted if extra not in EXTRAS]:
        raise SystemExit(f"no such extra: {', '.join(unknown)}; there are {', '.join(EXTRAS)}")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, ROOT], check=True
        )
        (wheel,) = Path(folder).glob("*.whl")
        for extra in wanted or EXTRAS:
            fine = tried(wheel, extra, Path(folder) / "venv")
            failed += [] if fine else [extra]
            print(f"{'ok     ' if fine else 'FAILED '}{extra}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
