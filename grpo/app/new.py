"""`grpo new`: a small project that works as it stands, to be changed into one's own."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from grpo.app.arguments import one_of
from grpo.config import ConfigError

KINDS = ("control", "language", "policy")
SUMMARY = "write a small project that trains as it stands: your own environment, reward or policy"
CODE = ".py.txt"
"""How a template of a Python file ends, which is no module of this package."""


def add_flags(made: argparse.ArgumentParser) -> None:
    """Which project, and where."""
    made.add_argument(
        "kind",
        type=one_of(KINDS),
        choices=KINDS,
        metavar="|".join(KINDS),
        help="an environment, a reward for a language model, any policy",
    )
    made.add_argument("folder", type=Path, metavar="NAME", help="a new folder")


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write it, and say what comes next."""
    folder: Path = arguments.folder
    names = write(arguments.kind, folder)
    print(
        f"{folder}: {', '.join(names)}\n\n  cd {folder}\n  python train.py            trains as it stands\n"
        "  grpo view runs             what happened\n"
        "  python -m pytest           what must stay true (pip install pytest)"
    )
    return 0


def write(kind: str, folder: Path) -> list[str]:
    """The files of a new project, by name."""
    name = folder.resolve().name
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"{name!r} would be the name of runs, too: letters, digits, _, - and . only")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; nothing was written: give another name")
    found = {
        file.name.replace(CODE, ".py"): file.read_text(encoding="utf-8").replace("{{NAME}}", name)
        for file in (resources.files("grpo.app") / "templates" / "new" / kind).iterdir()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in found.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder} cannot be written: {error.strerror}; name another place"
        ) from None
    return sorted(found)
