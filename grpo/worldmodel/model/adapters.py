"""Low-rank adapters on dense layers: W + B·A with only A and B trained. arXiv:2106.09685.

They sit in the layer's weight itself (a parametrisation), because the recurrent model multiplies its weights by hand.
B starts at 0, so an agent that was just adapted is the agent it was.

Letters: I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from grpo.config import ConfigError
from grpo.worldmodel.model.networks import Dense


class LowRank(nn.Module):
    """What is added to one weight (O, I)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        out, size = weight.shape
        self.down_RI = nn.Parameter(torch.randn(rank, size).to(weight) / math.sqrt(size))
        self.up_OR = nn.Parameter(torch.zeros(out, rank).to(weight))
        self.on = True

    def forward(self, weight: Tensor) -> Tensor:
        """The weight in force."""
        return torch.addmm(weight, self.up_OR, self.down_RI) if self.on else weight


def adapt(module: nn.Module, rank: int, seed: int) -> None:
    """Freeze everything in `module` and give each of its dense layers an adapter."""
    module.requires_grad_(False)
    layers = [layer for layer in module.modules() if isinstance(layer, Dense)]
    if not layers:
        raise ConfigError("there is no dense layer to adapt")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for layer in layers:
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))


def adapters(module: nn.Module) -> list[LowRank]:
    """Those in a module."""
    return [part for part in module.modules() if isinstance(part, LowRank)]


def trained(module: nn.Module) -> dict[str, Tensor]:
    """What is learned of a module, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """The module as it was before it was adapted."""
    found = adapters(module)
    try:
        for part in found:
            part.on = False
        yield
    finally:
        for part in found:
            part.on = True
