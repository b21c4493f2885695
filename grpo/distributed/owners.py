"""Each parameter's optimizer state, and then its gradient too, with one rank: `--shard states`, `--shard gradients`.

    weights     whole on every rank, at addresses that stay: captured graphs and hand-written layers keep them
    gradients   states: summed on every rank · gradients: each pass's are summed onto the owner as the backward pass
                makes them, and let go of everywhere else
    states      made where a gradient is: on the owner alone, because only it shows its gradients to the optimizer
    step        owners move their own, then every parameter is sent from its owner

Any optimizer will do that makes its state for a parameter when it first sees a gradient of it, as PyTorch's do. A
checkpoint has everything, in the order and form of one process.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo.errors import RankFailed
from grpo.protocols import Ranks, State
from grpo.shards import Again, Unsharded

BUCKET = 1 << 26
"""Numbers that travel at a time; those of bfloat16 are summed as float32."""


class Crew(Ranks, Protocol):
    """Ranks that can also send one tensor to one of them, and from one to all."""

    def onto(self, tensor: Tensor, owner: int, what: str) -> None:
        """In place, the sum over all ranks on the owner; what others then have means nothing."""
        ...

    def sent(self, tensor: Tensor, owner: int, what: str) -> None:
        """In place, the owner's on every rank."""
        ...


def owned(sizes: Sequence[int], ranks: int) -> list[int]:
    """An owner for each of some tensors, so that all own about as much: the largest first, to whoever has least."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + sizes[number], rank))
    return owners


def made(kind: str, ranks: Crew, parameters: Mapping[str, Tensor]) -> StateOwners:
    """What `--shard` names."""
    return {"states": StateOwners, "gradients": GradientOwners}[kind](ranks, parameters)


class StateOwners(Unsharded):
    """`--shard states`: gradients are whole everywhere, each parameter is moved by its owner."""

    def __init__(self, ranks: Crew, parameters: Mapping[str, Tensor]) -> None:
        """parameters: what is trained; the same tensor under two names (a tied head) has one owner."""
        self._ranks = ranks
        own = {id(p): p for p in parameters.values() if p.requires_grad}
        self._tensors = list(own.values())
        owners = owned([p.numel() for p in self._tensors], ranks.size)
        self.owner = dict(zip(self._tensors, owners, strict=True))
        """Of each parameter."""

    def mine(self, p: Tensor) -> bool:
        """Whether this rank owns it."""
        return self.owner[p] == self._ranks.rank

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Owners move their own; then everybody gets it. What has no gradient anywhere is not sent."""
        moves = [p for p in self._tensors if self._moves(p)]
        for p in moves:
            if not self.mine(p):
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p in moves:
                for some in torch.split(_flat(p), BUCKET):
                    self._ranks.sent(some, self.owner[p], "the weights")

    def _moves(self, p: Tensor) -> bool:
        return p.grad is not None

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Everybody's, on the chief in its CPU's memory: one tensor after the other, from its owner."""
        found = optimizer.state_dict()
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        here = {number: found["state"][number] for number, p in enumerate(tensors) if self._has(found, number, p)}
        told = self._ranks.gather(State({str(n): _described(entry) for n, entry in here.items()}, {}), "the states")
        whole: dict[int, dict[str, Any]] = {}
        for number, p in enumerate(tensors):
            if p not in self.owner:  # it is not trained, whatever the optimizer holds
                continue
            described = told[self.owner[p]].values.get(str(number))
            if described is not None:
                whole[number] = {
                    name: self._kept(here.get(number, {}).get(name), shape, p) if isinstance(shape, dict) else shape
                    for name, shape in described.items()
                }
        return {**found, "state": whole}

    def _has(self, found: Mapping[str, Any], number: int, p: Tensor) -> bool:
        return number in found["state"] and p in self.owner and self.mine(p)

    def _kept(self, tensor: Tensor | None, shape: Mapping[str, Any], p: Tensor) -> Tensor | None:
        """One tensor of a state on the chief; the others only help to send it."""
        kind, on_cpu = getattr(torch, shape["dtype"]), shape["cpu"] or p.device.type == "cpu"
        sent = (
            torch.empty(shape["shape"], dtype=kind, device="cpu" if on_cpu else p.device) if tensor is None else tensor
        )
        sent = sent.to(p.device) if on_cpu and p.device.type != "cpu" else sent
        for some in torch.split(_flat(sent), BUCKET):
            self._ranks.sent(some, self.owner[p], "the states")
        return sent.cpu().clone() if self._ranks.chief else None

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Only what this rank owns is kept."""
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        own = {
            number: entry
            for number, entry in state["state"].items()
            if tensors[number] in self.owner and self.mine(tensors[number])
        }
        optimizer.load_state_dict({**state, "state": own})


class GradientOwners(StateOwners):
    """`--shard gradients`: each pass's gradients are summed onto their owners while they are made.

    The only collectives in the middle of passes beside those of FSDP2. They come in one order on every rank, that of
    the parameters backwards, whatever the order in which they are made. A rank that has no pass sends nothing but
    zeros, so that the number of passes need not be the same.
    """

    def __init__(self, ranks: Crew, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(ranks, parameters)
        self._order = list(reversed(self._tensors))
        self._made: dict[Tensor, Tensor] = {}
        """Gradients of this pass that wait for their turn."""
        self._next = len(self._order)
        self._sums: dict[Tensor, Tensor] = {}
        """Of the passes so far, where this rank is the owner."""
        self._seen: set[Tensor] = set()
        self._moved: set[Tensor] = set()
        for p in self._tensors:
            p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def backward(self, loss: Tensor) -> None:
        """One pass, of which everybody is told first."""
        self._meet(passes=1)
        self._next = 0
        try:
            torch.autograd.backward(loss)
        finally:  # also after a failure: the others wait for the rest
            self._send(whole=True)

    def finish(self) -> None:
        """Take part in what others still have to do."""
        while self._meet():
            self._next = 0
            self._send(whole=True)

    def restart(self) -> None:
        """Tell everybody to begin anew."""
        try:
            self._meet(restarts=1)
        except Again:
            return

    def fail(self) -> None:
        """Tell everybody that no more comes from here."""
        try:
            self._meet(failures=1)
        except (Again, RankFailed):
            return

    def _meet(self, passes: int = 0, restarts: int = 0, failures: int = 0) -> bool:
        """Whether some rank has a pass now."""
        said = torch.tensor([passes, restarts, failures], dtype=torch.int64, device=self._device)
        self._ranks.sum([said], "the next pass")
        passes, restarts, failures = said.tolist()
        if restarts or failures:
            self._forget()
        if failures:
            raise RankFailed("another rank failed in a pass; it says why")
        if restarts:
            raise Again
        return bool(passes)

    @property
    def _device(self) -> torch.device:
        return self._tensors[0].device if self._tensors else torch.device("cpu")

    def _arrived(self, p: Tensor) -> None:
        """A gradient is complete: it goes on once its turn has come."""
        if self._next >= len(self._order):  # a backward pass of somebody else's: a warm start, say
            return
        assert p.grad is not None
        self._made[p], p.grad = p.grad, None
        self._seen.add(p)
        self._send()

    @torch.no_grad()
    def _send(self, whole: bool = False) -> None:
        """Whatever can be sent in order; whole: the rest too, zeros where there is no gradient."""
        while self._next < len(self._order) and (whole or self._order[self._next] in self._made):
            p = self._order[self._next]
            self._next += 1
            grad = self._made.pop(p, None)
            if self.mine(p) and p not in self._sums:
                self._sums[p] = torch.zeros_like(p)
            total = torch.split(_flat(self._sums[p]), BUCKET) if self.mine(p) else None
            rows = None if grad is None else torch.split(grad.reshape(-1), BUCKET)
            for number, size in enumerate(_sizes(p.numel())):
                wide = _zeros(size, p) if rows is None else rows[number].to(_wide(p.dtype), copy=True)
                self._ranks.onto(wide, self.owner[p], "a gradient")
                if total is not None:
                    total[number].add_(wide)

    def moved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Those that a pass of this rank gave a gradient."""
        return [name for name, p in parameters.items() if p in self._seen]

    def settle(self, ranks: Ranks, parameters: Mapping[str, Tensor], moved: set[str]) -> None:
        """Owners show theirs; the sums are there already."""
        self._moved = {p for name, p in parameters.items() if name in moved}
        for p in parameters.values():
            p.grad = self._sums.pop(p, None) if p in self._moved else None
        self._forget()

    def _forget(self) -> None:
        self._sums.clear()
        self._made.clear()
        self._seen.clear()

    def _moves(self, p: Tensor) -> bool:
        return p in self._moved

    def norm(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """From every owner's own, in the order of ranks: the same number everywhere."""
        if not self._moved:
            return None
        grads = [p.grad for p in parameters if p.grad is not None]
        own = float(torch.nn.utils.get_total_norm(grads).double()) if grads else 0.0
        told = self._ranks.gather(State({"norm": own}, {}), "the norm")
        total = sum(float(state.values["norm"]) ** 2 for state in told) ** 0.5
        return torch.tensor(total, dtype=torch.float64 if _double(grads) else torch.float32, device=self._device)


def _described(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A state without its tensors' contents."""
    return {name: _shape(value) if isinstance(value, Tensor) else value for name, value in entry.items()}


def _shape(x: Tensor) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."), "cpu": x.device.type == "cpu"}


def _flat(x: Tensor) -> Tensor:
    """The same memory as one row; what does not lie in one piece cannot be sent in place."""
    return x.detach().view(-1)


def _sizes(numbers: int) -> list[int]:
    """Of the pieces in which so many numbers travel, as `split` cuts them."""
    return [min(BUCKET, numbers - first) for first in range(0, numbers, BUCKET)] or [0]


def _zeros(size: int, p: Tensor) -> Tensor:
    return torch.zeros(size, dtype=_wide(p.dtype), device=p.device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _double(grads: Sequence[Tensor]) -> bool:
    return any(grad.dtype == torch.float64 for grad in grads)
