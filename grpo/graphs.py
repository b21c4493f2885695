"""Work of fixed shapes, captured once as a CUDA graph and replayed: one launch instead of hundreds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo.errors import line, warn

T = TypeVar("T")
Tensors = dict[str, Tensor]

PLAIN = 2
"""Calls with the same shapes before they are worth a capture; libraries set themselves up in them."""
MOST = 4
"""Graphs that are kept: each holds all memory that its work needs."""


def capture(
    work: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None, warm_up: bool = False
) -> tuple[torch.cuda.CUDAGraph, T]:
    """What `work` does on the stream, as a graph, and where that leaves its results; `warm_up`: it is done once before.

    Not torch.cuda.graph, which collects garbage and empties the allocator's cache every time.
    """
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        if warm_up:
            work()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            found = work()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph, found


@dataclass(frozen=True)
class CapturedGraph:
    """A graph with the tensors it works on."""

    graph: torch.cuda.CUDAGraph
    given: Tensors
    """Where it reads …"""
    found: Tensors
    """… and where it leaves what it found."""

    def replay(self, given: Tensors) -> Tensors:
        """The work, once more, on these."""
        for name, x in given.items():
            self.given[name].copy_(x, non_blocking=True)
        self.graph.replay()
        return {name: x.clone() for name, x in self.found.items()}  # the next call overwrites them


class GraphedCallable:
    """`work` from named tensors to named tensors; as it is where there is no CUDA device, or `wanted` is false.

    `uses` says what it reads or changes beside them. A tensor that has moved makes its graphs void. Work must not wait
    for the device or draw random numbers there; if it does, a warning says so and it goes on without a graph.
    """

    def __init__(
        self, work: Callable[[Tensors], Tensors], uses: Callable[[], Iterable[Tensor]], wanted: bool = True
    ) -> None:
        self._work, self._uses, self._wanted = work, uses, wanted
        self._graphs: dict[Any, CapturedGraph] = {}
        self._seen: Counter[Any] = Counter()
        self._places: tuple[int, ...] = ()

    def __call__(self, given: Tensors | None = None) -> Tensors:
        """What the work finds."""
        given = given or {}
        if not self._wanted or not self._on_cuda():
            return self._work(given)
        uses = list(self._uses())
        self._expect_in_place(uses)
        key = tuple((name, x.shape, x.dtype) for name, x in given.items())
        if key not in self._graphs:
            self._seen[key] += 1
            if self._seen[key] <= PLAIN or len(self._graphs) == MOST:
                return self._work(given)
            captured = self._captured(given, uses[0].device)
            if captured is None:
                self._wanted = False
                self._graphs.clear()  # nobody replays them any more, and they hold memory
                return self._work(given)
            self._graphs[key] = captured
        return self._graphs[key].replay(given)

    def __len__(self) -> int:
        """Graphs that it has."""
        return len(self._graphs)

    def _on_cuda(self) -> bool:
        """By the first tensor in use: listing all of them takes longer than some of the work."""
        first = next(iter(self._uses()), None)
        return first is not None and first.is_cuda

    def _expect_in_place(self, uses: Iterable[Tensor]) -> None:
        places = tuple(x.data_ptr() for x in uses)
        if places != self._places:
            self._graphs.clear()
            self._seen.clear()
            self._places = places

    def _captured(self, given: Tensors, device: torch.device) -> CapturedGraph | None:
        """The work as a graph that reads copies of `given`; None: it cannot be captured."""
        kept = {name: x.clone() for name, x in given.items()}
        # The work's device need not be the current one, and what runs elsewhere than on the stream is not captured.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()  # a capture cannot have what plain calls left, and cannot ask for it meanwhile
        try:
            graph, found = capture(lambda: self._work(kept), stream)
        except RuntimeError as error:
            warn(f"goes on without CUDA graphs, which could not be captured: {line(error)}")
            return None
        return CapturedGraph(graph, kept, found)
