"""Work of fixed shapes, recorded once on a CUDA device and played again: one launch instead of hundreds."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.errors import line

Tensors = dict[str, Tensor]

PLAIN = 2
"""Calls with the same shapes before they are worth a recording; libraries set themselves up in them."""
MOST = 4
"""Recordings that are kept: each holds all memory that its work needs."""


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    given: Tensors
    """Where it reads …"""
    found: Tensors
    """… and where it leaves what it found."""

    def play(self, given: Tensors) -> Tensors:
        for name, x in given.items():
            self.given[name].copy_(x, non_blocking=True)
        self.graph.replay()
        return {name: x.clone() for name, x in self.found.items()}  # the next call overwrites them


class Recorded:
    """`work` from named tensors to named tensors; as it is where there is no CUDA device, or `wanted` is false.

    `uses` says what it reads or changes beside them. A tensor that has moved makes its recordings void. Work must not
    wait for the device or draw random numbers there; if it does, a warning says so and it goes on unrecorded.
    """

    def __init__(
        self, work: Callable[[Tensors], Tensors], uses: Callable[[], Iterable[Tensor]], wanted: bool = True
    ) -> None:
        self._work, self._uses, self._wanted = work, uses, wanted
        self._recordings: dict[Any, _Recording] = {}
        self._seen: Counter[Any] = Counter()
        self._places: tuple[int, ...] = ()

    def __call__(self, given: Tensors | None = None) -> Tensors:
        """What the work finds."""
        given, uses = given or {}, list(self._uses())
        if not self._wanted or not uses or not uses[0].is_cuda:
            return self._work(given)
        self._expect_in_place(uses)
        key = tuple((name, x.shape, x.dtype) for name, x in given.items())
        if key not in self._recordings:
            self._seen[key] += 1
            if self._seen[key] <= PLAIN or len(self._recordings) == MOST:
                return self._work(given)
            recording = self._record(given, uses[0].device)
            if recording is None:
                self._wanted = False
                self._recordings.clear()  # nobody plays them any more, and they hold memory
                return self._work(given)
            self._recordings[key] = recording
        return self._recordings[key].play(given)

    def __len__(self) -> int:
        """Recordings that it has."""
        return len(self._recordings)

    def _expect_in_place(self, uses: Iterable[Tensor]) -> None:
        places = tuple(x.data_ptr() for x in uses)
        if places != self._places:
            self._recordings.clear()
            self._seen.clear()
            self._places = places

    def _record(self, given: Tensors, device: torch.device) -> _Recording | None:
        kept = {name: x.clone() for name, x in given.items()}
        # The work's device need not be the current one, and what runs elsewhere than on `stream` is not recorded.
        graph, current, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        torch.cuda.empty_cache()  # a recording cannot have what plain calls left, and cannot ask for it meanwhile
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    found = self._work(kept)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            warnings.warn(f"goes on without CUDA graphs, which could not be recorded: {line(error)}", stacklevel=2)
            return None
        current.wait_stream(stream)
        return _Recording(graph, kept, found)
