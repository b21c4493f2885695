"""The world model's optimizer: adaptive clipping, then scaling by the RMS of gradients, then momentum.

Momentum after the scaling (LaProp) stays stable where Adam needs a large ε. Clipping is relative to each tensor's own
norm, so one number serves all sizes and losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo.optimizers import Plain


class LaProp(Plain):
    """`clip` is the largest norm of a gradient in units of its tensor's norm; 0: no clipping.

    The learning rate rises from 0 over `warmup` steps. Every number a step needs lives on the tensors' device, so a
    step can be captured in a graph. Only for tensors of one device in a group.
    """

    SMALLEST = 1e-3
    """A tensor's norm counts at least this much: zeros could never be left otherwise."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 4e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        clip: float = 0.3,
        warmup: int = 1000,
    ) -> None:
        if lr < 0 or eps < 0 or clip < 0 or warmup < 0 or not all(0 < beta < 1 for beta in betas):
            given = f"lr={lr}, betas={betas}, eps={eps}, clip={clip}, warmup={warmup}"
            raise ValueError(f"{given}: nothing may be negative, and betas lie between 0 and 1")
        # torch moves the step to the tensors' device when a state is loaded, because it says capturable
        kept = {"lr": lr, "betas": tuple(betas), "eps": eps, "clip": clip, "warmup": warmup, "capturable": True}
        super().__init__(params, kept)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moved:
                self._move(group, moved)
        return loss

    def _move(self, group: dict[str, Any], moved: list[Tensor]) -> None:
        (beta1, beta2), count = group["betas"], self._count(group)
        for parameter in moved:
            if "square" not in self.state[parameter]:
                zeros = torch.zeros_like
                self.state[parameter] |= {"square": zeros(parameter), "momentum": zeros(parameter)}
        squares = [self.state[parameter]["square"] for parameter in moved]
        momenta = [self.state[parameter]["momentum"] for parameter in moved]
        rate = group["lr"] * ((count / group["warmup"]).clamp(max=1.0) if group["warmup"] else torch.ones_like(count))
        count += 1

        grads = self._clipped(moved, group["clip"])
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scale = torch._foreach_sqrt(squares)
        torch._foreach_mul_(scale, torch.rsqrt(_unbiased(beta2, count)))
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_lerp_(momenta, torch._foreach_div(grads, scale), 1 - beta1)
        torch._foreach_sub_(moved, torch._foreach_mul(momenta, rate / _unbiased(beta1, count)))

    def _count(self, group: dict[str, Any]) -> Tensor:
        """Steps taken, kept with the group's first tensor."""
        first = group["params"][0]
        if "step" not in self.state[first]:
            self.state[first]["step"] = torch.zeros((), device=first.device)
        count: Tensor = self.state[first]["step"]
        return count

    def _clipped(self, moved: list[Tensor], clip: float) -> list[Tensor]:
        grads = [parameter.grad for parameter in moved if parameter.grad is not None]
        if not clip:
            return grads
        most = clip * torch.stack(torch._foreach_norm(moved)).clamp(min=self.SMALLEST)
        over = (torch.stack(torch._foreach_norm(grads)) / most).clamp(min=1.0)
        return list(torch._foreach_div(grads, list(over.unbind())))


def _unbiased(beta: float, count: Tensor) -> Tensor:
    """1 − β^count, without the loss of digits that subtraction brings."""
    return -torch.expm1(count * math.log(beta))


# --- what a checkpoint keeps ----------------------------------------------------------------------------------------


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's numbers as `place of the parameter/name`."""
    state = optimizer.state_dict()["state"]
    return {f"{index}/{key}": x for index, entry in state.items() for key, x in entry.items()}


def load_moments(optimizer: torch.optim.Optimizer, names: Iterable[str], kept: Mapping[str, Tensor]) -> None:
    """Go on with these numbers, which must be all of them."""
    differ = sorted(set(kept) ^ set(names))
    if differ:
        raise ValueError(f"the saved optimizer is not whole: {', '.join(differ[:3])}")
    whole = optimizer.state_dict()
    whole["state"] = {}
    for name, x in kept.items():
        index, _, key = name.partition("/")
        whole["state"].setdefault(int(index), {})[key] = x.clone()
    optimizer.load_state_dict(whole)
