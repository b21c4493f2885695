"""Before a long run: whether what ranks say to each other arrives, how fast, and what they do not share.

`grpo doctor --ranks 2` carries this out; every rank makes the same calls and finds the same.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from grpo.protocols import Ranks, State

NUMBERS = 1 << 24
"""float32 that are summed for the bandwidth: 64 MiB."""
TIMES = 5
CLOCKS = 1.0
"""Seconds that clocks may differ: beyond that, files of one machine look too new to another."""


@dataclass(frozen=True)
class Proof:
    """One thing that was tried."""

    what: str
    value: str
    sound: bool = True
    remedy: str = ""


def proofs(ranks: Ranks, cards: Sequence[Mapping[str, str]], folder: Path, numbers: int = NUMBERS) -> Iterator[Proof]:
    """Everything that is tried, in the order it is shown; cards: what each rank said of itself."""
    hosts = list(dict.fromkeys(card["host"] for card in cards))
    gpus = {card["gpu"] for card in cards if card["gpu"]}
    yield Proof("ranks", f"{ranks.size} on {len(hosts)} {'machine' if len(hosts) == 1 else 'machines'}")
    yield Proof("versions", f"equal: {', '.join(_versions(cards[0]))}")
    yield _gpus(len(cards), len(gpus))
    yield from _right(ranks)
    yield from _speed(ranks, numbers)
    yield _clocks(ranks)
    yield _files(ranks, folder)


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _versions(card: Mapping[str, str]) -> list[str]:
    named = {name.partition(" of ")[2]: value for name, value in card.items()}
    return [f"{name} {value}" for name, value in named.items() if name]


def _gpus(ranks: int, gpus: int) -> Proof:
    if not gpus:
        return Proof("GPUs", "none: ranks compute on the CPU")
    if gpus < ranks:
        return Proof("GPUs", f"{gpus} for {ranks} ranks (--shared-gpu): sums go through the CPU")
    return Proof("GPUs", "one for each rank, all different")


def _right(ranks: Ranks) -> Iterator[Proof]:
    """Sum, gather and broadcast of numbers whose result is known."""
    mine = torch.arange(1000, dtype=torch.float32, device=device()) * (ranks.rank + 1)
    ranks.sum([mine], "a sum")
    factor = ranks.size * (ranks.size + 1) / 2
    summed = torch.equal(mine.cpu(), torch.arange(1000, dtype=torch.float32) * factor)
    told = ranks.gather(State({"rank": ranks.rank}, {"x": torch.full((ranks.rank + 1,), ranks.rank)}), "a gather")
    gathered = all(
        state.values["rank"] == rank and torch.equal(state.arrays["x"], torch.full((rank + 1,), rank))
        for rank, state in enumerate(told)
    )
    chiefs = ranks.broadcast(State({}, {"x": torch.arange(77)}) if ranks.chief else None, "a broadcast")
    spread = torch.equal(chiefs.arrays["x"], torch.arange(77))
    remedy = "the network changes what is sent: update NCCL and drivers, or set NCCL_P2P_DISABLE=1 and try again"
    for what, right in (("sum", summed), ("gather", gathered), ("broadcast", spread)):
        everywhere = all(state.values["right"] for state in ranks.gather(State({"right": right}, {}), "comparing"))
        yield Proof(what, "right" if everywhere else "WRONG", everywhere, "" if everywhere else remedy)


def _speed(ranks: Ranks, numbers: int) -> Iterator[Proof]:
    """Of a small sum, which is latency, and of a large one, which is bandwidth; the slowest rank counts."""
    small, large = torch.ones(1, device=device()), torch.ones(numbers, device=device())
    latency = _slowest(ranks, lambda: ranks.sum([small], "a small sum"))
    seconds = _slowest(ranks, lambda: ranks.sum([large], "a large sum"))
    size = numbers * 4
    yield Proof("latency", f"{latency * 1e3:.2f} ms for a sum of one number")
    each = f"a model of 1 billion bfloat16 gradients would take {4e9 / (size / seconds):.2f} s"
    yield Proof("bandwidth", f"{size / seconds / 1e9:.2f} GB/s for a sum of {size / 2**20:.0f} MiB; {each}")


def _slowest(ranks: Ranks, call: Callable[[], None]) -> float:
    """The median of a few times, of the rank that took longest."""
    call()
    taken = []
    for _ in range(TIMES):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    told = ranks.gather(State({"seconds": median(taken)}, {}), "timing")
    return max(float(state.values["seconds"]) for state in told)


def _clocks(ranks: Ranks) -> Proof:
    """How far apart clocks are: at most what was seen at the closest of a few meetings."""
    spread = float("inf")
    for _ in range(TIMES):
        ranks.gather(State({}, {}), "the clocks")
        told = [state.values["time"] for state in ranks.gather(State({"time": time.time()}, {}), "the clocks")]
        spread = min(spread, max(told) - min(told))
    spread = float(
        ranks.broadcast(State({"spread": spread}, {}) if ranks.chief else None, "the clocks").values["spread"]
    )
    sound = spread < CLOCKS
    return Proof("clocks", f"within {spread:.3f} s of each other", sound, "" if sound else "set them by NTP (chrony)")


def _files(ranks: Ranks, folder: Path) -> Proof:
    """Whether all ranks see the folder that rank 0 would write runs to."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    token, trial = secrets.token_hex(8), place / f".grpo-{secrets.token_hex(8)}"
    try:
        if ranks.chief and os.access(place, os.W_OK):
            trial.write_text(token, encoding="utf-8")
        said = ranks.broadcast(State({"token": token, "path": str(trial)}, {}) if ranks.chief else None, "the files")
        here = _read(Path(said.values["path"])) == said.values["token"]
        seen = [state.values["here"] for state in ranks.gather(State({"here": here}, {}), "the files")]
    finally:
        if ranks.chief:
            trial.unlink(missing_ok=True)
    if all(seen):
        return Proof("run folder", f"{place} is shared by all ranks")
    if not seen[0]:
        return Proof("run folder", f"{place} cannot be written by rank 0", False, "choose another with --logdir")
    return Proof(
        "run folder",
        f"{place} is not shared: rank 0 alone writes it, which is enough; models and data must be everywhere",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
