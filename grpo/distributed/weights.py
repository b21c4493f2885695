"""`--shard weights`: FSDP2. Each rank keeps a part of every weight; a layer is gathered while it computes.

Gathering needs all ranks, and they do not have equally many passes: answers end sooner here, minibatches are smaller
there. So before each pass everybody is told of it, and a rank that has none left computes one token along, until all
have come to the next thing that they do together. Whatever is asked of the ranks waits for that first (`Company`).

A pass that a rank does not finish (it was out of memory) can be begun anew by nobody, for the others wait inside of it:
all ranks end, and each says which one it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo.agreement import of_the_network
from grpo.distributed.group import Group
from grpo.errors import ConfigError, PassUnfinished, RanksLost
from grpo.keeping import copy_into
from grpo.protocols import Ranks, State
from grpo.shards import Unsharded

SMALLER = "lower tokens_per_microbatch (where it samples: rows_per_generation), and go on from the last checkpoint"
"""What helps where nobody can begin a pass anew."""


class Company:
    """Ranks that compute along with each other before they exchange anything."""

    def __init__(self, ranks: Group, model: nn.Module, device: torch.device) -> None:
        """model: as `divided` has made it."""
        self._ranks, self._model, self._device = ranks, model, device
        self.rank, self.size, self.chief = ranks.rank, ranks.size, ranks.chief
        self._along, self._unfinished = False, False
        self._began = time.monotonic()
        model.register_forward_pre_hook(self._announce, prepend=True)
        model.register_forward_hook(self._ahead)

    def gather(self, mine: State, what: str) -> list[State]:
        """What each rank gives, once nobody has a pass left."""
        self._keep_company(what)
        return self._ranks.gather(mine, what)

    def broadcast(self, chiefs: State | None, what: str) -> State:
        """What the chief gives, once nobody has a pass left."""
        self._keep_company(what)
        return self._ranks.broadcast(chiefs, what)

    def sum(self, tensors: Sequence[Tensor], what: str) -> None:
        """Sums, once nobody has a pass left."""
        self._keep_company(what)
        self._ranks.sum(tensors, what)

    def _announce(self, module: nn.Module, given: Any) -> None:
        """Before a pass of this rank."""
        if self._along:
            return
        self._expect_finished("the next pass")
        self._meet(1)
        self._unfinished, self._began = True, time.monotonic()

    def _ahead(self, module: nn.Module, given: Any, out: Any) -> None:
        """After one; where it is differentiated, the others wait for that, too."""
        if not self._along and not torch.is_grad_enabled():
            self._unfinished = False

    def differentiated(self) -> None:
        """A pass is over, and so is its way back."""
        self._unfinished = False

    def _expect_finished(self, what: str) -> None:
        """Nothing can be exchanged in the middle of a pass that this rank could not finish."""
        if self._unfinished:
            waited = time.monotonic() - self._began
            raise PassUnfinished(what, SMALLER, self._ranks.lost(what, waited, RuntimeError("a pass was not finished")))

    def lose(self, what: str, error: Exception) -> NoReturn:
        """End here, and say because of whom."""
        raise self._ranks.lost(what, time.monotonic() - self._began, error) from error

    @contextmanager
    def heard(self, what: str) -> Iterator[None]:
        """Where PyTorch itself talks to the ranks: one that is gone is named as everywhere."""
        self._began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not of_the_network(error):
                raise
            self.lose(what, error)

    def _meet(self, passes: int) -> tuple[bool, bool]:
        """Whether some rank has a pass now, and whether it has a backward pass, too."""
        said = torch.tensor([passes, passes * torch.is_grad_enabled()], dtype=torch.int64, device=self._device)
        self._ranks.sum([said], "the next pass")
        return bool(said[0]), bool(said[1])

    def _keep_company(self, what: str) -> None:
        """A token at a time, as long as somebody has a pass. It adds nothing to any gradient."""
        self._expect_finished(what)
        while True:
            some, back = self._meet(0)
            if not some:
                return
            self._along = True
            try:
                with self.heard(what):
                    self._compute_along(back)
            finally:
                self._along = False

    def _compute_along(self, back: bool) -> None:
        with torch.set_grad_enabled(back):
            token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            out = self._model(input_ids=token, use_cache=False).logits
        if back:
            torch.autograd.backward(out.sum() * 0)


def divided(model: Any, ranks: Group, device: torch.device) -> Company:
    """A causal model of transformers, each weight of it cut among the ranks; moved to the device layer by layer."""
    mesh = DeviceMesh.from_group(ranks.tensors, device.type)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=len, default=nn.ModuleList()):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are sums: what they are divided by is in the loss
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return Company(ranks, model, device)


class WeightShards(Unsharded):
    """Parameters, gradients and states are parts; only checkpoints are whole."""

    passes_alone = False

    def __init__(self, ranks: Ranks) -> None:
        if not isinstance(ranks, Company):
            raise ConfigError("shard=weights divides language models that are trained whole; use shard=gradients here")
        self._ranks = ranks

    def backward(self, loss: Tensor) -> None:
        """As autograd does it; the others take part."""
        super().backward(loss)
        self._ranks.differentiated()

    def restart(self) -> None:
        """Others wait inside of a pass that this rank cannot finish."""
        raise RanksLost(
            f"out of memory at the passes of an update, and with shard=weights no rank can begin one anew; {SMALLER}"
        )

    def comparable(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Every rank has other parts."""
        return {}

    def settle(self, ranks: Ranks, parameters: Mapping[str, Tensor], moved: set[str]) -> None:
        """They were summed while they were made."""
        for name, p in parameters.items():
            if name not in moved:
                p.grad = None

    def norm(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Over all parts."""
        with self._ranks.heard("the norm"):
            norm = super().norm(parameters)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def whole(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the chief, in its CPU's memory."""
        return {name: self._full(p.detach()) for name, p in parameters.items()}

    def put(self, parameters: Mapping[str, Tensor], saved: Mapping[str, Any], kind: str) -> None:
        """Of whole weights this rank's parts."""
        own = {name: _part(torch.as_tensor(x), parameters[name]) for name, x in saved.items() if name in parameters}
        copy_into(parameters, {**saved, **own}, kind)

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state on the chief."""
        found = optimizer.state_dict()
        state = {
            number: {name: self._full(x) if isinstance(x, Tensor) else x for name, x in entry.items()}
            for number, entry in found["state"].items()
        }
        return {**found, "state": state}

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Of the whole state this rank's parts."""
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        own = {
            number: {
                name: _part(x, tensors[number]) if isinstance(x, Tensor) and x.shape == tensors[number].shape else x
                for name, x in entry.items()
            }
            for number, entry in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": own})

    def _full(self, x: Tensor) -> Tensor:
        """All ranks help; who is not the chief keeps nothing."""
        with self._ranks.heard("whole weights"):
            found: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
        return found.cpu().clone() if self._ranks.chief else torch.empty(0)


def _part(x: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as another one is."""
    if not isinstance(like, DTensor):
        return x
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
