"""The one reader of JSON on disk, and atomic writes: a file has its name only once it is whole.

A file may have been cut, edited, or made to do harm. What is read is a regular file of a bounded size, UTF-8, nested
only so deep; anything else is a `FolderError` that names the file and, where there are lines, the line.
"""

from __future__ import annotations

import json
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from grpo.run.inside import FolderError, Gone, open_regular, write_inside

__all__ = [
    "DAMAGE",
    "DEEPEST",
    "LARGEST_JSON",
    "LONGEST_LINE",
    "RESTORE",
    "UNFIT",
    "FolderError",
    "Gone",
    "Row",
    "dumps",
    "field",
    "parse_json",
    "read_json",
    "read_lines",
    "read_text",
    "sync_folder",
    "write_atomic",
]

Row = dict[str, Any]
T = TypeVar("T")

LARGEST_JSON = 16 << 20
"""Bytes of a file that holds one object: settings, a manifest."""
LONGEST_LINE = 64 << 20
"""Bytes of a line; one try with a megabyte of text and all its tokens is far below."""
DEEPEST = 100
"""Levels of lists and objects inside each other; what walks a tree later does so by calling itself."""
RESTORE = "restore it from a copy"
DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    struct.error,
)
"""What damaged bytes make of the decoders."""

UNFIT = (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
"""What a reader of values that are not as they were written ends with."""


def dumps(tree: Any, indent: int | None = None) -> str:
    """JSON text with its newline. Lone surrogates stay escaped, so any text can be written."""
    return json.dumps(tree, indent=indent) + "\n"


def parse_json(text: str | bytes) -> Any:
    """What JSON text says; ValueError where it is none, or is nested deeper than anything of ours."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    at_most = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if at_most > DEEPEST:
        _expect_shallow(found)
    return found


def _expect_shallow(tree: Any) -> None:
    level = [tree]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEEPEST} levels")


def read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most so many bytes."""
    with open_regular(path) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise FolderError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise FolderError(f"{path} has more than {most:,} bytes; that is not a settings file or a record of a run")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FolderError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def read_json(path: Path, most: int = LARGEST_JSON) -> Row:
    """One JSON object from a file."""
    text = read_text(path, most)
    try:
        found = parse_json(text)
    except ValueError as error:
        raise FolderError(f"{path} cannot be read: {error}; {RESTORE}") from error
    if not isinstance(found, dict):
        raise FolderError(f"{path} holds no JSON object; {RESTORE}")
    return found


def read_lines(path: Path) -> Iterator[Row]:
    """Rows of a JSONL file; none where it is missing. A last line without its end is being written, or was cut off."""
    try:
        file = open_regular(path)
    except Gone:
        return
    with file:
        at = 0
        while line := file.readline(LONGEST_LINE):
            at += 1
            if not line.endswith(b"\n"):
                if len(line) < LONGEST_LINE:
                    return
                raise FolderError(f"{path}:{at}: longer than any line of a run; delete the line, or {RESTORE}")
            try:
                found = parse_json(line)
            except ValueError as error:
                raise FolderError(f"{path}:{at}: not a JSON line ({error}); delete the line, or {RESTORE}") from error
            if not isinstance(found, dict):
                raise FolderError(f"{path}:{at}: not a JSON object; delete the line, or {RESTORE}")
            yield found


def field(row: Row, name: str, kind: type[T], place: object) -> T:
    """A value that a file must have, of the type that it must be of."""
    if name not in row:
        raise FolderError(f"{place} has no {name!r}; {RESTORE}")
    value = row[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise FolderError(f"{place}: {name!r} is {value!r:.60}, not {_KINDS.get(kind, kind.__name__)}; {RESTORE}")
    return value


_KINDS: dict[type, str] = {int: "a whole number", str: "text", dict: "an object", list: "a list", float: "a number"}


def write_atomic(path: Path, content: Any) -> None:
    """Temporary file → fsync → rename → fsync of the folder. `content`: text, or a function that writes to the file."""
    write_inside(path.parent, path.name, content)


def sync_folder(path: Path) -> None:
    """Make renames inside a folder outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
