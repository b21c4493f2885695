"""What was seen, kept to be learned from: sequences of steps, the newest once in order, the rest uniformly; or, as far
as is asked for, such as lead to one of the last ends.

    replay = Replay(capacity=1_000_000, length=64, lanes=16, latent=(2048, 32, 16), folder=run / "replay")
    replay.add_batch({"image": …, "action": …, "reward": …, "is_first": …, "is_last": …, "is_terminal": …})
    for _ in range(ratio.due(env_steps)):
        sample = replay.sample(16)                       # (B, T) arrays, and the latent before each sequence
        replay.write_latents(sample.ids_BT, deter, stoch)

Every environment lane is an endless tape of steps (`store`, which keeps them in memory and files); a sequence is any
`length` consecutive steps of one lane, across ends of episodes (`is_first` marks them). A step's id is its position in
its lane times the number of lanes, plus its lane.

All that is drawn comes from (seed, number of the draw), so there is no generator to save.

Letters: L lanes, N steps at once, B sequences, T steps of one, D width of the deterministic latent, S × C the discrete.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from grpo.config import ConfigError
from grpo.errors import warn
from grpo.protocols import State
from grpo.seeding import generator
from grpo.worldmodel.replay.chunks import ChunkFolder
from grpo.worldmodel.replay.records import (
    Form,
    ReplayError,
    admitted,
    kept_type,
    latent_record,
    latent_records,
    step_record,
)
from grpo.worldmodel.replay.store import ChunkStore

CHUNK = 1024
"""Steps in a chunk, at most."""
LAST_ENDS = 20
"""Ends that sequences may be asked to lead to: what the actor failed at long ago it no longer does."""


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


class Replay:
    """Steps of L environment lanes, at most `capacity` of them; the oldest chunks are dropped.

    latent: sizes (D, S, C) of the latents to keep beside the steps; None: none. Discrete latents are kept as the number
    of the class, deterministic ones as `latent_dtype`. memory: steps kept in memory when there is a folder; None: all.
    ends: share of the sequences that begin less than `reach` steps before one of the last ends.
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
        ends: float = 0.0,
        reach: int = 1,
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
        self.ends, self.reach = ends, reach
        self.latent, self._latent_record = latent, latent_record(latent, latent_dtype)
        slots = min(capacity, capacity if memory is None else memory) // self.chunk + lanes
        files = self._files = None if folder is None else ChunkFolder(folder, most_open)
        self._store = ChunkStore(lanes, self.chunk, slots, self._latent_record, files, keep_states)
        self._lock = threading.RLock()  # acting beside learning is a matter of two threads
        self._form: Form = {}
        """What a step is, fixed by the first."""
        self._queue: deque[int] = deque()
        """Ids of the first steps of sequences nobody has seen."""
        self._ends: deque[int] = deque(maxlen=LAST_ENDS)
        """Ids of the last steps that were ends, where sequences that lead there are asked for."""
        self._draws = 0

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
            given = {key: np.asarray(x) for key, x in steps.items()}
            if not self._form:
                form = {key: (x.dtype, x.shape[1:]) for key, x in given.items()}
                self._store.reserve(step_record(form))
                self._form = form
                self._expect_room(step_record(form).itemsize + self._latent_record.itemsize)
            position_N = self._store.added_L[lane_N]
            self._store.append(lane_N, admitted(given, self._form, lane_N, position_N))
            if self.online:
                whole_N = (position_N + 1) % self.length == 0
                self._queue.extend(self._ids(lane_N[whole_N], position_N[whole_N] + 1 - self.length).tolist())
            if self.ends:
                ended_N = np.asarray(given["is_terminal"], bool)
                self._ends.extend(self._ids(lane_N[ended_N], position_N[ended_N]).tolist())
            while len(self) > self.capacity:
                self._store.drop_oldest()
            while self._queue and not self._here(self._queue[0]):
                self._queue.popleft()
            return self._ids(lane_N, position_N)

    def write_latents(self, ids: np.ndarray, deter: Any, stoch: Any) -> None:
        """Keep the posterior latents of these steps, (…, D) and one-hot (…, S, C); steps that were dropped are passed.

        Arrays or tensors; of a step that is named twice the last counts.
        """
        if self.latent is None:
            raise ConfigError("this replay keeps no latents; make it with latent=(D, S, C)")
        records = latent_records(deter, stoch, np.shape(ids), self.latent, self._latent_record)
        with self._lock:
            position_N, lane_N = np.divmod(np.asarray(ids).reshape(-1), self.lanes)
            self._store.put_latents(lane_N, position_N, records)

    def _expect_room(self, size: int) -> None:
        """Say before anything is played that the disk is too small for all of it; a run that ends earlier may do."""
        if self._files is not None and self._files.free < self.capacity * size:
            most, free = (bytes / 2**30 for bytes in (self.capacity * size, self._files.free))
            warn(
                f"{self._files.path}: {self.capacity} steps of {size} bytes will take {most:.1f} GiB, {free:.1f} GiB "
                "are free; lower replay_capacity, set replay_latents=float16, or name another disk with replay_folder"
            )

    def _distinct(self, lane_N: np.ndarray) -> bool:
        if len(lane_N) == 1:
            return 0 <= lane_N[0] < self.lanes
        return len(np.unique(lane_N)) == len(lane_N) and bool(((lane_N >= 0) & (lane_N < self.lanes)).all())

    def _ids(self, lane_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
        return position_N * self.lanes + lane_N

    def _here(self, id: int) -> bool:
        return id // self.lanes >= self._store.first_L[id % self.lanes]

    # --- giving out -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps that are kept."""
        return len(self._store)

    @property
    def sequences(self) -> int:
        """Different sequences that can be drawn."""
        return int(self._starts_L().sum())

    def _starts_L(self) -> np.ndarray:
        return np.maximum(self._store.added_L - self._store.first_L - self.length + 1, 0)

    def metrics(self) -> dict[str, float]:
        """How much is kept, how much of it only on the disk, and how many new sequences wait."""
        return {
            "replay_steps": float(len(self)),
            "replay_on_disk": float(self._store.away),
            "replay_queue": float(len(self._queue)),
        }

    def sample(self, batch: int) -> Sample:
        """The next B sequences: new ones in the order they came, each once; the rest over all, or to an end."""
        with self._lock:
            self._expect_some()
            fresh: list[int] = []
            while self._queue and len(fresh) < batch:
                id = self._queue.popleft()
                if self._here(id):
                    fresh.append(id)
            drawn = self._draw([self.seed, self._draws], batch - len(fresh))
            if self.ends:
                self._lead_to_ends(drawn, generator(self.seed, self._draws, 2))
            self._draws += 1
            self._store.changed = True
            return self._read(np.concatenate([np.array(fresh, np.int64), drawn]), len(fresh))

    def peek(self, batch: int, number: int) -> Sample:
        """B sequences uniformly, the same ones for the same number, to look at: no later sample is another for it."""
        with self._lock:
            self._expect_some()
            return self._read(self._draw([self.seed, number, 1], batch), 0)

    def _expect_some(self) -> None:
        if not self.sequences:
            most = int((self._store.added_L - self._store.first_L).max())
            raise ReplayError(f"a sequence has {self.length} steps, and no lane more than {most} yet; add steps first")

    def _draw(self, key: list[int], count: int) -> np.ndarray:
        starts_L = self._starts_L()
        ends_L = starts_L.cumsum()
        drawn_B = generator(*key).integers(0, ends_L[-1], count)
        lane_B = np.searchsorted(ends_L, drawn_B, "right")
        return self._ids(lane_B, self._store.first_L[lane_B] + drawn_B - (ends_L - starts_L)[lane_B])

    def _lead_to_ends(self, drawn_B: np.ndarray, random: np.random.Generator) -> None:
        """In place of about that share of them, sequences that begin before an end, as far as the lane goes."""
        here = [id for id in self._ends if self._here(id)]
        for b in np.flatnonzero(random.random(len(drawn_B)) < self.ends) if here else ():
            position, lane = divmod(here[random.integers(len(here))], self.lanes)
            first, last = int(self._store.first_L[lane]), int(self._store.added_L[lane]) - self.length
            if last >= first:
                begins = min(max(position - int(random.integers(self.reach)), first), last)
                drawn_B[b] = begins * self.lanes + lane

    def _read(self, start_B: np.ndarray, online: int) -> Sample:
        count, length = len(start_B), self.length
        batch = {
            key: np.empty((count, length, *shape), kept_type(key, dtype)) for key, (dtype, shape) in self._form.items()
        }
        for b, id in enumerate(start_B.tolist()):
            position, lane = divmod(id, self.lanes)
            for t, records in self._store.read(lane, position, length):
                for key, x in batch.items():
                    x[b, t : t + len(records)] = records[key]
        # An episode that was left half-way has no last step of its own.
        batch["is_last"][:, :-1] |= batch["is_first"][:, 1:]
        ids_BT = start_B[:, None] + np.arange(length) * self.lanes
        return Sample(batch, ids_BT, *self._before(start_B), online)

    def _before(self, start_B: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The latents of the steps before these."""
        if self.latent is None:
            return None, None
        D, S, C = self.latent
        deter_BD, stoch_BSC = np.zeros((len(start_B), D), np.float32), np.zeros((len(start_B), S, C), np.float32)
        for b, id in enumerate((start_B - self.lanes).tolist()):
            if id >= 0 and self._here(id):
                position, lane = divmod(id, self.lanes)
                found = self._store.latent(lane, position)
                if found is not None:
                    deter_BD[b] = found["deter"]
                    stoch_BSC[b, np.arange(S), found["stoch"]] = 1
        return deter_BD, stoch_BSC

    # --- going on later ---------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Counters, the names of the files that are needed, and all that is in none."""
        with self._lock:
            kept = self._store.state()
            own = {
                "layout": self._layout(),
                "keys": {key: [dtype.str, list(shape)] for key, (dtype, shape) in self._form.items()},
                "draws": self._draws,
            }
            arrays = {**kept.arrays, "queue": np.array(self._queue, np.int64)}
            if self.ends:
                arrays["ends"] = np.array(self._ends, np.int64)
            return State({**kept.values, **own}, arrays)

    def load_state(self, state: State) -> None:
        """Go on from there; every file it names is read and checked. Where that raises, nothing can be gone on with."""
        with self._lock:
            values, layout = state.values, self._layout()
            differ = [f"{k}: {v!r} → {layout[k]!r}" for k, v in values["layout"].items() if v != layout[k]]
            if differ:
                raise ConfigError(f"the replay was saved with other settings ({'; '.join(differ)}); go on with those")
            form = {key: (np.dtype(dtype), tuple(shape)) for key, (dtype, shape) in values["keys"].items()}
            new = bool(form) and form != self._form
            self._store.load_state(state, step_record(form) if new else None)
            self._form = form if new else self._form
            self._draws, self._queue = values["draws"], deque(np.asarray(state.arrays["queue"]).tolist())
            # A state of a run that did not ask for them names none.
            self._ends = deque(np.asarray(state.arrays.get("ends", ())).tolist(), LAST_ENDS)

    def _layout(self) -> dict[str, Any]:
        """What a state fits."""
        return {
            "capacity": self.capacity,
            "length": self.length,
            "lanes": self.lanes,
            "chunk": self.chunk,
            "seed": self.seed,
            "online": self.online,
            "latent": None if self.latent is None else [*self.latent, self._latent_record["deter"].base.name],
        }

    def close(self) -> None:
        """Close the files."""
        self._store.close()


class TrainRatio:
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
