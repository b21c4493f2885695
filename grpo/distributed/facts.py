"""What must be the same on every rank, as words to compare: versions, the code itself, settings, files they name."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from grpo.run.redaction import HIDDEN, Redactor

LIBRARIES = ("torch", "numpy", "transformers", "peft", "gymnasium")
SMALL = 1 << 20
"""Bytes up to which a file in a named folder is read; of larger ones (weights) the size is compared."""
MODULE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
LOCAL = ("run.logdir", "run.name")
"""Settings that only the rank which writes the folder has a use for."""


def versions() -> dict[str, str]:
    """Of Python, of this package down to its last line, and of the libraries that numbers depend on."""
    found = {"the version of python": platform.python_version(), "the code of anygrpo": code()}
    for name in LIBRARIES:
        if name in sys.modules:
            found[f"the version of {name}"] = metadata.version(name)
    return found


@lru_cache(maxsize=1)
def code() -> str:
    """A fingerprint of this package's own files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def settings(named: Mapping[str, Any]) -> dict[str, str]:
    """Every setting by name, and a fingerprint of each file or folder that one names; secrets are not shown."""
    shown: Mapping[str, Any] = Redactor(dict(named)).tree(dict(named))
    found = {}
    for name, value in named.items():
        if name in LOCAL:
            continue
        plain = json.dumps(value, default=str)
        hidden = HIDDEN in json.dumps(shown[name], default=str)
        found[f"the setting {name}"] = f"a secret ({_digest(plain.encode())})" if hidden else plain
        for path in _paths(value):
            found[f"what {name} names ({path.name})"] = contents(path)
    return found


def contents(path: Path) -> str:
    """A file by what is in it; a folder by its small files, and the sizes of the others."""
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.is_file())
        listed = [f"{f.name} {contents(f) if f.stat().st_size <= SMALL else f.stat().st_size}" for f in files]
        return _digest("\n".join(listed).encode())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _paths(value: Any) -> Iterable[Path]:
    """Files and folders that a setting's words name: `data.jsonl`, `rewards.py:function`, `mine.envs:Maze`, several."""
    if isinstance(value, str) and 0 < len(value) < 1000 and "\0" not in value:
        for word in dict.fromkeys((value, value.partition(":")[0])):
            path = Path(word)
            if word not in ("", ".", "/") and (path.is_file() or (path.is_dir() and (path / "config.json").is_file())):
                yield path
                return
        if (named := MODULE.fullmatch(value)) and (file := _module(named[1])):
            yield file
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _paths(item)


def _module(name: str) -> Path | None:
    """The file of a module, which is not imported for that; None: there is none to read."""
    within: Sequence[str] | None = [*sys.path, os.getcwd()]  # where environments are found
    origin = None
    parts = name.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), within)
        if spec is None or (i + 1 < len(parts) and spec.submodule_search_locations is None):
            return None
        within, origin = spec.submodule_search_locations, spec.origin
    file = Path(origin or "")
    return file if file.is_file() else None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
