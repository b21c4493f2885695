"""Linear layers on a CPU, their weights laid out once for a whole rollout.

A matrix library first rearranges the weights for its inner loop, every time it is called; with the few rows of a
decoding step that takes longer than the products. oneDNN can be given weights that are laid out already: with 16 rows
SmolLM2's layers take less than half the time, with 512 still a fifth less. Laying them out costs about as much as five
steps save, and a copy of the weights while the rollout lasts. The numbers differ in the last bits only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo.language.scoring.host import free_bytes

LEAST_STEPS = 8
LEAST_SIZE = 1 << 16
"""Of a weight: below it, calling is what takes time."""


@contextmanager
def laid_out(model: nn.Module, steps: int) -> Iterator[None]:
    """Inside, the model's linear layers use copies of their weights that are laid out for the CPU, where it pays."""
    linears = _worth(model) if steps >= LEAST_STEPS else []
    try:
        for module in linears:
            vars(module)["forward"] = _forward(module)
        yield
    finally:
        for module in linears:
            vars(module).pop("forward", None)


def _worth(model: nn.Module) -> list[nn.Linear]:
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not there or torch.is_autocast_enabled("cpu") or next(model.parameters()).device.type != "cpu":
        return []
    found = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= LEAST_SIZE
        and "forward" not in vars(module)
    ]
    return found if sum(4 * module.weight.numel() for module in found) < free_bytes() / 2 else []


def _forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    operations: Any = torch.ops.mkldnn
    weight, bias = operations._reorder_linear_weight(module.weight.detach(), 16), module.bias

    def forward(input: Tensor) -> Tensor:
        out: Tensor = operations._linear_pointwise(input, weight, bias, "none", [], "")
        return out

    return forward
