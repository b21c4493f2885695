"""What a step may take of a GPU: a limit that is kept, the tokens of a pass, and what each layer keeps of them.

A pass is as small as it can be without costing time, not as large as memory allows: of all ways to cut a step into
passes and to keep less of them, the one with the least memory is taken among those that take hardly longer than the
fastest (`choose`). What a plan shows before anything is loaded (`language.planning`) is chosen by the same
functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from grpo.config import ConfigError
from grpo.language.planning.gpus import GPU, GPUS, gpu_called
from grpo.language.scoring.decoder_layout import HOSTED, KEEP
from grpo.language.scoring.dense import LONG

TILE_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Size of the float32 logits of one tile. On a CPU above the size from which memory goes back to the system at once."""
MLP_TILE = 512 * 2**20
"""Of gate and up of a tile of tokens, where they are not kept: from there on products are no faster with more."""
FORWARD = 32_768
"""Tokens of a pass without gradient, which keeps nothing: at most."""
SLOWER = 0.1
"""How much longer than by the fastest way that fits gradients may take, where that saves memory."""
AMPLE = 0.1
"""Of a GPU's memory, what a pass may take where that saves any time."""
IN_PIECES = 0.9
"""Of the memory that is free, what can be counted on: the rest lies between pieces."""
GIVEN_BACK = 2**30
"""Bytes of keys and values from which on they are given back between rollouts; less is kept."""
CONTEXT = 800 * 2**20
"""Bytes that CUDA and the kernels themselves take of a GPU, outside of torch's sight."""
AGAIN = {"everything": 0.0, "attention": 0.09, "input": 0.21, "host": 0.17}
"""Time that computing again takes where less is kept, as a share of the products' without."""
ATTENDED_AGAIN = {"input": 1 / 3.5}
"""The same of attention's."""
ATTENTION, LONG_ATTENTION = 0.47, 0.8
"""Of the rate of a large product, what attention's kernels reach: with segments below `dense.LONG`, and from there on.
"""
HOST_BYTES = 25e9
"""That go to the host, or come from there, in a second."""
PASS_BYTES = 44
"""Bytes that a pass moves for each trained weight, however few its tokens are: rounding it, adding to its gradient."""
PASS_LAYER = 3.2e-3
"""Seconds a layer until the host has launched its kernels, forward and back: no pass is faster."""


class Costs(Protocol):
    """What a pass takes of the GPU, in bytes a token; memory on the host (offloaded inputs) does not count.

    Layers say it of themselves, a plan says it of a model that is not loaded: both add up `LayerSizes`, so that what
    is planned is what is taken. Whoever lets a layer keep more, less or elsewhere changes it there.
    """

    def kept_bytes(self, keep: str) -> int:
        """Of all layers together, until the backward pass has come by; `keep` is one of `decoder_layout.KEEP`."""
        ...

    def hosted_bytes(self) -> int:
        """Of all layers together, in the host's memory where `keep` is `host`."""
        ...

    def passing_bytes(self, tokens: float, keep: str) -> int:
        """While one layer's backward pass is computed, the widest layer's, in a pass of so many tokens."""
        ...


@dataclass(frozen=True)
class LayerSizes:
    """One layer by its sizes alone: what of each token it keeps, and what passes through it."""

    width: int
    inner: int
    """Of the MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    wide: int
    """Bytes of a number that goes from layer to layer: the weights' own type."""
    low: int
    """Bytes of a number in the type that is computed in."""

    def hosted(self, keep: str) -> int:
        """Bytes a token in the host's memory; on the GPU, as long as the layer or a neighbour of it is computed."""
        found = 4 * self.heads + self.heads * self.head_dim * self.low if keep == "host" else 0
        return self.width * self.wide + found if keep in HOSTED else 0

    def kept(self, keep: str) -> int:
        """Bytes a token until the backward pass has come by."""
        if keep in HOSTED:
            return 0
        total = self.width * self.wide
        if keep != "input":  # what lies between the halves, queries, keys, values, what is found, log-sum-exps
            total += self.width * self.wide + 2 * (self.heads + self.kv_heads) * self.head_dim * self.low
            total += 4 * self.heads
        if keep == "everything":  # gate and up
            total += 2 * self.inner * self.low
        return total

    def passing(self, tokens: float, keep: str) -> int:
        """Bytes a token while its backward pass is computed, in a pass of so many tokens."""
        return max(self._through_mlp(tokens, keep), self._through_attention(keep))

    def _through_mlp(self, tokens: float, keep: str) -> int:
        mlp = 4 * self.inner * self.low  # the gate's result, its gradient, those of gate and up
        around = self.width * (2 * self.wide + self.low)
        if keep == "everything":
            return mlp + around
        both = 2 * self.inner * self.low
        around += self._recomputed(keep) + (0 if keep == "attention" else self.width * self.wide)
        return around + int((mlp + both) * min(MLP_TILE / (both * max(tokens, 1)), 1))

    def _through_attention(self, keep: str) -> int:
        """Gradients of what is found, of queries, keys and values, of their products; sums in float32; those again."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        low = 4 * q + 3 * kv + (2 * q if self.heads != self.kv_heads else 0)
        around = self.width * (2 * self.wide + (self.low if self.low != self.wide else 0))
        return around + low * self.low + 4 * q + self._recomputed(keep)

    def _recomputed(self, keep: str) -> int:
        """Queries, keys and values, and what attention finds, where they were not kept."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if keep in ("everything", "attention"):
            return 0
        return (q + 2 * kv + (0 if keep == "host" else q)) * self.low


@dataclass(frozen=True)
class Rows:
    """What there is to learn from, on average: groups of completions that share a prompt."""

    groups: int
    group: float
    """Completions of a prompt."""
    prompt: float
    completion: float
    """Tokens of each."""

    @property
    def block(self) -> float:
        """Tokens of a prompt with all its completions."""
        return self.prompt + self.group * self.completion

    @property
    def tokens(self) -> float:
        """All that are computed where no group is cut."""
        return self.groups * self.block

    @property
    def pairs(self) -> float:
        """Tokens that see each other: below the diagonal, and completions their prompt."""
        seen = self.prompt**2 / 2 + self.group * self.completion * (self.prompt + self.completion / 2)
        return self.groups * seen

    @property
    def attention_share(self) -> float:
        """Of the rate of a large product, what attention's kernels reach with these."""
        return LONG_ATTENTION if self.completion >= LONG else ATTENTION


@dataclass(frozen=True)
class Way:
    """A step cut into passes."""

    tokens: int
    """Of a pass."""
    keep: str
    passes: int
    bytes: int
    """That a pass takes for what is kept of it, and what passes through a layer."""
    time: float
    """Of the gradients, where 1 is all tokens' products, nothing computed again, and passes that cost nothing."""


@dataclass(frozen=True)
class Pace:
    """What passes cost beside their tokens' products, in tokens that could be computed meanwhile."""

    fixed: float
    """Of each pass, for the weights."""
    least: float
    """That a pass takes at least, until the host has launched it."""
    pair: float = 0.0
    """Of two tokens that see each other, where attention is as fast as products."""
    moved: float = 0.0
    """Of a byte that goes to the host: forward, where less is computed meanwhile than on the way back."""

    @classmethod
    def of(cls, weights: int, trained: int, layers: int, width: int, attended: int, gpu: GPU) -> Pace:
        """Of a model with so many weights, by its layers, their width, and that of all heads."""
        token = (4 * weights + 2 * trained) / (products_share(width) * gpu.flops_per_s)
        return cls(
            fixed=PASS_BYTES * trained / gpu.bytes_per_s / token,
            least=PASS_LAYER * layers / token,
            pair=3.5 * 4 * layers * attended / gpu.flops_per_s / token,
            moved=3 / HOST_BYTES / token,
        )


def products_share(width: int) -> float:
    """Of the rate of a large product, what those of layers of this width reach."""
    return 1.05 * width / (width + 650)


def ways(costs: Costs, rows: Rows, pace: Pace) -> list[Way]:
    """All that are looked at."""
    counts = {n for power in range(24) for n in (1 << power, 3 << power) if n < rows.groups} | {rows.groups}
    cuts = [(count * rows.block, -(-rows.groups // count)) for count in sorted(counts)]
    parts = {max(round(rows.group / 2**power), 1) for power in range(1, 12)} if rows.group > 1 else set()
    for part in sorted(parts):  # of one group: its prompt is computed again with each
        cuts.append((rows.prompt + part * rows.completion, rows.groups * math.ceil(rows.group / part)))
    found, attention = [], rows.pairs * pace.pair / rows.attention_share
    for tokens, passes in cuts:
        computed = max(passes * tokens, rows.tokens) if tokens < rows.block else rows.tokens
        for keep in AGAIN:
            size = math.ceil(tokens * (costs.kept_bytes(keep) + costs.passing_bytes(tokens, keep)))
            time = computed * (1 + AGAIN[keep]) + attention * (1 + ATTENDED_AGAIN.get(keep, 0.0)) + passes * pace.fixed
            moved = computed * costs.hosted_bytes() * pace.moved if keep == "host" else 0.0
            time = max(time, moved, passes * pace.least) / rows.tokens
            found.append(Way(math.ceil(tokens), keep, passes, size, time))
    return found


def choose(every: Sequence[Way], free: float, slower: float = SLOWER, ample: float = 0.0) -> Way:
    """The least memory that hardly takes longer than the fastest way; else the fastest that fits, or the leanest.

    ample: bytes below which nobody is thankful for less, so that the fastest of these ways is taken.
    """
    bar = (1 + slower) * min(way.time for way in every)
    fitting = [way for way in every if way.bytes <= free]
    quick = [way for way in fitting if way.time <= bar]
    if small := [way for way in quick if way.bytes <= ample]:
        return min(small, key=lambda way: (way.time, way.bytes))
    if quick or not fitting:
        return min(quick or every, key=lambda way: (way.bytes, way.time))
    return min(fitting, key=lambda way: (way.time, way.bytes))


# --- the GPU that is here -------------------------------------------------------------------------------------------

_limits: dict[int, int] = {}
"""Bytes that this process may take of a device, by its number; of the process, as torch's own limit is."""


def set_limit(device: torch.device, limit: int) -> None:
    """Take at most so many bytes of a GPU from now on; torch refuses more, what CUDA itself takes is counted in."""
    total = torch.cuda.get_device_properties(device).total_memory
    if limit > total:
        raise ConfigError(f"memory={limit / 2**30:.1f}GiB is more than the GPU has, {total / 2**30:.1f}; leave it out")
    if limit <= CONTEXT:
        raise ConfigError(f"memory={limit / 2**30:.2f}GiB: CUDA alone takes {CONTEXT / 2**30:.1f} of a GPU; give more")
    torch.cuda.set_per_process_memory_fraction((limit - CONTEXT) / total, device)
    _limits[_number(device)] = limit - CONTEXT


def _number(device: torch.device) -> int:
    return device.index if device.index not in (None, -1) else torch.cuda.current_device()


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken, those included that torch holds and nobody uses; within a limit, if there is one."""
    free, _ = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    found = free + torch.cuda.memory_reserved(device) - used
    return int(min(found, _limits.get(_number(device), math.inf) - used))


def gpu_here(device: torch.device) -> GPU:
    """What is known of the device; where nobody has looked up its rates, another's that are as far apart."""
    about = torch.cuda.get_device_properties(device)
    rates = GPUS["h200"]
    return gpu_called(about.name, about.total_memory) or GPU(
        about.name, about.total_memory, rates.bytes_per_s, rates.flops_per_s
    )


def tokens_without_gradient(costs: Costs, device: torch.device) -> int:
    """For log-probs alone."""
    return int(min(max(IN_PIECES * free_memory(device) / 2 / costs.passing_bytes(FORWARD, KEEP[-1]), 1), FORWARD))


def most_to_keep(layers: Costs, tokens: int, device: torch.device, most: str = KEEP[0]) -> str:
    """As much of a pass as there is memory for (`decoder_layout.KEEP`), `most` at most; else on the host."""
    free = IN_PIECES * free_memory(device) - 2 * TILE_BYTES["cuda"]
    levels = [*KEEP, HOSTED[0]]

    def fits(keep: str) -> bool:
        return tokens * (layers.kept_bytes(keep) + layers.passing_bytes(tokens, keep)) < free

    return next((keep for keep in levels[levels.index(most) :] if fits(keep)), HOSTED[0])
