"""What was seen, kept to be learned from: sequences of steps, the newest once in order, the rest uniformly.

    replay = Replay(capacity=1_000_000, length=64, lanes=16, latent=(2048, 32, 16), folder=run / "replay")
    replay.add_batch({"image": …, "action": …, "reward": …, "is_first": …, "is_last": …, "is_terminal": …})
    for _ in range(ratio.due(env_steps)):
        sample = replay.sample(16)                       # (B, T) arrays, and the latent before each sequence
        replay.write_latents(sample.ids_BT, deter, stoch)

Every environment lane is an endless tape of steps, cut into chunks of equal size; a sequence is any `length`
consecutive steps of one lane, across ends of episodes (`is_first` marks them) and of chunks. Chunks lie in one
preallocated block of records. With a folder, a chunk that is full is also written there, once and for all, and leaves
the block when others need its place; sequences are then read from the file.

All that is drawn comes from (seed, number of the draw), so there is no generator to save. A state names the files it
needs and carries the rest; files stay for as long as one of the last `keep_states` states needs them. Latents are the
only thing that changes after it was written: a file of them that a state names is not touched again but copied first.

Letters: L lanes, N steps at once, B sequences, T steps of one, D width of the deterministic latent, S × C the discrete.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from grpo.config import ConfigError
from grpo.protocols import State
from grpo.run.files import FolderError
from grpo.worldmodel.chunks import ChunkFolder, checksum

FLAGS = ("is_first", "is_last", "is_terminal")
FIXED: Mapping[str, type] = {"action": np.float32, "reward": np.float32} | dict.fromkeys(FLAGS, np.bool_)
"""Keys of every step beside its observations, and how they are kept."""
CHUNK = 1024
"""Steps in a chunk, at most."""


class ReplayError(ConfigError):
    """Steps that cannot be taken in or given out, in one line that says which and what to do."""


@dataclass(frozen=True)
class Sample:
    """Sequences to learn from."""

    batch: dict[str, np.ndarray]
    """Every key of a step, (B, T, …)."""
    ids_BT: np.ndarray
    """Which steps they are, for `write_latents`."""
    deter_BD: np.ndarray | None
    """The latent of the step before each sequence, zeros where none is known; None: the replay keeps none."""
    stoch_BSC: np.ndarray | None
    online: int
    """How many of the sequences, the first ones, are new."""

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The batch for the learner."""
        return {key: torch.from_numpy(x).to(device, non_blocking=True) for key, x in self.batch.items()}


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


class Replay:
    """Steps of L environment lanes, at most `capacity` of them; the oldest chunks are dropped.

    latent: sizes (D, S, C) of the latents to keep beside the steps; None: none. Discrete latents are kept as the number
    of the class, deterministic ones as `latent_dtype`. memory: steps kept in memory when there is a folder; None: all.
    """

    def __init__(
        self,
        capacity: int,
        length: int,
        folder: str | Path | None = None,
        *,
        lanes: int = 1,
        seed: int = 0,
        latent: tuple[int, int, int] | None = None,
        latent_dtype: Literal["float32", "float16"] = "float32",
        memory: int | None = None,
        chunk: int | None = None,
        online: bool = True,
        keep_states: int = 6,
        most_open: int = 64,
    ) -> None:
        if length < 1 or lanes < 1:
            raise ConfigError(f"length={length}, lanes={lanes}: both are at least 1")
        self.chunk = min(CHUNK, max(1, capacity // lanes // 8)) if chunk is None else chunk
        least = lanes * (length + self.chunk)
        if self.chunk < 1 or capacity < least:
            raise ConfigError(f"capacity={capacity} is too small for {lanes} lanes: at least {max(least, 2 * lanes)}")
        if memory is not None and folder is None:
            raise ConfigError(f"memory={memory} needs a folder for the rest; give one, or leave memory out")
        if latent_dtype not in ("float32", "float16"):
            raise ConfigError(f"latent_dtype={latent_dtype!r}: float32 or float16")
        self.capacity, self.length, self.lanes, self.seed, self.online = capacity, length, lanes, seed, online
        self.latent, self._keep_states = latent, keep_states
        self._latent_record = _latent_record(latent, latent_dtype)
        self._slots = min(capacity, capacity if memory is None else memory) // self.chunk + lanes
        self._files = None if folder is None else ChunkFolder(folder, most_open)
        self._lock = threading.RLock()  # acting beside learning is a matter of two threads
        self._given: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        """Of every key: the type it comes in and the shape of one step; fixed by the first step."""
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
        self._queue: deque[int] = deque()
        """Ids of the first steps of sequences nobody has seen."""
        self._added_L, self._first_L = np.zeros(self.lanes, np.int64), np.zeros(self.lanes, np.int64)
        """Steps ever added, and the oldest that is still here."""
        self._slot_L = np.zeros(self.lanes, np.int64)
        """Where a lane's steps go now."""
        self._draws = self._states = self._version = 0
        self._changed = self._disk_failed = self._sweep_due = False
        self._named: set[str] = set()
        """Files that the last state names."""
        self._doomed: list[tuple[int, str]] = []
        """Files nobody needs any more, and the last state that names them."""

    # --- taking in --------------------------------------------------------------------------------------------------

    def add(self, step: Mapping[str, Any], lane: int = 0) -> int:
        """Take in one step of a lane; its id."""
        return int(self.add_batch({key: np.asarray(x)[None] for key, x in step.items()}, np.array([lane]))[0])

    def add_batch(self, steps: Mapping[str, Any], lanes: np.ndarray | None = None) -> np.ndarray:
        """Take in one step of each of N different lanes (None: of all), or none where one is unfit; their ids."""
        with self._lock:
            lane_N = np.arange(self.lanes) if lanes is None else np.asarray(lanes, np.int64)
            if lanes is not None and not self._distinct(lane_N):
                raise ReplayError(f"lanes {lane_N.tolist()}: each once, from 0 to {self.lanes - 1}")
            fit = self._admit(steps, lane_N)
            position_N = self._added_L[lane_N]
            place_N = position_N % self.chunk
            fresh = np.flatnonzero(place_N == 0)
            self._make_room(len(fresh))
            for at in fresh:
                self._begin(int(lane_N[at]), int(position_N[at]) // self.chunk)
            row_N = self._slot_L[lane_N] * self.chunk + place_N
            for key, x in fit.items():
                self._block[key][row_N] = x
            self._added_L[lane_N] = position_N + 1
            self._changed = True
            for at in np.flatnonzero(place_N == self.chunk - 1):
                self._finish(self._chunks[int(lane_N[at]), int(position_N[at]) // self.chunk])
            if self.online:
                whole_N = (position_N + 1) % self.length == 0
                self._queue.extend(self._ids(lane_N[whole_N], position_N[whole_N] + 1 - self.length).tolist())
            while len(self) > self.capacity:
                self._drop(self._full[0])
            return self._ids(lane_N, position_N)

    def _distinct(self, lane_N: np.ndarray) -> bool:
        if len(lane_N) == 1:
            return 0 <= lane_N[0] < self.lanes
        return len(np.unique(lane_N)) == len(lane_N) and bool(((lane_N >= 0) & (lane_N < self.lanes)).all())

    def _admit(self, steps: Mapping[str, Any], lane_N: np.ndarray) -> dict[str, np.ndarray]:
        """The steps as they are kept, once each is what the first one was and every number is finite."""
        given = {key: np.asarray(x) for key, x in steps.items()}
        if not self._given:
            self._agree({key: (x.dtype, x.shape[1:]) for key, x in given.items()})
        if given.keys() != self._given.keys():
            differ = ", ".join(sorted(given.keys() ^ self._given.keys()))
            raise ReplayError(f"{self._place(lane_N)}: the keys differ from the first step's in {differ}")
        fit = {}
        for key, x in given.items():
            dtype, shape = self._given[key]
            if x.shape[:1] != lane_N.shape:
                raise ReplayError(f"{key} has {len(x)} rows for {len(lane_N)} lanes; name the lanes the steps are of")
            if x.shape[1:] != shape:
                raise ReplayError(f"{self._place(lane_N)}: {key} has the shape {x.shape[1:]}, at first it was {shape}")
            if x.dtype != dtype and key not in FIXED:
                raise ReplayError(f"{self._place(lane_N)}: {key} has the type {x.dtype}, at first it was {dtype}")
            fit[key] = x = x.astype(_kept(key, dtype), copy=False)
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                bad_N = ~np.isfinite(x).reshape(len(lane_N), -1).all(1)
                raise ReplayError(f"{self._place(lane_N[bad_N])}: {key} is NaN or infinite; mend the environment")
        odd_N = fit["is_terminal"] & ~fit["is_last"]
        if odd_N.any():
            raise ReplayError(f"{self._place(lane_N[odd_N])}: is_terminal without is_last; an end is both")
        return fit

    def _place(self, lane_N: np.ndarray) -> str:
        return f"lane {lane_N[0]}, step {self._added_L[lane_N[0]]}"

    def _agree(self, given: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
        """Fix what a step is, and set aside the memory for all of them."""
        missing = sorted(FIXED.keys() - given.keys())
        if missing:
            raise ReplayError(f"a step has no {', '.join(missing)}; every step has {', '.join(FIXED)}")
        for key, (dtype, shape) in given.items():
            if dtype.kind not in "biuf":
                raise ReplayError(f"{key} has the type {dtype}; steps hold numbers")
            if key in FIXED and bool(shape) != (key == "action"):
                raise ReplayError(f"{key} has the shape {shape}; an action is a vector, a reward or a flag one number")
        record = _record({key: (_kept(key, dtype), shape) for key, (dtype, shape) in given.items()})
        self._block = self._reserve(record)
        self._given = given

    def _reserve(self, record: np.dtype) -> np.ndarray:
        rows = self._slots * self.chunk
        try:
            return np.zeros(rows, record)  # the system gives the memory when it is first written to
        except MemoryError:
            size = rows * record.itemsize / 2**30
            raise ConfigError(
                f"{rows} steps of {record.itemsize} bytes are {size:.1f} GiB, more than there is; "
                "lower capacity, or give a folder and lower memory"
            ) from None

    def _ids(self, lane_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
        return position_N * self.lanes + lane_N

    # --- chunks -----------------------------------------------------------------------------------------------------

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

    def _drop(self, chunk: _Chunk) -> None:
        """Forget the oldest chunk of a lane."""
        self._full.remove(chunk)
        del self._chunks[chunk.lane, chunk.number]
        if chunk.slot is not None:
            self._resident.remove(chunk)
            self._free.append(chunk.slot)
        if chunk in self._unwritten:
            self._unwritten.remove(chunk)
        self._doom(chunk.file)
        self._doom(chunk.latents)
        self._first_L[chunk.lane] += self.chunk
        while self._queue and not self._here(self._queue[0]):
            self._queue.popleft()

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
            warnings.warn(
                f"{self._files.path}: {error}; the replay goes on in memory, which is for {self._slots * self.chunk} "
                "steps, and writes again when it can: free some space there",
                stacklevel=4,
            )
        self._disk_failed = True

    def _rows_of(self, slot: int) -> slice:
        return slice(slot * self.chunk, (slot + 1) * self.chunk)

    def _here(self, id: int) -> bool:
        return id // self.lanes >= self._first_L[id % self.lanes]

    # --- giving out -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps that are kept."""
        return int((self._added_L - self._first_L).sum())

    @property
    def sequences(self) -> int:
        """Different sequences that can be drawn."""
        return int(self._starts_L().sum())

    def _starts_L(self) -> np.ndarray:
        return np.maximum(self._added_L - self._first_L - self.length + 1, 0)

    def metrics(self) -> dict[str, float]:
        """How much is kept, how much of it only on the disk, and how many new sequences wait."""
        away = len(self._full) - len(self._resident)
        return {
            "replay_steps": float(len(self)),
            "replay_on_disk": float(away * self.chunk),
            "replay_queue": float(len(self._queue)),
        }

    def sample(self, batch: int) -> Sample:
        """The next B sequences: new ones in the order they came, each once; the rest uniformly over all."""
        with self._lock:
            self._expect_some()
            fresh: list[int] = []
            while self._queue and len(fresh) < batch:
                id = self._queue.popleft()
                if self._here(id):
                    fresh.append(id)
            drawn = self._draw([self.seed, self._draws], batch - len(fresh))
            self._draws += 1
            self._changed = True
            return self._read(np.concatenate([np.array(fresh, np.int64), drawn]), len(fresh))

    def peek(self, batch: int, number: int) -> Sample:
        """B sequences uniformly, the same ones for the same number, to look at: no later sample is another for it."""
        with self._lock:
            self._expect_some()
            return self._read(self._draw([self.seed, number, 1], batch), 0)

    def _expect_some(self) -> None:
        if not self.sequences:
            most = int((self._added_L - self._first_L).max())
            raise ReplayError(f"a sequence has {self.length} steps, and no lane more than {most} yet; add steps first")

    def _draw(self, key: list[int], count: int) -> np.ndarray:
        starts_L = self._starts_L()
        ends_L = starts_L.cumsum()
        drawn_B = np.random.default_rng(key).integers(0, ends_L[-1], count)
        lane_B = np.searchsorted(ends_L, drawn_B, "right")
        return self._ids(lane_B, self._first_L[lane_B] + drawn_B - (ends_L - starts_L)[lane_B])

    def _read(self, start_B: np.ndarray, online: int) -> Sample:
        count, length = len(start_B), self.length
        batch = {
            key: np.empty((count, length, *shape), _kept(key, dtype)) for key, (dtype, shape) in self._given.items()
        }
        for b, id in enumerate(start_B.tolist()):
            position, lane = divmod(id, self.lanes)
            for t, chunk, first, last in self._spans(lane, position, length):
                records = self._records(chunk, first, last)
                for key, x in batch.items():
                    x[b, t : t + last - first] = records[key]
        # An episode that was left half-way has no last step of its own.
        batch["is_last"][:, :-1] |= batch["is_first"][:, 1:]
        ids_BT = start_B[:, None] + np.arange(length) * self.lanes
        return Sample(batch, ids_BT, *self._before(start_B), online)

    def _spans(self, lane: int, position: int, count: int) -> Iterator[tuple[int, _Chunk, int, int]]:
        """The chunks that hold consecutive steps: how far into them, the chunk, its first row, one past the last."""
        t = 0
        while t < count:
            number, first = divmod(position + t, self.chunk)
            last = min(self.chunk, first + count - t)
            yield t, self._chunks[lane, number], first, last
            t += last - first

    def _records(self, chunk: _Chunk, first: int, last: int) -> np.ndarray:
        if chunk.slot is not None:
            return self._block[chunk.slot * self.chunk + first : chunk.slot * self.chunk + last]
        assert self._files is not None and chunk.file is not None
        return self._files.read(chunk.file, self._block.dtype, first, last)

    def _before(self, start_B: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The latents of the steps before these."""
        if self.latent is None:
            return None, None
        D, S, C = self.latent
        deter_BD, stoch_BSC = np.zeros((len(start_B), D), np.float32), np.zeros((len(start_B), S, C), np.float32)
        for b, id in enumerate((start_B - self.lanes).tolist()):
            if id >= 0 and self._here(id):
                position, lane = divmod(id, self.lanes)
                number, row = divmod(position, self.chunk)
                found = self._latents_at(self._chunks[lane, number], row, row + 1)
                if found is not None and found["known"][0]:
                    deter_BD[b] = found["deter"][0]
                    stoch_BSC[b, np.arange(S), found["stoch"][0]] = 1
        return deter_BD, stoch_BSC

    def _latents_at(self, chunk: _Chunk, first: int, last: int) -> np.ndarray | None:
        if chunk.slot is not None:
            at = chunk.slot * self.chunk
            return None if self._latents is None else self._latents[at + first : at + last]
        if chunk.latents is None or self._files is None:
            return None
        return self._files.read(chunk.latents, self._latent_record, first, last)

    def write_latents(self, ids: np.ndarray, deter: Any, stoch: Any) -> None:
        """Keep the posterior latents of these steps, (…, D) and one-hot (…, S, C); steps that were dropped are passed.

        Arrays or tensors; of a step that is named twice the last counts.
        """
        if self.latent is None:
            raise ConfigError("this replay keeps no latents; make it with latent=(D, S, C)")
        D, S, C = self.latent
        ids_N, deter, stoch = np.asarray(ids).reshape(-1), _array(deter), _array(stoch)
        if deter.shape != (*np.shape(ids), D) or stoch.shape != (*np.shape(ids), S, C):
            raise ReplayError(
                f"latents of {np.shape(ids)} steps have the shapes {deter.shape} and {stoch.shape}, "
                f"not (…, {D}) and (…, {S}, {C})"
            )
        records = np.zeros(len(ids_N), self._latent_record)
        records["deter"], records["known"] = deter.reshape(-1, D), True
        records["stoch"] = stoch.reshape(-1, S, C).argmax(-1)
        if not np.isfinite(records["deter"]).all():
            raise ReplayError(f"latents are NaN or infinite as {records['deter'].dtype}; none of them was kept")
        square = np.einsum("...c,...c->...", stoch, stoch)  # with the largest, enough to tell, and quick
        if not ((np.abs(stoch.max(-1) - 1) < 1e-3) & (np.abs(square - 1) < 1e-2)).all():
            raise ReplayError("stoch is not one-hot; write the sampled latents, not their probabilities")
        with self._lock:
            self._changed = True
            position_N, lane_N = np.divmod(ids_N, self.lanes)
            chunk_N = position_N // self.chunk * self.lanes + lane_N
            cuts = [0, *(np.flatnonzero(np.diff(chunk_N)) + 1).tolist(), len(ids_N)]
            for a, b in pairwise(cuts):
                chunk = self._chunks.get((int(lane_N[a]), int(position_N[a]) // self.chunk)) if b > a else None
                if chunk is not None:
                    self._put_latents(chunk, position_N[a:b] % self.chunk, records[a:b])

    def _put_latents(self, chunk: _Chunk, row_N: np.ndarray, records: np.ndarray) -> None:
        if chunk.slot is not None:
            if self._latents is None:
                self._latents = self._reserve(self._latent_record)
            self._latents[chunk.slot * self.chunk + row_N] = records
            chunk.dirty = True
            return
        assert self._files is not None
        first, last = int(row_N.min()), int(row_N.max()) + 1
        if chunk.latents is None or chunk.latents in self._named:
            kept = self._latents_at(chunk, 0, self.chunk)
            kept = np.zeros(self.chunk, self._latent_record) if kept is None else kept
            kept[row_N] = records
            self._new_latents(chunk, kept)
            return
        kept = self._files.read(chunk.latents, self._latent_record, first, last)
        kept[row_N - first] = records
        try:
            self._files.patch(chunk.latents, first, kept)
        except OSError as error:
            self._complain(error)
        chunk.latents_crc = None

    # --- going on later ---------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Counters, the names of the files that are needed, and all that is in none."""
        with self._lock:
            if self._files is not None:
                self._keep_files(self._files)
            chunks = [*self._full, *(chunk for chunk in self._chunks.values() if self._count(chunk) < self.chunk)]
            arrays: dict[str, np.ndarray] = {"queue": np.array(self._queue, np.int64)}
            if self._given:
                arrays["steps"] = self._gathered(self._block, [c for c in chunks if c.file is None])
            if self._latents is not None:
                arrays["latents"] = self._gathered(self._latents, [c for c in chunks if c.dirty])
            values = {
                "layout": self._layout(),
                "keys": {key: [dtype.str, list(shape)] for key, (dtype, shape) in self._given.items()},
                "added": self._added_L.tolist(),
                "first": self._first_L.tolist(),
                "draws": self._draws,
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
                chunk.latents_crc = checksum(files.whole(chunk.latents, self._latent_record, self.chunk))
        try:
            files.sync()
        except OSError as error:
            self._complain(error)
        self._named = {name for chunk in self._full for name in (chunk.file, chunk.latents) if name is not None}
        if not self._changed:
            return
        self._changed = False
        self._states += 1
        over = {name for last, name in self._doomed if last <= self._states - self._keep_states}
        self._doomed = [item for item in self._doomed if item[1] not in over]
        if self._sweep_due:  # another future, which a restored replay no longer has
            over |= files.names() - self._named - {name for _, name in self._doomed}
            self._sweep_due = False
        files.remove(over)

    def load_state(self, state: State) -> None:
        """Go on from there; every file it names is read and checked. Where that raises, nothing can be gone on with."""
        with self._lock:
            values, arrays = state.values, {name: np.asarray(x) for name, x in state.arrays.items()}
            differ = [
                f"{k}: {v!r} → {self._layout()[k]!r}" for k, v in values["layout"].items() if v != self._layout()[k]
            ]
            if differ:
                raise ConfigError(f"the replay was saved with other settings ({'; '.join(differ)}); go on with those")
            self._clear()
            if self._files is not None:
                self._files.close()
            given = {key: (np.dtype(dtype), tuple(shape)) for key, (dtype, shape) in values["keys"].items()}
            if given and given != self._given:
                self._agree(given)
            self._added_L, self._first_L = np.array(values["added"]), np.array(values["first"])
            self._draws, self._states, self._version = values["draws"], values["states"], values["version"]
            self._doomed = [(int(last), str(name)) for last, name in values["doomed"]]
            self._queue.extend(arrays["queue"].tolist())
            if "latents" in arrays and self._latents is None:
                self._latents = self._reserve(self._latent_record)
            self._restore([_Chunk(row[0], row[1], None, *row[2:]) for row in values["chunks"]], arrays)
            self._named = {name for c in self._full for name in (c.file, c.latents) if name is not None}
            self._sweep_due = True

    def _restore(self, chunks: list[_Chunk], arrays: Mapping[str, np.ndarray]) -> None:
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
                found = self._files.whole(chunk.latents, self._latent_record, self.chunk, chunk.latents_crc)
                if chunk.slot is not None:
                    if self._latents is None:
                        self._latents = self._reserve(self._latent_record)
                    self._latents[self._rows_of(chunk.slot)] = found
        if homeless:
            self._scatter(self._block, homeless, arrays["steps"])
        dirty = [c for c in chunks if c.dirty]
        if dirty:
            assert self._latents is not None
            self._scatter(self._latents, dirty, arrays["latents"])

    def _layout(self) -> dict[str, Any]:
        """What a state fits."""
        own = {name: getattr(self, name) for name in ("capacity", "length", "lanes", "chunk", "seed", "online")}
        latent = None if self.latent is None else [*self.latent, self._latent_record["deter"].base.name]
        return own | {"latent": latent}

    def _count(self, chunk: _Chunk) -> int:
        return min(self.chunk, int(self._added_L[chunk.lane]) - chunk.number * self.chunk)

    def _gathered(self, block: np.ndarray, chunks: list[_Chunk]) -> np.ndarray:
        """The records of these chunks one after the other, as bytes."""
        bytes_MI = block.view(np.uint8).reshape(
            -1, block.itemsize
        )  # what pads a record is copied too: equal stays equal
        parts = [bytes_MI[self._rows_of(c.slot)][: self._count(c)] for c in chunks if c.slot is not None]
        return np.concatenate([bytes_MI[:0], *parts])

    def _scatter(self, block: np.ndarray, chunks: list[_Chunk], rows: np.ndarray) -> None:
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


class Ratio:
    """When to learn: so many replayed steps for each step of the environment, as in DreamerV3.

    The first time it is asked, one update is due, and steps count from there: those before learning began are no debt.
    Whole numbers and exact fractions, so nothing is rounded away and a restored one goes on exactly.
    """

    def __init__(self, train_ratio: float, batch_steps: int) -> None:
        if train_ratio < 0 or batch_steps < 1:
            raise ConfigError(f"train_ratio={train_ratio}, batch_steps={batch_steps}: at least 0, at least 1")
        self._updates_per_step = Fraction(train_ratio) / batch_steps
        self._origin: int | None = None
        self._done = 0

    def due(self, env_steps: int) -> int:
        """Updates to make now that so many environment steps were taken; they count as made."""
        if not self._updates_per_step:
            return 0
        if self._origin is None:
            self._origin = env_steps
        wanted = 1 + int((env_steps - self._origin) * self._updates_per_step)
        due, self._done = max(0, wanted - self._done), max(wanted, self._done)
        return due

    def state(self) -> State:
        """Where it stands."""
        return State({"origin": self._origin, "done": self._done}, {})

    def load_state(self, state: State) -> None:
        """Go on from there."""
        self._origin, self._done = state.values["origin"], int(state.values["done"])


def _kept(key: str, given: np.dtype) -> np.dtype:
    """The type a key is kept in: observations as they come, but never in double precision."""
    if key in FIXED:
        return np.dtype(FIXED[key])
    return np.dtype(np.float32) if given == np.float64 else given


def _record(fields: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> np.dtype:
    """One step as bytes in a row; wide numbers first, so that each lies where the machine reads it best."""
    ordered = sorted(fields.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
    return np.dtype([(key, dtype, shape) for key, (dtype, shape) in ordered], align=True)


def _latent_record(latent: tuple[int, int, int] | None, dtype: str) -> np.dtype:
    width, variables, classes = latent or (0, 0, 0)
    number = np.dtype(np.uint8 if classes <= 256 else np.uint16)
    return np.dtype(
        [("deter", np.dtype(dtype), (width,)), ("stoch", number, (variables,)), ("known", np.bool_)], align=True
    )


def _array(x: Any) -> np.ndarray:
    """An array on this side, from a tensor or anything like an array."""
    return x.detach().float().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
