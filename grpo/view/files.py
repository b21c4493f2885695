"""Files inside the runs folder, and nothing else: no symbolic link is followed below it, nothing is ever written.

A run may be writing at the same moment. Lines are read up to the last complete one; the rest waits.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from grpo.run.files import DAMAGE, LARGEST_JSON, LONGEST_LINE, FolderError, Gone, Row, parse_json
from grpo.run.inside import open_inside

CHUNK = 1 << 20
LONGEST_ROW = 64 << 20
"""Bytes of one try's row in an array."""
MOST_PASSED = 2 << 30
"""Bytes that are unpacked of all the arrays of a file on the way to its rows."""
MOST_ARRAYS = 64
MOST_AT_ONCE = 16 << 20
"""Bytes at the end of a file of lines that are all read; of what lies before, some lines …"""
MOST_BEFORE = 4_000
"""… so many, evenly spaced, …"""
MOST_LINES = 200_000
"""… and no more lines than this for one question; the next one reads on."""

Stamp = tuple[int, int, int]
"""Device-free identity of a file's content: inode, size, time of the last change."""


def stamp(file: IO[bytes]) -> Stamp:
    """What a cache is keyed by."""
    found = os.fstat(file.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_object(root: Path, path: str) -> Row:
    """One JSON object."""
    with open_inside(root, path) as file:
        text = file.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise FolderError(f"{path} is larger than {LARGEST_JSON >> 20} MiB: not one of ours")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise FolderError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise FolderError(f"{path} holds no JSON object")
    return found


def parse_line(line: bytes) -> Row | None:
    """A JSON line, or None where it is none."""
    try:
        found = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Line:
    """A complete line: where it begins, its bytes, and where the next one begins."""

    offset: int
    text: bytes
    end: int


def lines(file: IO[bytes], offset: int = 0) -> Iterator[Line]:
    """Complete lines from `offset` on. One that is too long is passed over, empty."""
    file.seek(offset)
    begun: list[bytes] = []
    held = skipped = 0
    while chunk := file.read(CHUNK):
        first, *others = chunk.split(b"\n")
        begun.append(first)
        held += len(first)
        if others:
            for piece in (b"".join(begun), *others[:-1]):
                end = offset + skipped + len(piece) + 1
                yield Line(offset, b"" if skipped else piece, end)
                offset, skipped = end, 0
            begun, held = [others[-1]], len(others[-1])
        if skipped or held > LONGEST_LINE:
            skipped, begun, held = skipped + held, [], 0


def _spread(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Whole lines at even distances in the first `size` bytes."""
    for part in range(MOST_BEFORE):
        file.seek(max(part * size // MOST_BEFORE, file.tell()) if part else 0)
        if part:
            file.readline(CHUNK)  # the rest of a line
        line = file.readline(CHUNK)
        if file.tell() > size:
            return
        yield line


class Tail:
    """A JSON-lines file that is still growing, read by offset."""

    def __init__(self, root: Path, path: str, spread: bool = True) -> None:
        self._root, self._path, self._spread = root, path, spread
        self._inode, self._offset, self._seen = -1, 0, 0
        self.thinned = False
        """Whether lines were left out; with `spread`, of the older ones some are there."""
        self.generation = 0
        """Goes up when the file was cut back or replaced: what was read before no longer holds."""
        self.damaged = 0
        """Lines that are no JSON."""

    def grow(self, take: Callable[[Row], object]) -> bool | None:
        """Hand over new rows; whether there were any. None: the file was cut back, the next call begins anew."""
        try:
            file = open_inside(self._root, self._path)
        except Gone:
            if not self._offset:
                return False
            self._restart(-1)
            return None
        with file:
            inode, size, _ = stamp(file)
            if self._inode not in (-1, inode) or size < self._seen:
                self._restart(inode)
                return None
            self._inode, found = inode, False
            if not self._offset and size > MOST_AT_ONCE:
                self._pass_over(file, size - MOST_AT_ONCE, take)
            for number, line in enumerate(lines(file, self._offset)):
                row = parse_line(line.text)
                self.damaged += row is None
                if row is not None:
                    take(row)
                    found = True
                self._offset = line.end
                if number >= MOST_LINES:
                    break
            self._seen = size
            return found

    def _pass_over(self, file: IO[bytes], size: int, take: Callable[[Row], object]) -> None:
        """Begin after so many bytes, with some of the lines in them."""
        for text in _spread(file, size) if self._spread else ():
            if row := parse_line(text):
                take(row)
        file.seek(size)
        file.readline(LONGEST_LINE)
        self._offset, self.thinned = file.tell(), True

    def _restart(self, inode: int) -> None:
        self._inode, self._offset, self._seen, self.damaged, self.thinned = inode, 0, 0, 0, False
        self.generation += 1


# --- arrays ---------------------------------------------------------------------------------------------------------


def npz_rows(file: IO[bytes], rows: Sequence[int], begin: int, end: int) -> dict[str, np.ndarray]:
    """Columns `begin` to `end` of some rows of every 2-D array of an npz; nothing else is held in memory."""
    found, room = {}, MOST_PASSED
    try:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist()[:MOST_ARRAYS]:
                with archive.open(name) as member:
                    array, passed = _rows(member, rows, begin, end, room)
                room -= passed
                if array is not None:
                    found[name.removesuffix(".npy")] = array
    except DAMAGE as error:
        raise FolderError(f"cannot be read ({type(error).__name__}: {error!s:.200})") from error
    return found


def _rows(member: IO[bytes], rows: Sequence[int], begin: int, end: int, room: int) -> tuple[np.ndarray | None, int]:
    """The array's rows, and how many of the `room` bytes that may be unpacked it took."""
    if np.lib.format.read_magic(member) != (1, 0):  # a later header may be gigabytes long, and numbers need none
        return None, 0
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
    if len(shape) != 2 or fortran or dtype.kind not in "bfiu":
        return None, 0
    width = shape[1] * dtype.itemsize
    passed = (max(rows, default=-1) + 1) * width
    if min(shape) < 0 or width > LONGEST_ROW or passed > room:
        raise ValueError(f"it is too large: {shape[0]} rows of {width} bytes")
    found = np.zeros((len(rows), max(min(shape[1], end) - begin, 0)), dtype)
    at = 0
    for row in sorted(set(rows)):
        if row >= shape[0]:
            raise ValueError(f"it has {shape[0]} rows, row {row} was asked for")
        _pass_over(member, (row - at) * width)
        data = np.frombuffer(_exactly(member, width), dtype)[begin:end]
        for place in [place for place, wanted in enumerate(rows) if wanted == row]:
            found[place] = data
        at = row + 1
    return found, passed


def _pass_over(member: IO[bytes], count: int) -> None:
    while count > 0:
        count -= len(_exactly(member, min(count, CHUNK)))


def _exactly(member: IO[bytes], count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = member.read(count - len(data))
        if not more:
            raise EOFError("it is cut off")
        data += more
    return data


# --- numbers --------------------------------------------------------------------------------------------------------


def to_text(tree: Any) -> str:
    """JSON with nothing that browsers refuse: what is not finite is null, lone surrogates stay escaped."""
    try:
        return json.dumps(tree, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(tree), allow_nan=False, separators=(",", ":"))


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def finite(value: Any) -> float | None:
    """A finite number, or None for whatever else a file may hold in its place."""
    if type(value) is float:  # most are
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> Any:
    """A number for JSON: seven digits, None where it is none."""
    number = finite(value)
    if number is None:
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else float(f"{number:.7g}")


def shown_all(values: Any) -> list[Any]:
    """The same for an array."""
    return [shown(value) for value in np.asarray(values, float).tolist()]
