"""Take protections out, one at a time, and demand that a test notices.

`make mutations` reads tests/faults/promises.toml. For each entry with a mutation the package is changed in a temporary
copy, and the entry's first test, which must pass before, must fail. `python scripts/mutations.py lock fsync` tries
only the entries that contain one of the words.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "faults" / "promises.toml"
AREAS = ("Checkpoints", "Numbers", "Rewards", "Data", "Environments", "Process", "Security", "Long lives")
SECONDS = 300  # a test that takes longer with the protection gone has noticed, too


def promises() -> list[dict[str, Any]]:
    """The entries, in the order of the file."""
    return tomllib.loads(LIST.read_text(encoding="utf-8")).get("promise", [])


def tables(entries: list[dict[str, Any]]) -> str:
    """A table of promises for each area."""
    parts = []
    for area in AREAS:
        rows = [entry for entry in entries if entry["area"] == area]
        parts += [f"## {area}", "", "| what goes wrong | what happens | held by |", "|---|---|---|"]
        for row in rows:
            parts.append(f"| {cell(row['fault'])} | {cell(row['promise'])} | {'<br>'.join(map(link, row['tests']))} |")
        parts.append("")
    return "\n".join(parts)


def mutation_table(entries: list[dict[str, Any]]) -> str:
    """Each protection that can be taken out, and the test that then fails."""
    lines = ["| in | instead of | it says | then fails |", "|---|---|---|---|"]
    for entry in entries:
        if change := entry.get("mutation"):
            what = [f"`{change['file']}`", code(change["find"]), code(change["replace"]), link(entry["tests"][0])]
            lines.append(f"| {' | '.join(what)} |")
    return "\n".join(lines) + "\n"


def link(test: str) -> str:
    """The test's name, linked to its file."""
    path, _, name = test.partition("::")
    return f"[{cell(name or Path(path).stem)}](../{path})"


def cell(text: str) -> str:
    """Text that stays inside its cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Code on one line, or nothing."""
    text = re.sub(r"\s+", " ", text).strip()
    return f"`` {cell(text).replace('&lt;', '<')} ``" if text else "(nothing)"


def copied(folder: Path) -> Path:
    """What tests need of the working tree, in `folder`."""
    leave = shutil.ignore_patterns(".*", "__pycache__", "_build", "runs")
    shutil.copytree(ROOT, folder, ignore=leave, symlinks=True, dirs_exist_ok=True)
    shutil.copytree(ROOT / ".github", folder / ".github")
    return folder


def outcome(copy: Path, test: str) -> str:
    """What became of a test: passed, failed, hung, or `not run` (skipped or not found)."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "hung"
    if process.returncode == 1:
        return "failed"
    return "passed" if process.returncode == 0 and re.search(r"\d+ passed", said) else "not run"


def tried(copy: Path, entry: dict[str, Any]) -> str:
    """`caught`, `SURVIVED`, or why it could not be tried."""
    change, test = entry["mutation"], entry["tests"][0]
    before = outcome(copy, test)
    if before == "not run":
        return "not run here"
    if before != "passed":
        return f"BROKEN: {before} without any change"
    path = copy / change["file"]
    text = path.read_text(encoding="utf-8")
    if text.count(change["find"]) != 1:
        return f"BROKEN: `find` occurs {text.count(change['find'])} times"
    path.write_text(text.replace(change["find"], change["replace"]), encoding="utf-8")
    try:
        after = outcome(copy, test)
    finally:
        path.write_text(text, encoding="utf-8")
    return {"failed": "caught", "hung": "caught (hung)", "passed": "SURVIVED"}.get(after, f"BROKEN: {after}")


def main(words: list[str]) -> int:
    """A line for each mutation; 1 if one survives or cannot be tried."""
    chosen = [entry for entry in promises() if "mutation" in entry]
    chosen = [entry for entry in chosen if not words or any(word in str(entry) for word in words)]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="grpo-mutations-") as folder:
        copy = copied(Path(folder))
        for entry in chosen:
            verdict = tried(copy, entry)
            bad += verdict.startswith(("SURVIVED", "BROKEN"))
            where = f"{entry['mutation']['file']}  {entry['tests'][0]}"
            print(f"{verdict:14} {entry['fault']}\n{'':14} {where}", flush=True)
    print(f"{len(chosen)} protections taken out, {bad} not noticed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
