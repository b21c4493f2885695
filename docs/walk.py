"""Measure which files of `grpo` one step of a run visits, in order, and write them into `docs/design.md`.

    python docs/walk.py          # a minute on one core

Three small runs, each with a folder: a prompt (JSONL rows, a transformer made from scratch, `correctness`, β = 0.04),
an observation (preset `cartpole`), an imagined step (preset `dreamer` on CartPole). A file counts when one of its
functions is called between the beginning and the end of the second step, in this process; worker processes are not
looked into. (The first step also tries the rewards, fills the replay and imports what is only needed now.)
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpo
from grpo.cli import main
from grpo.language.tasks import TASKS
from grpo.run.session import Session

PACKAGE = Path(grpo.__file__).parent
PAGE = Path(__file__).parent / "design.md"
BEGIN, END = "<!-- walk: made by docs/walk.py -->", "<!-- /walk -->"
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "a prompt": ("language", {"rewards": "correctness", "beta": "0.04", "max-completion-length": "6"}),
    "an observation": ("cartpole", {}),
    "an imagined step": ("dreamer", {"env": "CartPole-v1", "device": "cpu"}),
}
"""What is followed, the preset, and flags."""
STEP = 2
"""The one that is followed."""


@contextmanager
def visits(found: list[str]) -> Iterator[None]:
    """Files of the package in the order in which one of their functions is first called."""

    def look(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path not in seen:
            seen.add(path)
            if path.startswith(str(PACKAGE)):
                found.append(Path(path).relative_to(PACKAGE).as_posix().removesuffix(".py"))

    seen: set[str] = set()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def walk(preset: str, flags: dict[str, str], folder: Path) -> list[str]:
    """The files of the second step of a run, as the command carries it out."""
    found: list[str] = []
    plain = Session.step

    def followed(self: Session) -> Any:
        if self.trainer.steps_done < STEP - 1:
            return plain(self)
        with visits(found):
            return plain(self)

    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    Session.step = followed  # type: ignore[method-assign]
    try:
        code = main(["train", preset, *words, "--run.steps", str(STEP), "--logdir", str(folder / "run")])
    finally:
        Session.step = plain  # type: ignore[method-assign]
    if code:
        raise SystemExit(code)
    return found


def rows_and_model(folder: Path) -> dict[str, str]:
    """A model and a data set on disk, as a user would have them."""
    toy = TASKS["sort-digits"]
    model, tokenizer = toy.tiny(0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps(row) for row in list(toy.rows("train", 0))[:64]]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {"model": str(folder / "model"), "dataset": str(folder / "train.jsonl")}


def measured() -> dict[str, list[str]]:
    """Every walk."""
    found = {}
    for name, (preset, flags) in RUNS.items():
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = rows_and_model(Path(place)) if preset == "language" else {}
            found[name] = walk(preset, flags | given, Path(place))
    return found


def table(walks: dict[str, list[str]]) -> str:
    """As it stands in the page: neighbours of one folder together."""
    lines = ["| | files | in order of the first visit |", "|---|---|---|"]
    for name, files in walks.items():
        lines.append(f"| {name} | {len(files)} | {' → '.join(_together(files))} |")
    return "\n".join(lines)


def _together(files: list[str]) -> list[str]:
    told: list[tuple[str, list[str]]] = []
    for file in files:
        folder, _, stem = file.rpartition("/")
        stem = "\\_\\_init\\_\\_" if stem == "__init__" else stem
        if told and told[-1][0] == folder and folder:
            told[-1][1].append(stem)
        else:
            told.append((folder, [stem]))
    return [f"{folder}/ {', '.join(stems)}" if folder else stems[0] for folder, stems in told]


def write() -> None:
    """Measure, and write the page's table anew."""
    made = f"{BEGIN}\n{table(measured())}\n{END}"
    text = PAGE.read_text(encoding="utf-8")
    if BEGIN not in text:
        print(made)
        return
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: made, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    write()
