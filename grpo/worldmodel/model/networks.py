"""Layers of the world model: what reads observations, what paints them again, and small heads.

Every layer is linear or convolutional → RMS norm → SiLU. Weights are truncated normals scaled by the width of the
input, drawn from torch's own generator: whoever builds a model seeds it. Observations are told apart by their shape
alone: (D,) is a vector, (H, W, C) a picture of bytes.

Letters: N rows, K blocks, I inputs and O outputs (of a block), D width of the deterministic latent, S of the discrete.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grpo.config import ConfigError
from grpo.worldmodel.model.distributions import TwoHot, symexp, symexp_bins, symlog

EPS = 1e-4
"""Of every RMS norm."""
MOST_BLOCKS = 8
LEAST_BLOCK = 8
"""Units in the smallest block worth having."""
MULTIPLES = (2, 3, 4, 4)
"""Channels after each halving of a picture, in units of `depth`."""
LEAST_STD = 1e-8
"""Of a number that moves at all."""
KERNEL = 5
DOWN = 2 ** len(MULTIPLES)
"""How much smaller a picture is after the last of them."""
_TRUNCATED = 0.87962566
"""Standard deviation of a unit normal cut off at ±2: weights have the one they would have without the cut."""

Shapes = Mapping[str, Sequence[int]]


def initialise(weight: Tensor, fan_in: int, scale: float = 1.0) -> None:
    """Truncated normal with variance scale² / fan_in."""
    std = scale / math.sqrt(fan_in) / _TRUNCATED
    if std:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    else:
        nn.init.zeros_(weight)


class Dense(nn.Module):
    """x Wᵀ + b. `scale` is of the initial weights (0: the layer gives 0); `fan_in` differs where this is one part."""

    def __init__(
        self, size_in: int, size_out: int, scale: float = 1.0, fan_in: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.bias = nn.Parameter(torch.zeros(size_out)) if bias else None
        initialise(self.weight, fan_in or size_in, scale)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return F.linear(x, self.weight, self.bias)


class BlockLinear(nn.Module):
    """Both sides in K blocks, each with a matrix of its own: a dense layer whose matrix is block-diagonal."""

    def __init__(self, size_in: int, size_out: int, blocks: int, fan_in: int | None = None, bias: bool = True) -> None:
        super().__init__()
        if size_in % blocks or size_out % blocks:
            raise ValueError(f"{size_in} → {size_out} units cannot be cut into {blocks} blocks")
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(blocks, size_in // blocks, size_out // blocks))
        self.bias = nn.Parameter(torch.zeros(blocks, 1, size_out // blocks)) if bias else None
        initialise(self.weight, fan_in or size_in)  # of all blocks, as published

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        blocks_KNI = in_blocks(x.reshape(-1, x.shape[-1]), self.blocks)
        if self.bias is None:
            out_KNO = torch.bmm(blocks_KNI, self.weight)
        else:
            out_KNO = torch.baddbmm(self.bias, blocks_KNI, self.weight)
        return joined(out_KNO).reshape(*x.shape[:-1], -1)


def in_blocks(x_NI: Tensor, blocks: int) -> Tensor:
    """(N, K·I) as (K, N, I)."""
    return x_NI.reshape(x_NI.shape[0], blocks, -1).transpose(0, 1)


def joined(x_KNO: Tensor) -> Tensor:
    """(K, N, O) as (N, K·O)."""
    return x_KNO.transpose(0, 1).flatten(1)


def blocks_of(width: int) -> int:
    """8 blocks, or as many fewer as the width asks for."""
    blocks = MOST_BLOCKS
    while blocks > 1 and (width % blocks or width < blocks * LEAST_BLOCK):
        blocks //= 2
    return blocks


class Norm(nn.RMSNorm):
    """RMS norm with a gain, in the gain's precision also where autocast has made the input coarser."""

    def __init__(self, size: int) -> None:
        super().__init__(size, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def mlp(size_in: int, units: int, layers: int) -> nn.Sequential:
    """Layers of `units` each."""
    widths = [size_in] + [units] * layers
    parts = [(Dense(a, b), Norm(b), nn.SiLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(module for part in parts for module in part))


def head(size_in: int, units: int, size_out: int, layers: int = 1, scale: float = 1.0) -> nn.Sequential:
    """Hidden layers and the output; `scale` 0 starts it at 0."""
    return nn.Sequential(*mlp(size_in, units, layers), Dense(units, size_out, scale))


class TwoHotHead(nn.Module):
    """A number, as a distribution over bins; it starts at exactly 0."""

    bins_K: Tensor

    def __init__(self, size_in: int, units: int, layers: int = 1) -> None:
        super().__init__()
        bins_K = symexp_bins()
        self.register_buffer("bins_K", bins_K, persistent=False)
        self.layers = head(size_in, units, len(bins_K), layers, scale=0.0)

    def forward(self, flat: Tensor) -> TwoHot:
        """(…, F) → a distribution for each."""
        return TwoHot(self.layers(flat).float(), self.bins_K)


# --- pictures -------------------------------------------------------------------------------------------------------


class _NormThenSiLU(torch.autograd.Function):
    """Both over the last dimension, in as few passes over a large picture as there can be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(EPS).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, gain, inverse)
        return F.silu(unit * gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        unit, gain, inverse = ctx.saved_tensors
        grad = torch.ops.aten.silu_backward(grad, unit * gain)
        to_gain = (grad * unit).flatten(0, -2)
        along = torch.mv(to_gain, gain / len(gain)).view_as(inverse)
        return grad.mul_(gain).addcmul_(unit, along, value=-1).mul_(inverse), to_gain.sum(0)


class _ChannelNorm(Norm):
    """RMS over the channels of (N, C, H, W), which a convolution leaves innermost in memory; then SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        exact = x.permute(0, 2, 3, 1).to(self.weight.dtype)
        out: Tensor = _NormThenSiLU.apply(exact, self.weight)  # type: ignore[no-untyped-call]
        return out.permute(0, 3, 1, 2).to(x.dtype)


class _Convolution(nn.Conv2d):
    """Over (N, C, H, W) with the channels innermost in memory. Few of them leave a CPU's vectors half empty.

    There, neighbours in a row are computed together: half as many places, twice the channels, the same numbers.
    """

    FEW = 8

    def forward(self, x: Tensor) -> Tensor:
        if self.out_channels > self.FEW or x.device.type != "cpu" or x.shape[-1] % 2:
            return super().forward(x)
        assert self.bias is not None
        pair = torch.cat([F.pad(self.weight, (0, 1)), F.pad(self.weight, (1, 0))])
        x = F.conv2d(x, pair, self.bias.repeat(2), stride=(1, 2), padding=KERNEL // 2).permute(0, 2, 3, 1)
        return x.reshape(*x.shape[:2], -1, self.out_channels).permute(0, 3, 1, 2)


def _convolution(channels_in: int, channels_out: int) -> nn.Conv2d:
    layer = _Convolution(channels_in, channels_out, KERNEL, padding=KERNEL // 2)
    initialise(layer.weight, channels_in * KERNEL**2)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def _folds() -> Tensor:
    """Which of the 3 pixels around it each of the KERNEL taps meets, for either half of a doubled pixel: (2, 3, 5)."""
    folds = torch.zeros(2, 3, KERNEL)
    for half, tap in itertools.product(range(2), range(KERNEL)):
        folds[half, (half + tap - KERNEL // 2) // 2 + 1, tap] = 1.0
    return folds


def enlarged(x: Tensor, weight: Tensor, bias: Tensor | None, folds: Tensor) -> Tensor:
    """A picture twice as large, each pixel four times, and a convolution over it, without making the larger one.

    Taps that meet copies of one pixel are added up first: four kernels of 3×3, one for each copy, on the small picture.
    """
    out, channels = weight.shape[:2]
    kernel = torch.einsum("oiyx,auy,bvx->aboiuv", weight, folds, folds).reshape(4 * out, channels, 3, 3)
    x = F.conv2d(x, kernel, None if bias is None else bias.repeat(4), padding=1).permute(0, 2, 3, 1)
    count, height, width, _ = x.shape
    x = x.reshape(count, height, width, 2, 2 * out).transpose(2, 3)
    return x.reshape(count, 2 * height, 2 * width, out).permute(0, 3, 1, 2)


def _activated(channels: int) -> nn.Sequential:
    return nn.Sequential(_ChannelNorm(channels))


def told_apart(shapes: Shapes) -> tuple[dict[str, int], dict[str, int], tuple[int, int]]:
    """Widths of vectors, channels of pictures, and the pictures' common height and width."""
    vectors = {key: shape[0] for key, shape in sorted(shapes.items()) if len(shape) == 1}
    pictures = {key: tuple(shape) for key, shape in sorted(shapes.items()) if len(shape) == 3}
    for key, shape in shapes.items():
        if key not in vectors and key not in pictures:
            raise ConfigError(
                f"observation {key!r} has shape {tuple(shape)}; give a vector (D,) or a picture (H, W, C)"
            )
    sides = {shape[:2] for shape in pictures.values()}
    if len(sides) > 1 or any(side % DOWN or not side for pair in sides for side in pair):
        found = ", ".join(f"{key} {shape}" for key, shape in pictures.items())
        raise ConfigError(f"pictures {found}: resize all to one height and width in multiples of {DOWN}, such as 64×64")
    if not shapes:
        raise ConfigError("there is no observation to model; give at least one vector (D,) or picture (H, W, C)")
    height, width = next(iter(sides), (0, 0))
    return vectors, {key: shape[2] for key, shape in pictures.items()}, (height, width)


class Reading(nn.Module):
    """Numbers as the model reads them: their symlog; scaled: of their distance from the mean, in standard deviations.

    Until they are measured they are taken as they come, and so are those of a model that was saved without a scale.
    """

    mean_D: Tensor
    std_D: Tensor

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        if scaled:
            self.register_buffer("mean_D", torch.zeros(width))
            self.register_buffer("std_D", torch.ones(width))
            self.register_load_state_dict_pre_hook(_as_they_come)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """As the environment gives them → as they are read."""
        return symlog((x.float() - self.mean_D) / self.std_D if self.scaled else x.float())

    def inverse(self, y: Tensor) -> Tensor:
        """Back in the environment's units."""
        return symexp(y) * self.std_D + self.mean_D if self.scaled else symexp(y)

    @torch.no_grad()
    def measure(self, seen: Tensor) -> None:
        """Take mean and deviation from these, (…, D); a number that is always the same keeps its unit."""
        std_D, mean_D = torch.std_mean(seen.flatten(0, -2).double(), 0)
        self.mean_D.copy_(mean_D)
        self.std_D.copy_(torch.where(std_D > LEAST_STD, std_D, torch.ones_like(std_D)))


def _as_they_come(reading: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, x in reading.named_buffers():
        state.setdefault(prefix + name, torch.full_like(x, float(name == "std_D")))


def readings(module: Encoder | Decoder) -> Iterator[tuple[str, Reading]]:
    """How each of its vectors is read, by key."""
    yield from zip(module.vectors, cast("Iterable[Reading]", module.readings), strict=True)


class Encoder(nn.Module):
    """Observations → (…, width): vectors through symlog and dense layers, pictures through convolutions."""

    def __init__(self, shapes: Shapes, units: int, depth: int, layers: int = 3, scaled: bool = False) -> None:
        super().__init__()
        self.vectors, self.pictures, (height, width) = told_apart(shapes)
        self.readings = nn.ModuleList(Reading(size, scaled) for size in self.vectors.values())
        self.width = 0
        if self.vectors:
            self.dense = mlp(sum(self.vectors.values()), units, layers)
            self.width += units
        if self.pictures:
            channels = [sum(self.pictures.values()), *(depth * multiple for multiple in MULTIPLES)]
            steps = [(_convolution(a, b), nn.MaxPool2d(2), _activated(b)) for a, b in itertools.pairwise(channels)]
            self.convolutions = nn.Sequential(*(module for step in steps for module in step))
            self.width += channels[-1] * (height // DOWN) * (width // DOWN)

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Any leading dimensions; entries that are no observation are passed over."""
        parts = []
        if self.vectors:
            parts.append(self.dense(torch.cat([reading(observation[key]) for key, reading in readings(self)], -1)))
        if self.pictures:
            pixels = torch.cat([observation[key] for key in self.pictures], -1)
            x = pixels.flatten(0, -4).permute(0, 3, 1, 2).to(torch.float32, copy=True).div_(255).sub_(0.5)
            parts.append(self.convolutions(x).flatten(1).view(*pixels.shape[:-3], -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Decoder(nn.Module):
    """Latents → observations: vectors as the model reads them, pictures in [0, 1]."""

    folds: Tensor

    def __init__(
        self, shapes: Shapes, deter: int, stoch: int, units: int, depth: int, layers: int = 3, scaled: bool = False
    ) -> None:
        super().__init__()
        self.vectors, self.pictures, (height, width) = told_apart(shapes)
        self.readings = nn.ModuleList(Reading(size, scaled) for size in self.vectors.values())
        if self.vectors:
            self.dense = head(deter + stoch, units, sum(self.vectors.values()), layers)
        if self.pictures:
            channels = [*(depth * multiple for multiple in reversed(MULTIPLES)), sum(self.pictures.values())]
            self.small = (height // DOWN, width // DOWN)
            count = channels[0] * math.prod(self.small)
            self.blocks = math.gcd(blocks_of(deter), channels[0])
            self.from_deter = BlockLinear(deter, count, self.blocks)
            self.from_stoch = nn.Sequential(*mlp(stoch, 2 * units, 1), Dense(2 * units, count))
            self.start = _activated(channels[0])
            steps: list[nn.Module] = []
            for a, b in itertools.pairwise(channels):
                steps += [nn.Upsample(scale_factor=2), _convolution(a, b), _activated(b)]
            self.convolutions = nn.Sequential(*steps[:-1], nn.Sigmoid())
            self.register_buffer("folds", _folds(), persistent=False)

    def forward(self, deter: Tensor, stoch: Tensor) -> dict[str, Tensor]:
        """From (…, D) and (…, S, C), by key."""
        lead, stoch = deter.shape[:-1], stoch.flatten(-2)
        out: dict[str, Tensor] = {}
        if self.vectors:
            numbers = self.dense(torch.cat([deter, stoch], -1)).float()
            out |= zip(self.vectors, numbers.split(list(self.vectors.values()), -1), strict=True)
        if self.pictures:
            x = self._small(deter.flatten(0, -2), stoch.flatten(0, -2))
            pixels = self.painted(self.start(x)).float().permute(0, 2, 3, 1)
            pixels = pixels.reshape(*lead, *pixels.shape[1:])
            out |= zip(self.pictures, pixels.split_with_sizes(list(self.pictures.values()), -1), strict=True)
        return out

    def _small(self, deter_ND: Tensor, stoch_NS: Tensor) -> Tensor:
        """The smallest picture, (N, C, h, w); a block of units paints its own channels of it."""
        height, width = self.small
        x = self.from_deter(deter_ND).view(len(deter_ND), self.blocks, height, width, -1)
        x = x.permute(0, 2, 3, 1, 4).flatten(3)
        return (x + self.from_stoch(stoch_NS).view_as(x)).permute(0, 3, 1, 2)

    def painted(self, x: Tensor) -> Tensor:
        """`convolutions`, with their two layers before each activation as one: (N, C, h, w) → (N, channels, H, W)."""
        layers = list(self.convolutions)
        for convolution, activation in zip(layers[1::3], layers[2::3], strict=True):
            assert isinstance(convolution, nn.Conv2d)
            x = activation(enlarged(x, convolution.weight, convolution.bias, self.folds))
        return x

    def losses(self, out: Mapping[str, Tensor], observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Squared errors, summed over what one observation consists of: (…) by key."""
        found = {key: (out[key] - reading(observation[key])).square().sum(-1) for key, reading in readings(self)}
        for key in self.pictures:
            truth = observation[key].to(torch.float32, copy=True).div_(255)
            found[key] = (out[key] - truth).square().sum((-3, -2, -1))
        return found

    def observations(self, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the environment gives them: vectors in its units, pictures in bytes."""
        pictures = {key: (out[key] * 255).round().to(torch.uint8) for key in self.pictures}
        return {key: reading.inverse(out[key]) for key, reading in readings(self)} | pictures
