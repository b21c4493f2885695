"""Take protections out, one at a time, and demand that a test notices.

`make mutations` reads tests/faults/promises.toml. For each entry with a mutation the package is changed in a temporary
copy, and the entry's first test, which must pass before, must fail. `python scripts/mutations.py lock fsync` tries
only the entries that contain one of the words.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "faults" / "promises.toml"
AREAS = ("Checkpoints", "Numbers", "Rewards", "Data", "Environments", "Process", "Security", "Long lives")
SECONDS = 180  # a test that takes longer with the protection gone has noticed, too


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


def ran(copy: Path, tests: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit code and output of pytest; no code where it took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-m", "", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        said, _ = process.communicate(timeout=seconds)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def unchanged(copy: Path, tests: list[str]) -> dict[str, str]:
    """What became of each test without any change: passed, failed, or not run (skipped, or not found)."""
    _, said = ran(copy, tests, SECONDS * len(tests))
    found = dict.fromkeys(tests, "not run")
    for verdict, name in re.findall(r"^(PASSED|FAILED|ERROR) (\S+::[^\[\s]+)", said, re.MULTILINE):
        for test in tests:
            if test.partition("[")[0] == name and found[test] != "failed":
                found[test] = "passed" if verdict == "PASSED" else "failed"
    return found


def tried(copy: Path, entry: dict[str, Any]) -> str:
    """`caught` or `SURVIVED`."""
    change = entry["mutation"]
    path = copy / change["file"]
    text = path.read_text(encoding="utf-8")
    if text.count(change["find"]) != 1:
        return f"BROKEN: `find` occurs {text.count(change['find'])} times"
    path.write_text(text.replace(change["find"], change["replace"]), encoding="utf-8")
    try:
        code, said = ran(copy, ["-x", entry["tests"][0]], SECONDS)
    finally:
        path.write_text(text, encoding="utf-8")
    if code == 2 and "KeyboardInterrupt" in said:  # what was let through has ended pytest itself
        return "caught"
    return {1: "caught", None: "caught (hung)", 0: "SURVIVED"}.get(code, f"BROKEN: pytest ended with {code}")


def main(words: list[str]) -> int:
    """A line for each mutation; 1 if one survives or cannot be tried."""
    chosen = [entry for entry in promises() if "mutation" in entry]
    chosen = [entry for entry in chosen if not words or any(word in str(entry) for word in words)]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="grpo-mutations-") as folder:
        copy = copied(Path(folder))
        before = unchanged(copy, list(dict.fromkeys(entry["tests"][0] for entry in chosen)))
        for entry in chosen:
            passes = before[entry["tests"][0]]
            refused = "not run here" if passes == "not run" else "BROKEN: fails without any change"
            verdict = tried(copy, entry) if passes == "passed" else refused
            bad += verdict.startswith(("SURVIVED", "BROKEN"))
            where = f"{entry['mutation']['file']}  {entry['tests'][0]}"
            print(f"{verdict:14} {entry['fault']}\n{'':14} {where}", flush=True)
    print(f"{len(chosen)} protections taken out, {bad} not noticed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
