"""Networks for observations: a vector through dense layers, pictures through convolutions first, a memory on request.

    network = make_network(observation_space, out_size=2, hidden=(64, 64), seed=0)
    out_BF = network(tensors(observation))

Weights are orthogonal and come from their own generator: the same seed gives the same network, and nobody else's
random numbers move. Vectors are expected scaled already, nothing is clamped. A network whose observations have no
pictures also takes them as one flat (B, D) float tensor, which is what `grpo.envs.spaces.flatten` gives.

Letters: B observations, F numbers given, H width of a layer; C, H and W of a picture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grpo.envs import spaces
from grpo.envs.fleet import Tree

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


WAY = 1
"""How drawn pictures are read, which no weight tells: a checkpoint names it, and one of another way is refused."""


class _Reader(nn.Module):
    """An observation as one row of features."""

    def __init__(self, layout: spaces.Layout) -> None:
        super().__init__()
        self.layout = layout
        self.way = 0 if all(picture.is_board for picture in layout.pictures) else WAY
        """0: nothing is drawn."""
        nets = [_convolutions(picture) for picture in layout.pictures]
        with torch.no_grad():
            seen = [net(torch.zeros(1, *of.size)).shape[1] for net, of in zip(nets, layout.pictures, strict=True)]
        self.width = layout.size + sum(seen)
        self.pictures = nn.ModuleList(nets) if nets else None  # else a plain network has one child, its layers

    def read(self, observation: Tree, lead: int) -> Tensor:
        """(B, …, width), where the first `lead` dimensions are not the observation's."""
        if isinstance(observation, Tensor) and observation.is_floating_point() and not self.layout.pictures:
            flat = observation.ndim == lead + 1 and observation.shape[-1] == self.layout.size
            if flat:
                return observation.float()
        parts = []
        for part in self.layout.numbers:
            x = spaces.leaf(observation, part.path)
            x = x.reshape(*x.shape[:lead], math.prod(part.shape))
            if part.choices is None:
                parts.append(x.float())
            else:
                for i, (count, first) in enumerate(zip(part.choices, part.start, strict=True)):
                    parts.append((x[..., i, None] == torch.arange(first, first + count, device=x.device)).float())
        for net, picture in zip(self.pictures or [], self.layout.pictures, strict=True):
            x = spaces.leaf(observation, picture.path)
            ahead, x = x.shape[:lead], x.reshape(-1, *picture.frames)
            x = x.permute(0, 1, 4, 2, 3) if picture.channels_last else x
            x = x.reshape(-1, *picture.size).float() / picture.high
            features = net(x if picture.is_board else _contrast(x))
            parts.append(features.reshape(*ahead, features.shape[1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Network(_Reader):
    """Observation → F numbers."""

    memory = 0

    def __init__(self, layout: spaces.Layout, out_size: int, hidden: Sequence[int], activation: str) -> None:
        super().__init__(layout)
        widths = [self.width, *hidden]
        self.sight_size = widths[-1]
        dense = _dense(widths, activation, levelled=self.way > 0)
        self.layers = nn.Sequential(*dense, nn.Linear(widths[-1], out_size))

    def forward(self, observation: Tree) -> Tensor:
        """(B, F)."""
        return self.layers(self.read(observation, 1))

    def sight(self, observation: Tree) -> Tensor:
        """(B, H): what the last layer is given."""
        return self.layers[:-1](self.read(observation, 1))


class RecurrentNetwork(_Reader):
    """Observations of whole episodes → F numbers a decision, through a GRU that has seen what came before."""

    def __init__(
        self, layout: spaces.Layout, out_size: int, hidden: Sequence[int], activation: str, memory: int
    ) -> None:
        super().__init__(layout)
        self.memory = memory
        widths = [self.width, *hidden]
        self.layers = nn.Sequential(*_dense(widths, activation, levelled=self.way > 0))
        self.gru = nn.GRU(widths[-1], memory, batch_first=True)
        self.out = nn.Linear(memory, out_size)

    def initial(self, count: int) -> Tensor:
        """The memory of `count` episodes that begin, (N, memory)."""
        return self.out.weight.new_zeros(count, self.memory)

    def forward(self, observation: Tree, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(N, T, F) and the memory after the last decision; `hidden`: the memory before the first, None: empty."""
        features_NTH = self.layers(self.read(observation, 2))
        hidden = self.initial(len(features_NTH)) if hidden is None else hidden
        seen_NTH, last = self.gru(features_NTH, hidden[None].contiguous())
        return self.out(seen_NTH), last[0]


def make_network(
    observation_space: gym.Space[Any],
    out_size: int,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    memory: int = 0,
    seed: int | torch.Generator = 0,
) -> Network | RecurrentNetwork:
    """A network with fresh weights. `hidden` follows the convolutions too: (512,) is the Nature-CNN."""
    layout = spaces.layout(observation_space)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not one of {', '.join(ACTIVATIONS)}")
    with torch.random.fork_rng(devices=[]):  # layers draw weights of their own as they are made
        network: Network | RecurrentNetwork
        if memory:
            network = RecurrentNetwork(layout, out_size, hidden, activation, memory)
        else:
            network = Network(layout, out_size, hidden, activation)
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    last = network.layers[-1] if isinstance(network, Network) else network.out
    for module in network.modules():
        for name, tensor in module.named_parameters(recurse=False):
            if "bias" in name:
                nn.init.zeros_(tensor)
            else:
                for gate in tensor.chunk(3) if isinstance(module, nn.GRU) else (tensor,):
                    gain = 0.01 if module is last else math.sqrt(2) if not isinstance(module, nn.GRU) else 1.0
                    nn.init.orthogonal_(gate, gain, generator)
    return network


def tensors(tree: Tree, device: str | torch.device = "cpu", floats: bool = False) -> Tree:
    """A tree of NumPy arrays as tensors, in their own dtypes or all in float32, as a user's module gets them."""
    if isinstance(tree, dict):
        return {key: tensors(part, device, floats) for key, part in tree.items()}
    tensor = torch.as_tensor(tree, device=device)
    return tensor.float() if floats or tensor.dtype == torch.float64 else tensor


def check_fits(
    module: nn.Module,
    observation_space: gym.Space[Any],
    size: int,
    name: str = "actor",
    action_space: gym.Space[Any] | None = None,
) -> None:
    """An error unless a user's module takes two observations, as float32 (a Dict as a dict), and gives (2, size)."""
    device = next((parameter.device for parameter in module.parameters()), "cpu")
    dummy = tensors(spaces.zeros(observation_space, 2), device, floats=True)
    training = module.training
    try:
        with torch.no_grad():
            out = module.eval()(dummy)
    except Exception as error:  # whatever a user's forward may raise
        line = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} cannot read two observations of {observation_space}: {line}") from error
    finally:
        module.train(training)
    gives = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if gives != (2, size):
        needs = "it" if action_space is None else f"the action space {action_space}"
        raise ValueError(f"{name} gives {gives}, {needs} needs (2, {size})")


def _dense(widths: Sequence[int], activation: str, levelled: bool) -> list[nn.Module]:
    """Layers of these widths; levelled: what tells states apart cannot fade, however much all of them share."""
    made: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        level = [nn.LayerNorm(b, elementwise_affine=False)] if levelled else []
        made += [nn.Linear(a, b), *level, ACTIVATIONS[activation]()]
    return made


def _contrast(x_BCHW: Tensor) -> Tensor:
    """Pictures less their own mean, in units of their own deviation.

    A background of one colour is then nothing, and how bright the whole picture is cannot be seen. As it is, it drives
    every unit alike in all states, and what is learned from rewards, which are noise at first, is to do the same
    everywhere.
    """
    return F.layer_norm(x_BCHW, x_BCHW.shape[1:])


def _convolutions(picture: spaces.Picture) -> nn.Sequential:
    """The Nature-CNN's for what is drawn, two small ones for boards of a few cells."""
    channels, *sides = picture.size
    if not picture.is_board:
        steps = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
    else:
        stride = 1 if min(sides) < 16 else 2
        steps = [(channels, 16, 3, stride), (16, 32, 3, stride)]
    net = nn.Sequential(*(layer for step in steps for layer in (nn.Conv2d(*step), nn.ReLU())), nn.Flatten())
    if picture.is_board:  # its codes are a few of the 255 its space allows: next to nothing once scaled
        with torch.no_grad():
            count = net(torch.zeros(1, *picture.size)).shape[1]
        net.append(nn.LayerNorm(count, elementwise_affine=False))
    return net
