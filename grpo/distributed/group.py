"""The ranks of a run over torch.distributed.

    ranks = join()                                      who is there: torchrun's variables say (RANK, WORLD_SIZE, …)
    ranks.rank, ranks.size, ranks.chief
    ranks.gather(State(values, arrays), "collect")      records and words: over gloo, through the CPU
    ranks.sum([p.grad for p in …], "gradients")         tensors: over nccl where each rank has a GPU of its own

Everything the run says to other ranks goes through these calls, and so do all uses of torch.distributed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo.distributed.wire import packed, unpacked
from grpo.errors import RanksLost, line
from grpo.protocols import State
from grpo.rollouts import by_cost

PATIENCE = 1800.0
"""Seconds that a rank waits for others, whose rewards or environments may take long. GRPO_RANKS_TIMEOUT sets it."""
BUCKET = 1 << 26
"""Numbers that are summed at a time: one flat copy of this size, not one of all gradients."""

_joined: Group | None = None


class Group:
    """This process's place among the ranks."""

    def __init__(self, words: Any, tensors: Any) -> None:
        """words: a gloo group for records; tensors: one that sums what is on a GPU."""
        self._words, self._tensors = words, tensors
        self.rank, self.size = dist.get_rank(words), dist.get_world_size(words)
        self.chief = self.rank == 0

    def gather(self, mine: State, what: str) -> list[State]:
        """What each rank gives, in the order of ranks."""
        own = packed(mine)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._call(what, dist.all_gather, lengths, torch.tensor([len(own)]), group=self._words)
        most = max(int(length) for length in lengths)
        found = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        whole = torch.nn.functional.pad(own, (0, most - len(own)))
        self._call(what, dist.all_gather, found, whole, group=self._words)
        return [unpacked(x[: int(length)]) for x, length in zip(found, lengths, strict=True)]

    def broadcast(self, chiefs: State | None, what: str) -> State:
        """What the chief gives."""
        own = packed(chiefs) if chiefs is not None else torch.zeros(0, dtype=torch.uint8)
        length = torch.tensor([len(own)])
        chief = dist.get_global_rank(self._words, 0)
        self._call(what, dist.broadcast, length, chief, group=self._words)
        found = own if self.chief else torch.empty(int(length), dtype=torch.uint8)
        for some in torch.split(found, BUCKET):
            self._call(what, dist.broadcast, some, chief, group=self._words)
        return unpacked(found)

    @torch.no_grad()
    def sum(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Sums over all ranks, in place: flat, a bucket after the other. bfloat16 is summed as float32."""
        for some in _buckets(tensors):
            wide = torch.float32 if some[0].dtype in (torch.bfloat16, torch.float16) else some[0].dtype
            flat = torch.cat([x.reshape(-1).to(wide) for x in some])
            self._call(what, dist.all_reduce, flat, group=self._tensors if flat.is_cuda else self._words)
            for x, total in zip(some, torch.split(flat, [x.numel() for x in some]), strict=True):
                x.copy_(total.view(x.shape))

    def _call(self, what: str, collective: Any, *args: Any, **kwargs: Any) -> None:
        """One collective; where it fails nobody can be relied on any more."""
        try:
            collective(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            raise RanksLost(
                f"rank {self.rank} lost the others at {what} ({line(error)}); the one that ended first says why. Go "
                "on from the last checkpoint"
            ) from error


def join(patience: float | None = None) -> Group:
    """This process among the ranks of its job; a second call gives the same.

    The environment says who and where (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun sets them),
    unless torch.distributed is initialised already. patience: seconds to wait for others at any one call.
    """
    global _joined
    if _joined is None:
        seconds = float(os.environ.get("GRPO_RANKS_TIMEOUT", PATIENCE)) if patience is None else patience
        limit = timedelta(seconds=seconds)
        if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if dist.is_initialized():
            words = dist.new_group(backend="gloo", timeout=limit)
        else:
            dist.init_process_group("gloo", timeout=limit)
            words = dist.group.WORLD
        _joined = Group(words, words)
        if _gpus_of_their_own(_joined):
            _joined = Group(words, dist.new_group(backend="nccl", timeout=limit))
    return _joined


def leave() -> None:
    """Take this process out of the job; nothing happens where it is in none."""
    global _joined
    if _joined is not None:
        _joined = None
        dist.destroy_process_group()


def _gpus_of_their_own(ranks: Group) -> bool:
    """Whether every rank computes on a GPU that no other has; NCCL refuses to share one."""
    mine = [socket.gethostname(), torch.cuda.current_device()] if torch.cuda.is_available() else None
    places = [state.values["place"] for state in ranks.gather(State({"place": mine}, {}), "joining")]
    return None not in places and len({tuple(place) for place in places}) == len(places)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one type on one device, at most `BUCKET` numbers each unless one alone has more."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    for alike in kinds.values():
        sizes = [x.numel() for x in alike]
        for rows in by_cost(sizes, BUCKET):
            yield [alike[row] for row in rows]
