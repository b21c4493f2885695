"""The ranks of a run over torch.distributed.

    ranks = join()                                      who is there: torchrun's variables say (RANK, WORLD_SIZE, …)
    ranks.rank, ranks.size, ranks.chief
    ranks.gather(State(values, arrays), "collect")      records and words: over gloo, through the CPU
    ranks.sum([p.grad for p in …], "gradients")         tensors: over nccl where each rank has a GPU of its own

Everything the run says to other ranks goes through these calls, and so do all uses of torch.distributed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo.distributed.facts import versions
from grpo.distributed.meeting import WAITS, Meeting, meet
from grpo.distributed.places import Place, found
from grpo.distributed.wire import packed, unpacked
from grpo.errors import ConfigError, RanksLost, line
from grpo.protocols import State
from grpo.rollouts import by_cost

PATIENCE = 1800.0
"""Seconds that a rank waits for others, whose rewards or environments may take long. GRPO_RANKS_TIMEOUT sets it."""
BUCKET = 1 << 26
"""Numbers that are summed at a time: one flat copy of this size, not one of all gradients."""

STARTING = 600.0
"""Seconds that a rank waits for others to be started, at most."""
TIMEOUT, SHARED_GPU = "GRPO_RANKS_TIMEOUT", "GRPO_SHARED_GPU"
"""Variables: the flags --rank-timeout and --shared-gpu set them, and a script's caller may."""

_meeting: Meeting | None = None
_joined: Group | None = None


class Group:
    """This process's place among the ranks."""

    def __init__(self, words: Any, tensors: Any, meeting: Meeting | None = None, patience: float = PATIENCE) -> None:
        """words: a gloo group for records; tensors: a group that sums where the gradients are.

        meeting: is told what this rank waits for, so that whoever waits too long can say for whom; patience: seconds
        until it has waited too long.
        """
        self._words, self._tensors, self._meeting, self._patience = words, tensors, meeting, patience
        self.rank, self.size = dist.get_rank(words), dist.get_world_size(words)
        self.chief = self.rank == 0
        self._latest: Any = None
        """The last collective, see `_call`."""

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

    @property
    def tensors(self) -> Any:
        """The group that sums where the gradients are, for what PyTorch itself sends between ranks."""
        return self._tensors

    def onto(self, tensor: torch.Tensor, owner: int, what: str) -> None:
        """In place, the sum over all ranks on the owner; what others then have means nothing."""
        group = self._tensors if tensor.is_cuda else self._words
        self._call(what, dist.reduce, tensor, dist.get_global_rank(group, owner), group=group)

    def sent(self, tensor: torch.Tensor, owner: int, what: str) -> None:
        """In place, the owner's on every rank."""
        group = self._tensors if tensor.is_cuda else self._words
        self._call(what, dist.broadcast, tensor, dist.get_global_rank(group, owner), group=group)

    def _call(self, what: str, collective: Any, *args: Any, **kwargs: Any) -> None:
        """One collective; where it fails nobody can be relied on any more."""
        self._say(f"{WAITS}{what}")
        began = time.monotonic()
        try:
            work = collective(*args, async_op=True, **kwargs)
            if work is not None:
                work.wait()
        except (RuntimeError, ValueError) as error:
            raise self.lost(what, time.monotonic() - began, error) from error
        # A thread of gloo's lets go of it after the call. Were it the last to, then at the end of the process it would
        # want Python, which is gone, to put tensors away, and abort.
        self._latest = work if kwargs["group"] is self._words else None
        self._say(f"past {what}")

    def _say(self, phase: str) -> None:
        if self._meeting is not None:
            self._meeting.say(phase)

    def lost(self, what: str, waited: float, error: Exception) -> RanksLost:
        """What is raised where a collective fails: who is missed, and where they are instead."""
        cut = waited < self._patience / 2
        why = line(error) if self._meeting is None else self._meeting.blame(what, cut)
        return RanksLost(
            f"rank {self.rank} lost the others after {waited:.0f} s: {why}. What ended or held up that rank is in its "
            "own output; a slow one needs a larger --rank-timeout. Go on from the last checkpoint"
        )


def patience_here() -> float:
    """Seconds that a rank waits for others at any one call."""
    said = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(said or PATIENCE)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise ConfigError(f"{TIMEOUT}={said!r} (--rank-timeout) must be a number of seconds above 0")
    return seconds


def shares_gpu() -> bool:
    """Whether ranks may share a GPU."""
    return os.environ.get(SHARED_GPU, "") not in ("", "0")


def arrived() -> Meeting | None:
    """Where this process meets the other ranks, once it has come."""
    return _meeting


def arrive() -> Meeting:
    """Where the ranks of this process's job meet; a second call gives the same."""
    global _meeting
    if _meeting is None:
        place = found(os.environ)
        if not isinstance(place, Place):
            raise ConfigError("this process is one of several that nobody has started as ranks; start it by torchrun")
        if torch.cuda.is_available():
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        _meeting = meet(place, min(STARTING, patience_here()))
    return _meeting


def join(patience: float | None = None) -> Group:
    """This process among the ranks of its job; a second call gives the same.

    The environment says who and where (torchrun's variables, srun's, …: `grpo.distributed.places`), unless
    torch.distributed is initialised already. patience: seconds to wait for others at any one call.
    """
    global _joined
    if _joined is None:
        patience = patience_here() if patience is None else patience
        limit = timedelta(seconds=patience)
        if dist.is_initialized():
            words = dist.new_group(backend="gloo", timeout=limit)
            _joined = Group(words, words, patience=patience)
            return _joined
        meeting, shared = arrive(), shares_gpu()
        cards = meeting.agree(versions(), shared)
        dist.init_process_group("gloo", store=meeting.store, rank=meeting.rank, world_size=meeting.ranks, timeout=limit)
        words = tensors = dist.group.WORLD
        sharing = [card["gpu"] for card in cards].count(cards[meeting.rank]["gpu"])
        if torch.cuda.is_available() and sharing > 1:
            torch.cuda.set_per_process_memory_fraction(1 / sharing)  # what does not fit is made smaller here, not there
        if all(card["gpu"] for card in cards) and not shared:
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a time-out is an error here, not an abort
            tensors = dist.new_group(backend="nccl", timeout=limit)
        _joined = Group(words, tensors, meeting, patience)
    return _joined


def excuse(why: str) -> str:
    """Tell the other ranks, where there are any, that this one cannot go on; its name, to begin a line with."""
    if _meeting is None:
        return ""
    _meeting.excuse(why)
    return f"rank {_meeting.rank}: "


def leave(lost: bool = False) -> None:
    """Take this process out of the job; nothing happens where it is in none.

    The others wait for the chief, who may still be saving: torchrun ends all once one has ended badly. lost: nobody is
    waited for any more.
    """
    global _joined, _meeting
    joined, meeting, _joined, _meeting = _joined, _meeting, None, None
    if meeting is not None and not lost:
        meeting.end()
    if joined is not None and not lost:
        dist.destroy_process_group()
    if meeting is not None:
        meeting.leave()


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one type on one device, at most `BUCKET` numbers each unless one alone has more."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    for alike in kinds.values():
        sizes = [x.numel() for x in alike]
        for rows in by_cost(sizes, BUCKET):
            yield [alike[row] for row in rows]
