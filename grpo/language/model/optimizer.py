"""AdamW for weights that are kept in bfloat16: a step too small for them is taken with the probability it deserves.

Rounding to the nearest would lose it: at a learning rate of 1e-6 nearly every step. Rounded up or down at random, in
proportion, weights move as far as they should on average. What is drawn comes from (seed, step, parameter): nothing to
save, and whoever owns a parameter draws the same for it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo.errors import warn
from grpo.optimizers import Plain
from grpo.seeding import rounding_seed


class RoundedAdamW(Plain):
    """AdamW with float32 moments and arithmetic, and random rounding of what it writes."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update."""
        if closure is not None:
            raise TypeError("gradients are there already; call step() without a closure")
        numbers = {p: number for number, p in enumerate(p for group in self.param_groups for p in group["params"])}
        random = {device: torch.Generator(device) for device in {p.device for p in numbers}}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    moments = (torch.zeros_like(p, dtype=torch.float32) for _ in range(2))
                    state["step"], (state["exp_avg"], state["exp_avg_sq"]) = 0, moments
                state["step"] += 1
                drawn = random[p.device].manual_seed(rounding_seed(group["seed"], state["step"], numbers[p]))
                own = {name: _own_part(value) for name, value in state.items()}
                self._move(_own_part(p), _own_part(p.grad), own, group, drawn)

    def _move(self, p: Tensor, grad: Tensor, state: Any, group: Any, random: torch.Generator) -> None:
        (beta1, beta2), step, lr = group["betas"], state["step"], group["lr"]
        first, second, grad = state["exp_avg"], state["exp_avg_sq"], grad.float()
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        moved = p.float().mul_(1 - lr * group["weight_decay"])
        moved.addcdiv_(first, spread, value=-lr / (1 - beta1**step))
        p.copy_(rounded(moved, random) if p.dtype == torch.bfloat16 else moved)

    def load_state_dict(self, state_dict: Any) -> None:
        """As saved: torch would round the moments to the weights' type. A plain AdamW's state will do, too."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("seed", self.defaults["seed"])
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        tensors = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(ids, tensors, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                exact = isinstance(value, Tensor) and name != "step"
                kept = value.detach().clone().to(p.device, torch.float32) if exact else int(value)
                self.state[p][name] = kept


def small_adam(config: Any, tensors: Sequence[Tensor]) -> Any:
    """bitsandbytes' AdamW of this kind; None, and a note, where it cannot be had: the results are AdamW's anyway."""
    named = {"8bit": "AdamW8bit", "paged": "PagedAdamW32bit", "paged_8bit": "PagedAdamW8bit"}[config.adam_states]
    lacking = [
        why
        for why, lacks in (
            ("a GPU", not all(p.is_cuda for p in tensors)),
            ("bitsandbytes", importlib.util.find_spec("bitsandbytes") is None),
            ("weights kept in float32", any(p.dtype == torch.bfloat16 for p in tensors)),
            ("shard=none", config.shard != "none"),
        )
        if lacks
    ]
    if lacking:
        warn(f"adam_states={config.adam_states} needs {' and '.join(lacking)}: AdamW keeps float32 moments here")
        return None
    return getattr(importlib.import_module("bitsandbytes.optim"), named)


def _own_part(x: Any) -> Any:
    """A tensor that is cut among ranks: this rank's part, in the same memory. Anything else as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def rounded(x: Tensor, random: torch.Generator) -> Tensor:
    """float32 → bfloat16, up or down at random, so that the mean is x; what is not finite stays so."""
    bits = x.view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, generator=random, device=x.device, dtype=torch.int32)
    cut = bits.add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)
