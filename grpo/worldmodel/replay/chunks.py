"""Files of equal records, one `.npy` each: written whole under their name, read and patched a few rows at a time.

Rows are read and written with `pread` and `pwrite`, not through a memory map: a full disk or a file that somebody cut
short is then an error with a name, where a map would end the process. A name is one of a file in this folder: states
come from disk, and what they name is read, written and deleted.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from grpo.run.files import FolderError, sync_folder
from grpo.run.inside import Gone, descriptor_inside, open_inside, remove_inside

CHUNK_FILE = re.compile(r"(steps-\d{5,}-\d{8,}|latents-\d{5,}-\d{8,}-\d{8,})\.npy")
"""What the files are called; nothing else in the folder is read, written or deleted."""
REMEDY = "put it back, go on from another checkpoint, or start a new run"


class ChunkFolder:
    """The chunk files of one replay; at most `most_open` of them are open at a time."""

    def __init__(self, path: str | os.PathLike[str], most_open: int = 64) -> None:
        self.path, self._most_open = Path(path), most_open
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob(".*.npy.*.tmp"):  # by a process that was killed
                if CHUNK_FILE.match(left.name[1:]):
                    left.unlink()
        except OSError as error:
            raise FolderError(f"cannot write to {path} ({error.strerror}); choose a folder you may write to") from error
        self._open: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Descriptor and where the records begin."""
        self._heads: dict[np.dtype, bytes] = {}
        """What stands before the records, the same in all files that hold such records."""
        self._unsynced: set[str] = set()

    @property
    def free(self) -> int:
        """Bytes that the disk has left."""
        return shutil.disk_usage(self.path).free

    def names(self) -> set[str]:
        """The chunks' files that are there."""
        return {path.name for path in self.path.glob("*.npy") if CHUNK_FILE.fullmatch(path.name)}

    def expect_names(self, names: Iterable[object]) -> None:
        """Refuse what is not the name of a chunk's file."""
        for name in names:
            if not isinstance(name, str) or not CHUNK_FILE.fullmatch(name):
                raise FolderError(f"the checkpoint is damaged: {name!r:.120} is no file of {self.path}; {REMEDY}")

    def write(self, name: str, records: np.ndarray) -> int:
        """Make a file, whole or not at all, and return its checksum. It outlives a power cut only after `sync`."""
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        self._forget(name)
        temporary.unlink(missing_ok=True)  # left by a process of the same number, or put there
        try:
            with temporary.open("xb") as file:
                np.save(file, records, allow_pickle=False)
            temporary.replace(self.path / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._unsynced.add(name)
        return checksum(records)

    def read(self, name: str, record: np.dtype, first: int, last: int) -> np.ndarray:
        """Rows `first` to `last`, the last left out."""
        descriptor, offset = self._opened(name, record)
        found = np.empty(last - first, record)
        size = os.preadv(descriptor, [found.view(np.uint8).data], offset + first * record.itemsize)
        if size < found.nbytes:
            raise FolderError(f"{self.path / name} ends before row {last}: it was cut short; {REMEDY}")
        return found

    def patch(self, name: str, first: int, records: np.ndarray) -> None:
        """Write over the rows from `first` on."""
        descriptor, offset = self._opened(name, records.dtype)
        self._unsynced.add(name)
        if os.pwrite(descriptor, records.tobytes(), offset + first * records.itemsize) < records.nbytes:
            raise OSError(f"{self.path / name} could be written only in part")

    def whole(self, name: str, record: np.dtype, rows: int, expected: int | None = None) -> np.ndarray:
        """All rows, checked against the checksum they are expected to have."""
        path = self.path / name
        try:
            with open_inside(self.path, name) as file:
                found = np.load(file, allow_pickle=False)
        except Gone:
            raise FolderError(f"{path} is missing, and the replay is not whole without it; {REMEDY}") from None
        except (OSError, ValueError, EOFError) as error:
            raise FolderError(f"{path} is damaged ({error}); {REMEDY}") from error
        if found.dtype != record or found.shape != (rows,) or (expected is not None and checksum(found) != expected):
            raise FolderError(f"{path} is damaged: it is not what the checkpoint was written for; {REMEDY}")
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Delete files."""
        for name in names:
            self._forget(name)
            self._unsynced.discard(name)
            remove_inside(self.path, name)

    def sync(self) -> None:
        """Make what was written outlive a power cut."""
        if not self._unsynced:
            return
        for name in sorted(self._unsynced):
            with (self.path / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self.path)
        self._unsynced.clear()

    def close(self) -> None:
        """Close all files."""
        for name in list(self._open):
            self._forget(name)

    def _opened(self, name: str, record: np.dtype) -> tuple[int, int]:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = self.path / name
        try:
            descriptor = descriptor_inside(self.path, name, os.O_RDWR)
        except FileNotFoundError:
            raise FolderError(f"{path} is missing, and the replay is not whole without it; {REMEDY}") from None
        except OSError as error:
            raise FolderError(f"{path} cannot be opened ({error}); {REMEDY}") from error
        head = self._heads.get(record)
        if head is None or os.pread(descriptor, len(head), 0) != head:
            try:
                found = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                os.close(descriptor)
                raise FolderError(f"{path} is damaged ({error}); {REMEDY}") from error
            if found.dtype != record:
                os.close(descriptor)
                raise FolderError(f"{path} is damaged: it holds other records than this replay's; {REMEDY}")
            head = self._heads[record] = os.pread(descriptor, found.offset, 0)
        opened = descriptor, len(head)
        self._open[name] = opened
        if len(self._open) > self._most_open:
            self._forget(next(iter(self._open)))
        return opened

    def _forget(self, name: str) -> None:
        if name in self._open:
            os.close(self._open.pop(name)[0])


def checksum(records: np.ndarray) -> int:
    """A number that changes when a byte does."""
    return zlib.crc32(np.ascontiguousarray(records).view(np.uint8).data)
