"""The folder of several runs: what was asked for, the settings of each trial, a run's folder for each seed.

many.json           presets and flags, seeds, what is gone over, what decides
trials.jsonl        a line a trial: its settings, written before its first run begins
trial-0003/seed-1/  a run's folder; without anything to go over just seed-1/
table.csv · curve.png or sweep.png
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo.app.many.crew import Job
from grpo.app.many.space import flags
from grpo.config import ConfigError
from grpo.run.files import FolderError, dumps, read_json, read_lines, write_atomic
from grpo.run.redaction import HIDDEN, Redactor

SCHEMA = 1
NAME = "many.json"


@dataclass(frozen=True)
class Asked:
    """What a command for several runs says."""

    names: tuple[str, ...]
    """Presets, files, data."""
    flags: tuple[tuple[str, str], ...]
    seeds: tuple[int, ...]
    over: tuple[str, ...] = ()
    """Empty: nothing but seeds."""
    trials: int | None = None
    """None: every combination."""
    by: str | None = None
    """The metric that decides; None: as the run's `best_by` says."""

    @property
    def command(self) -> str:
        """Which one it was."""
        return "sweep" if self.over else "train"


class Book:
    """Where several runs are kept, and which of them."""

    def __init__(self, root: Path, asked: Asked) -> None:
        self.root, self.asked = root, asked

    @staticmethod
    def create(root: Path, asked: Asked) -> Book:
        """A new one; whatever is there already is left alone."""
        root = root.absolute()
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            what = f"holds runs already; go on with them: --resume {root}" if is_book(root) else "is not empty"
            raise FolderError(f"{root} {what}, or choose another folder with --logdir")
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(f"cannot write to {root} ({error.strerror}); choose another with --logdir") from error
        book = Book(root, asked)
        book.write()
        return book

    @staticmethod
    def open(root: Path) -> Book:
        """One that is there."""
        if not is_book(root):
            raise FolderError(f"{root} holds no {NAME}: it was not made by `grpo sweep` or `grpo train --seeds`")
        said = read_json(root / NAME)
        if said.get("schema") != SCHEMA:
            raise FolderError(f"{root / NAME} was written by another version (schema {said.get('schema')!r})")
        try:
            asked = Asked(
                tuple(said["names"]), tuple((key, word) for key, word in said["flags"]), tuple(said["seeds"]),
                tuple(said["over"]), said["trials"], said["by"],
            )  # fmt: skip
            if not asked.seeds or any(type(seed) is not int for seed in asked.seeds):
                raise ValueError("seeds")
        except (KeyError, TypeError, ValueError) as error:
            raise FolderError(f"{root / NAME} lacks something ({error}); restore it, or begin anew") from None
        if HIDDEN in json.dumps(said["flags"]):
            raise ConfigError(f"{root / NAME}: a secret among the flags was not kept; begin anew")
        return Book(root.absolute(), asked)

    def asking(self, asked: Asked) -> Book:
        """The same folder, from now on with more asked for."""
        book = Book(self.root, asked)
        book.write()
        return book

    def write(self) -> None:
        """Keep what was asked for, without secrets."""
        redactor = Redactor(dict(self.asked.flags), environ=os.environ)
        write_atomic(self.root / NAME, dumps(redactor.tree({"schema": SCHEMA, **asdict(self.asked)}), indent=2))

    def trials(self) -> dict[int, dict[str, str]]:
        """Settings of every trial that was begun."""
        return {row["trial"]: dict(row["settings"]) for row in read_lines(self.root / "trials.jsonl")}

    def note(self, number: int, settings: Mapping[str, str]) -> None:
        """A trial is about to begin."""
        with (self.root / "trials.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"trial": number, "settings": dict(settings)}) + "\n")

    def folder(self, number: int, seed: int) -> Path:
        """Of one run."""
        return (self.root / f"trial-{number:04d}" if self.asked.over else self.root) / f"seed-{seed}"

    def job(self, number: int, seed: int, settings: Mapping[str, str], trust: bool = False) -> Job:
        """The command of one run: from its beginning, or where it stopped."""
        folder = self.folder(number, seed)
        if (folder / "run.json").exists():
            return Job(folder, ("train", "--resume", str(folder), *(("--trust",) if trust else ())))
        own = [f"--{key}={word}" for key, word in self.asked.flags]
        where = str(folder).replace("{", "{{").replace("}", "}}")
        return Job(folder, ("train", *self.asked.names, *own, *flags(settings), f"--seed={seed}", f"--logdir={where}"))


def is_book(root: Path) -> bool:
    """Whether several runs are kept here."""
    return (root / NAME).is_file()
