"""JSON, JSON lines and atomic writes: a file has its name only once it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class FolderError(RuntimeError):
    """A run folder that cannot be used, in one line that says what to do."""


def dumps(tree: Any, indent: int | None = None) -> str:
    """JSON text with its newline. Lone surrogates stay escaped, so any text can be written."""
    return json.dumps(tree, indent=indent) + "\n"


def read_json(path: Path) -> Row:
    """One JSON object from a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise FolderError(f"{path} holds no JSON object")
    return found


def read_lines(path: Path) -> Iterator[Row]:
    """Rows of a JSONL file; none where it is missing. A last line without its end is being written, or was cut off."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for at, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise FolderError(f"{path}:{at}: not a JSON line ({error})") from error


def write_atomic(path: Path, content: Any) -> None:
    """Temporary file → fsync → rename → fsync of the folder. `content`: text, or a function that writes to the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames inside a folder outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
