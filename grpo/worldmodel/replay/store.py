"""Endless tapes of records, one a lane, cut into chunks of equal size; with a second kind of record beside each.

The first kind, steps, is written once. Chunks of it lie in one preallocated block. With files, a chunk that is full is
also written there, once and for all, and leaves the block when others need its place. The second kind, latents, is the
only thing that changes after it was written.

A state names the files it needs and carries the rest; files stay for as long as one of the last `keep_states` states
needs them. A file of latents that a state names is not touched again but copied first.

Letters: L lanes, N records at once, M rows of I bytes. A record's position counts from the beginning of its lane.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from grpo.config import ConfigError
from grpo.errors import warn
from grpo.protocols import State
from grpo.run.files import FolderError
from grpo.worldmodel.replay.chunks import ChunkFolder, checksum


@dataclass(eq=False)
class _Chunk:
    """So many consecutive steps of a lane, in memory, in a file or both; its latents likewise."""

    lane: int
    number: int
    slot: int | None
    """Its place in the block; None: only in its file."""
    file: str | None = None
    crc: int = 0
    latents: str | None = None
    latents_crc: int | None = None
    """None: changed since it was last known."""
    dirty: bool = False
    """Latents in memory are newer than those in the file."""


class ChunkStore:
    """L lanes in chunks of so many steps, `slots` of them in memory, the rest in files; for one thread at a time."""

    def __init__(
        self, lanes: int, chunk: int, slots: int, latent: np.dtype, files: ChunkFolder | None, keep_states: int
    ) -> None:
        self.lanes, self.chunk, self._slots = lanes, chunk, slots
        self._latent, self._files, self._keep_states = latent, files, keep_states
        self._block: np.ndarray = np.zeros(0)
        self._latents: np.ndarray | None = None
        self._clear()

    def _clear(self) -> None:
        self._free = list(range(self._slots))[::-1]
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._full: deque[_Chunk] = deque()
        """Chunks that take no more, oldest first."""
        self._resident: deque[_Chunk] = deque()
        """Those of them that are in memory."""
        self._unwritten: deque[_Chunk] = deque()
        """Those of them that have no file and should."""
        self.added_L, self.first_L = np.zeros(self.lanes, np.int64), np.zeros(self.lanes, np.int64)
        """Steps ever added, and the oldest that is still here."""
        self._slot_L = np.zeros(self.lanes, np.int64)
        """Where a lane's steps go now."""
        self.changed = False
        """Whether a state would be another than the last."""
        self._states = self._version = 0
        self._disk_failed = self._sweep_due = False
        self._named: set[str] = set()
        """Files that the last state names."""
        self._doomed: list[tuple[int, str]] = []
        """Files nobody needs any more, and the last state that names them."""

    def reserve(self, record: np.dtype) -> None:
        """Fix what a step is, and set aside the memory for all of them."""
        self._block = self._reserved(record)

    def _reserved(self, record: np.dtype) -> np.ndarray:
        rows = self._slots * self.chunk
        try:
            # Zeros that take memory as they are written to. NumPy's would come from pages that were used before, all of
            # them cleared at once, in a process that keeps what it frees.
            return np.frombuffer(mmap.mmap(-1, rows * record.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), record)
        except (MemoryError, OSError, OverflowError):
            size = rows * record.itemsize / 2**30
            raise ConfigError(
                f"{rows} steps of {record.itemsize} bytes are {size:.1f} GiB, more than there is; "
                "lower capacity, or give a folder and lower memory"
            ) from None

    def __len__(self) -> int:
        """Steps that are kept."""
        return int((self.added_L - self.first_L).sum())

    @property
    def away(self) -> int:
        """Steps that are only in files."""
        return (len(self._full) - len(self._resident)) * self.chunk

    # --- steps ------------------------------------------------------------------------------------------------------

    def append(self, lane_N: np.ndarray, steps: Mapping[str, np.ndarray]) -> None:
        """One more step for each of these lanes, or for none where there is no room."""
        position_N = self.added_L[lane_N]
        place_N = position_N % self.chunk
        fresh = np.flatnonzero(place_N == 0)
        self._make_room(len(fresh))
        for at in fresh:
            self._begin(int(lane_N[at]), int(position_N[at]) // self.chunk)
        row_N = self._slot_L[lane_N] * self.chunk + place_N
        for key, x in steps.items():
            self._block[key][row_N] = x
        self.added_L[lane_N] = position_N + 1
        self.changed = True
        for at in np.flatnonzero(place_N == self.chunk - 1):
            self._finish(self._chunks[int(lane_N[at]), int(position_N[at]) // self.chunk])

    def read(self, lane: int, position: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """Consecutive steps of a lane, part by part: how far into them a part begins, and its records."""
        t = 0
        while t < count:
            number, first = divmod(position + t, self.chunk)
            last = min(self.chunk, first + count - t)
            yield t, self._steps_at(self._chunks[lane, number], first, last)
            t += last - first

    def _steps_at(self, chunk: _Chunk, first: int, last: int) -> np.ndarray:
        if chunk.slot is not None:
            return self._block[chunk.slot * self.chunk + first : chunk.slot * self.chunk + last]
        assert self._files is not None and chunk.file is not None
        return self._files.read(chunk.file, self._block.dtype, first, last)

    def drop_oldest(self) -> None:
        """Forget the chunk that was full first."""
        chunk = self._full.popleft()
        del self._chunks[chunk.lane, chunk.number]
        if chunk.slot is not None:
            self._resident.remove(chunk)
            self._free.append(chunk.slot)
        if chunk in self._unwritten:
            self._unwritten.remove(chunk)
        self._doom(chunk.file)
        self._doom(chunk.latents)
        self.first_L[chunk.lane] += self.chunk

    # --- latents ----------------------------------------------------------------------------------------------------

    def latent(self, lane: int, position: int) -> np.void | None:
        """The latents of a step that is here; None: nobody has written any."""
        number, row = divmod(position, self.chunk)
        found = self._latents_at(self._chunks[lane, number], row, row + 1)
        return found[0] if found is not None and found["known"][0] else None

    def put_latents(self, lane_N: np.ndarray, position_N: np.ndarray, records: np.ndarray) -> None:
        """Keep these latents of these steps; those of steps that were dropped are passed."""
        self.changed = True
        number_N = position_N // self.chunk
        cuts = np.flatnonzero(np.diff(number_N * self.lanes + lane_N)) + 1
        for a, b in pairwise([0, *cuts.tolist(), len(records)]):
            chunk = self._chunks.get((int(lane_N[a]), int(number_N[a]))) if b > a else None
            if chunk is not None:
                self._put(chunk, position_N[a:b] % self.chunk, records[a:b])

    def _put(self, chunk: _Chunk, row_N: np.ndarray, records: np.ndarray) -> None:
        if chunk.slot is not None:
            if self._latents is None:
                self._latents = self._reserved(self._latent)
            self._latents[chunk.slot * self.chunk + row_N] = records
            chunk.dirty = True
            return
        assert self._files is not None
        first, last = int(row_N.min()), int(row_N.max()) + 1
        if chunk.latents is None or chunk.latents in self._named:
            kept = self._latents_at(chunk, 0, self.chunk)
            kept = np.zeros(self.chunk, self._latent) if kept is None else kept
            kept[row_N] = records
            self._new_latents(chunk, kept)
            return
        kept = self._files.read(chunk.latents, self._latent, first, last)
        kept[row_N - first] = records
        try:
            self._files.patch(chunk.latents, first, kept)
        except OSError as error:
            self._complain(error)
        chunk.latents_crc = None

    def _latents_at(self, chunk: _Chunk, first: int, last: int) -> np.ndarray | None:
        if chunk.slot is not None:
            at = chunk.slot * self.chunk
            return None if self._latents is None else self._latents[at + first : at + last]
        if chunk.latents is None or self._files is None:
            return None
        return self._files.read(chunk.latents, self._latent, first, last)

    # --- between memory and files -----------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        """Have slots for so many more chunks, or raise while nothing has changed yet."""
        while len(self._free) < count:
            self._write_out()
            if not self._evict():
                assert self._files is not None
                raise FolderError(
                    f"{self._files.path} takes no more, and memory is for {self._slots * self.chunk} steps only; "
                    "free some space there, raise memory, or lower capacity"
                )

    def _begin(self, lane: int, number: int) -> None:
        slot = self._slot_L[lane] = self._occupied()
        self._chunks[lane, number] = _Chunk(lane, number, slot)

    def _occupied(self) -> int:
        """A free slot, from now on in use."""
        slot = self._free.pop()
        if self._latents is not None:
            self._latents["known"][self._rows_of(slot)] = False
        return slot

    def _finish(self, chunk: _Chunk) -> None:
        self._full.append(chunk)
        self._resident.append(chunk)
        if self._files is not None:
            self._unwritten.append(chunk)
            self._write_out()

    def _write_out(self) -> None:
        """Give every full chunk its file; what the disk does not take stays in memory and is tried again."""
        while self._unwritten and self._files is not None:
            chunk = self._unwritten[0]
            assert chunk.slot is not None
            name = f"steps-{chunk.lane:05d}-{chunk.number:08d}.npy"
            try:
                chunk.crc = self._files.write(name, self._block[self._rows_of(chunk.slot)])
            except OSError as error:
                self._complain(error)
                return
            chunk.file = name
            self._unwritten.popleft()
            self._disk_failed = False

    def _evict(self) -> bool:
        """Let the oldest chunk leave the memory; whether one could."""
        chunk = next((chunk for chunk in self._resident if chunk.file is not None), None)
        if chunk is None or chunk.slot is None or not self._settle(chunk):
            return False
        self._resident.remove(chunk)
        self._free.append(chunk.slot)
        chunk.slot = None
        return True

    def _settle(self, chunk: _Chunk) -> bool:
        """Write the latents of a full chunk to a new file, if there are newer ones; whether all is on the disk."""
        if not chunk.dirty or chunk.slot is None:
            return True
        assert self._latents is not None
        return self._new_latents(chunk, self._latents[self._rows_of(chunk.slot)])

    def _new_latents(self, chunk: _Chunk, records: np.ndarray) -> bool:
        assert self._files is not None
        name = f"latents-{chunk.lane:05d}-{chunk.number:08d}-{self._version + 1:08d}.npy"
        try:
            chunk.latents_crc = self._files.write(name, records)
        except OSError as error:
            self._complain(error)
            return False
        self._doom(chunk.latents)
        self._version += 1
        chunk.latents, chunk.dirty = name, False
        return True

    def _doom(self, name: str | None) -> None:
        """Delete a file once no state that may be gone back to names it."""
        if name is None or self._files is None:
            return
        if name in self._named:
            self._doomed.append((self._states, name))
        else:
            self._files.remove([name])

    def _complain(self, error: OSError) -> None:
        if not self._disk_failed and self._files is not None:
            warn(
                f"{self._files.path}: {error}; the replay goes on in memory, which is for {self._slots * self.chunk} "
                "steps, and writes again when it can: free some space there",
            )
        self._disk_failed = True

    def _rows_of(self, slot: int) -> slice:
        return slice(slot * self.chunk, (slot + 1) * self.chunk)

    # --- going on later ---------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Counters, the names of the files that are needed, and all that is in none."""
        if self._files is not None:
            self._keep_files(self._files)
        chunks = [*self._full, *(chunk for chunk in self._chunks.values() if self._count(chunk) < self.chunk)]
        arrays: dict[str, np.ndarray] = {}
        if len(self._block):
            arrays["steps"] = self._gathered(self._block, [c for c in chunks if c.file is None])
        if self._latents is not None:
            arrays["latents"] = self._gathered(self._latents, [c for c in chunks if c.dirty])
        values = {
            "added": self.added_L.tolist(),
            "first": self.first_L.tolist(),
            "states": self._states,
            "version": self._version,
            "doomed": [list(item) for item in self._doomed],
            "chunks": [[c.lane, c.number, c.file, c.crc, c.latents, c.latents_crc, c.dirty] for c in chunks],
        }
        return State(values, arrays)

    def _keep_files(self, files: ChunkFolder) -> None:
        """Bring the latents of full chunks to the disk, note what this state names, delete what no state needs."""
        for chunk in self._full:
            if chunk.file is not None:
                self._settle(chunk)
            if chunk.latents is not None and chunk.latents_crc is None:
                chunk.latents_crc = checksum(files.whole(chunk.latents, self._latent, self.chunk))
        try:
            files.sync()
        except OSError as error:
            self._complain(error)
        self._named = self._needed()
        if not self.changed:
            return
        self.changed = False
        self._states += 1
        over = {name for last, name in self._doomed if last <= self._states - self._keep_states}
        self._doomed = [item for item in self._doomed if item[1] not in over]
        if self._sweep_due:  # another future, which a restored store no longer has
            over |= files.names() - self._named - {name for _, name in self._doomed}
            self._sweep_due = False
        files.remove(over)

    def _needed(self) -> set[str]:
        return {name for chunk in self._full for name in (chunk.file, chunk.latents) if name is not None}

    def load_state(self, state: State, record: np.dtype | None) -> None:
        """Go on from there; every file it names is read and checked. record: what a step is, if that is new."""
        values, arrays = state.values, state.arrays
        chunks = [_Chunk(row[0], row[1], None, *row[2:]) for row in values["chunks"]]
        if self._files is not None:
            named = [name for chunk in chunks for name in (chunk.file, chunk.latents) if name is not None]
            self._files.expect_names([*named, *(name for _, name in values["doomed"])])
        self._clear()
        self.close()
        if record is not None:
            self.reserve(record)
        self.added_L, self.first_L = np.array(values["added"]), np.array(values["first"])
        self._states, self._version = values["states"], values["version"]
        self._doomed = [(int(last), str(name)) for last, name in values["doomed"]]
        if "latents" in arrays and self._latents is None:
            self._latents = self._reserved(self._latent)
        self._restore(chunks, arrays)
        self._named = self._needed()
        self._sweep_due = True

    def _restore(self, chunks: list[_Chunk], arrays: Mapping[str, Any]) -> None:
        homeless = [chunk for chunk in chunks if chunk.file is None]
        here = [chunk for chunk in chunks if chunk.file is None or chunk.dirty]
        """In the state itself, wholly or in part."""
        if len(here) < len(chunks) and self._files is None:
            raise ConfigError("the replay was saved with a folder; go on with that folder")
        if len(here) > len(self._free):
            raise ConfigError(f"the state holds {len(here)} chunks of {self.chunk} steps; raise memory")
        for chunk in here:
            chunk.slot = self._occupied()
        for chunk in reversed(chunks):  # the newest are the ones that may stay in memory
            if chunk.file is None:
                continue
            assert self._files is not None
            records = self._files.whole(chunk.file, self._block.dtype, self.chunk, chunk.crc)
            if chunk.slot is None and self._free:
                chunk.slot = self._occupied()
            if chunk.slot is not None:
                self._block[self._rows_of(chunk.slot)] = records
        for chunk in chunks:
            self._chunks[chunk.lane, chunk.number] = chunk
            if self._count(chunk) == self.chunk:
                self._full.append(chunk)
                if chunk.slot is not None:
                    self._resident.append(chunk)
                if chunk.file is None and self._files is not None:
                    self._unwritten.append(chunk)
            else:
                assert chunk.slot is not None
                self._slot_L[chunk.lane] = chunk.slot
            if chunk.latents is not None and self._files is not None:
                found = self._files.whole(chunk.latents, self._latent, self.chunk, chunk.latents_crc)
                if chunk.slot is not None:
                    if self._latents is None:
                        self._latents = self._reserved(self._latent)
                    self._latents[self._rows_of(chunk.slot)] = found
        if homeless:
            self._scatter(self._block, homeless, arrays["steps"])
        dirty = [c for c in chunks if c.dirty]
        if dirty:
            assert self._latents is not None
            self._scatter(self._latents, dirty, arrays["latents"])

    def _count(self, chunk: _Chunk) -> int:
        return min(self.chunk, int(self.added_L[chunk.lane]) - chunk.number * self.chunk)

    def _gathered(self, block: np.ndarray, chunks: list[_Chunk]) -> np.ndarray:
        """The records of these chunks one after the other, as bytes."""
        bytes_MI = block.view(np.uint8).reshape(-1, block.itemsize)  # with what pads a record: equal stays equal
        parts = [bytes_MI[self._rows_of(c.slot)][: self._count(c)] for c in chunks if c.slot is not None]
        return np.concatenate([bytes_MI[:0], *parts])

    def _scatter(self, block: np.ndarray, chunks: list[_Chunk], rows: Any) -> None:
        at, records = 0, np.ascontiguousarray(rows).reshape(-1).view(block.dtype)
        for chunk in chunks:
            assert chunk.slot is not None
            count, first = self._count(chunk), chunk.slot * self.chunk
            block[first : first + count] = records[at : at + count]
            at += count
        if at != len(records):
            raise FolderError(f"the state holds {len(records)} steps of the replay where {at} belong; it is damaged")

    def close(self) -> None:
        """Close the files."""
        if self._files is not None:
            self._files.close()
