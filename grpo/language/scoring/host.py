"""What layers keep of a pass on the host: it leaves while the next layer computes, and is back when it is needed.

    forward    layer 1 ─► layer 2 ─► layer 3      backward   layer 3 ─► layer 2 ─► layer 1
    copies           └─ 1 out ─┘└─ 2 out ─┘       copies     └─ 2 in ──┘└─ 1 in ──┘

Copies have a stream of their own. A layer's tensors are let go of when the copy after it is known to have been made:
the GPU waits for that, the host never does. The memory they lie in is pinned, so that it can be read by the GPU itself,
and lasts from pass to pass, for pinning takes longer than a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.errors import warn

AT_ONCE = 2
"""Layers whose tensors are on the GPU at once: one that is computed, and one that leaves or comes."""
ALIGNED = 256
"""Bytes at whose multiples a tensor begins."""


class HostMemory:
    """Pinned memory of a model's passes, a piece for each layer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.free: list[dict[int, Piece]] = []
        """Of passes that are over; there is more than one where a pass begins before another has ended."""

    def begin(self, layers: int) -> Offload:
        """A pass through so many layers."""
        return Offload(self, self.free.pop() if self.free else {}, layers)

    @property
    def held(self) -> int:
        """Bytes between passes."""
        return sum(len(piece.bytes) for pieces in self.free for piece in pieces.values())

    def ended(self, pieces: dict[int, Piece]) -> None:
        """Take back a pass's memory. One that was broken off may have copies under way to what it lets go of now."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.free.append(pieces)


class Piece:
    """Memory of one layer, pinned where there is a GPU that shall read it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8)
        if device.type != "cuda":
            return
        self.bytes.fill_(0)  # by all cores: pages that are there already are pinned much faster
        # Not torch's own pinned memory: that comes in powers of two, up to twice of what is asked for.
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        where = self.bytes.data_ptr()
        if int(runtime.cudaHostRegister(where, size, 0)) != 0:
            warn("the host's memory cannot be pinned, so that layers wait for copies to it")
            return
        weakref.finalize(self, runtime.cudaHostUnregister, where).atexit = False

    def parts(self, like: Sequence[Tensor]) -> list[Tensor]:
        """As tensors like these, one behind the other."""
        found, begin = [], 0
        for tensor in like:
            end = begin + tensor.numel() * tensor.element_size()
            found.append(self.bytes[begin:end].view(tensor.dtype).view(tensor.shape))
            begin = -(-end // ALIGNED) * ALIGNED
        return found


class Offload:
    """One pass: what its layers keep, by their number."""

    def __init__(self, memory: HostMemory, pieces: dict[int, Piece], layers: int) -> None:
        self._memory, self._pieces, self._layers = memory, pieces, layers
        self._there: dict[int, list[Tensor]] = {}
        self._here: dict[int, Sequence[Tensor]] = {}
        self._copied: dict[int, Any] = {}
        weakref.finalize(self, memory.ended, pieces).atexit = False

    def put(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Keep these of a layer; in the order in which layers are computed."""
        if number == self._layers - 1:  # it is the first that is needed
            self._here[number] = tensors
        else:
            size = sum(-(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED for tensor in tensors)
            piece = self._pieces.get(number)
            if piece is None or len(piece.bytes) < size:
                self._pieces.pop(number, None)
                del piece
                piece = self._pieces[number] = Piece(size, self._memory.device)
            self._there[number] = piece.parts(tensors)
            self._here[number] = tensors
            self._copy(number, self._there[number], tensors)
        if number - 1 in self._copied:
            self._arrived(number - 1)
            del self._here[number - 1]

    def take(self, number: int) -> Sequence[Tensor]:
        """What was kept of a layer, once; the copy of the one before it begins."""
        if number not in self._here:
            self._fetch(number)
        self._arrived(number)
        found = self._here.pop(number)
        if number > 0:
            self._fetch(number - 1)
        return found

    def _fetch(self, number: int) -> None:
        there = self._there[number]
        here = [torch.empty_like(tensor, device=self._memory.device) for tensor in there]
        self._here[number] = here
        self._copy(number, here, there)

    def _copy(self, number: int, to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
        stream = self._memory.stream
        if stream is None:
            for mine, theirs in zip(to, of, strict=True):
                mine.copy_(theirs)
            self._copied[number] = None
            return
        stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(stream):
            for mine, theirs in zip(to, of, strict=True):
                mine.copy_(theirs, non_blocking=True)
            self._copied[number] = stream.record_event()

    def _arrived(self, number: int) -> None:
        """What is computed from here on comes after a layer's copy."""
        event = self._copied.pop(number, None)
        if event is not None:
            torch.cuda.current_stream(self._memory.device).wait_event(event)


def free_bytes() -> float:
    """Memory of the host that can be had, within what a container allows; where the system does not say, enough."""
    found = float("inf")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), found)
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = float(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return found
    return found if limit == "max" else min(found, max(float(limit) - used, 0.0))
