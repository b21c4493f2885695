"""What a rank keeps of gradients, optimizer state and weights: alone, all of it.

`Unsharded` is the usual one; `grpo.distributed.owners` divides states and gradients among ranks, and
`grpo.distributed.weights` the weights, too. A trainer asks for these steps in this order: backward … backward, finish,
moved, settle, norm, step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo.keeping import copy_into
from grpo.protocols import Ranks


class Again(RuntimeError):
    """Another rank ran out of memory in the middle of an update: everybody begins it anew."""


class Shards(Protocol):
    """How one update is put together from what the ranks computed."""

    passes_alone: bool
    """No other rank takes part in a pass of this one, so that some may go without a gradient."""

    def backward(self, loss: Tensor) -> None:
        """Of one pass."""
        ...

    def finish(self) -> None:
        """After the last pass of this rank; it may have had none."""
        ...

    def restart(self) -> None:
        """Instead of that, where this rank was out of memory and begins anew: everybody does."""
        ...

    def fail(self) -> None:
        """Instead of that, where this rank cannot go on: nobody waits for its passes any more."""
        ...

    def moved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Names of those that this rank's passes gave a gradient."""
        ...

    def settle(self, ranks: Ranks, parameters: Mapping[str, Tensor], moved: set[str]) -> None:
        """Sum gradients over ranks; moved: what some rank gave a gradient. Others have none."""
        ...

    def norm(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Of all gradients together, also of those that this rank does not keep; None where there are none."""
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move every parameter, on every rank."""
        ...

    def comparable(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Of these what must be the same on every rank."""
        ...

    def whole(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights as one process would have them; asked for on every rank, complete on the chief."""
        ...

    def put(self, parameters: Mapping[str, Tensor], saved: Mapping[str, Any], kind: str) -> None:
        """The way back; kind: what they are, for errors."""
        ...

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state, as one process would have it; asked for on every rank, complete on the chief."""
        ...

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Of the whole state what this rank keeps."""
        ...


class Unsharded:
    """Everything on every rank."""

    passes_alone = True

    def backward(self, loss: Tensor) -> None:
        """As autograd does it."""
        torch.autograd.backward(loss)

    def finish(self) -> None:
        """Nothing is under way."""

    def restart(self) -> None:
        """Passes of one rank are its own."""

    def fail(self) -> None:
        """Nobody waits in the middle of passes."""

    def moved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Those with a gradient."""
        return [name for name, p in parameters.items() if p.grad is not None]

    def settle(self, ranks: Ranks, parameters: Mapping[str, Tensor], moved: set[str]) -> None:
        """Every rank gets the sum."""
        for name, p in parameters.items():
            if name not in moved:
                p.grad = None
            elif p.grad is None:
                p.grad = torch.zeros_like(p)
        ranks.sum([p.grad for p in parameters.values() if p.grad is not None], "the gradients")

    def norm(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Of all that have one."""
        if not parameters:
            return None
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Every rank moves everything alike."""
        optimizer.step()

    def comparable(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """All of them."""
        return parameters

    def whole(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As they are."""
        return parameters

    def put(self, parameters: Mapping[str, Tensor], saved: Mapping[str, Any], kind: str) -> None:
        """Into the memory that they have."""
        copy_into(parameters, saved, kind)

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As it is."""
        return optimizer.state_dict()

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """As it is."""
        optimizer.load_state_dict(state)
