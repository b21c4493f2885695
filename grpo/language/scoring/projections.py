"""Linear layers that read the same input, as one product forward and one back, with adapters (LoRA) beside them.

    forward    y = x · Wᵀ + bias        y += (x · Aᵀ) · (scale B)ᵀ       A: one below the other, B: along a diagonal
    backward   dx = dy · W              dx += (dy · scale B) · A         dA, dB: thin products; dW where W is trained

Weights that are kept in the type that is computed in are held once: those that are multiplied together are laid side
by side in memory, and the modules' parameters become views of that. Others are rounded before every pass into memory
that stays. Of quantised weights (bitsandbytes) nothing stays: they are made whole for a product, and once more on the
way back. A and B are rounded before every pass, B after it was scaled; their gradients are added up in float32.

Letters: L tokens of the row, D width, I and O a projection's sides, R ranks of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grpo.language.scoring.decoder_layout import Adapter, Unsupported, unwrapped
from grpo.language.scoring.head import added, product

QUANTISED = ("Linear4bit", "Linear8bitLt")
"""Classes of bitsandbytes."""

Copies = list[tuple[Tensor, Tensor]]
"""What is to be rounded: to, from."""


@dataclass(frozen=True)
class Projections:
    """As they are in one pass, in the type that is computed in."""

    weights: tuple[Tensor, ...]
    """The modules' own, as autograd is told of them; none where they are quantised."""
    biases: tuple[Tensor, ...]
    adapters: tuple[Adapter | None, ...]
    sizes: tuple[int, ...]
    whole: Tensor | None
    """The weights, one below the other; None: quantised."""
    bias_O: Tensor | None
    a_RD: Tensor | None
    b_OR: Tensor | None
    quantised: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def parameters(self) -> list[Tensor]:
        """As autograd is told of them."""
        thin = [factor for adapter in self.adapters if adapter is not None for factor in (adapter.a_RD, adapter.b_OR)]
        return [*self.weights, *self.biases, *thin]

    def matrix(self) -> Tensor:
        """(O, D) all weights; made anew where they are quantised."""
        if self.whole is not None:
            return self.whole
        return torch.cat([_dequantised(module, self.dtype) for module in self.quantised])

    def __call__(self, x_LD: Tensor) -> Tensor:
        out = F.linear(x_LD, self.matrix(), self.bias_O)
        if self.a_RD is not None and self.b_OR is not None:
            out.addmm_(x_LD @ self.a_RD.t(), self.b_OR.t())
        return out

    def onto(self, x_LD: Tensor, y_LI: Tensor, out: Tensor | None = None) -> Tensor:
        """x + projection of y, where x may be wider."""
        out = added(x_LD, y_LI, self.matrix().t(), out)
        if self.a_RD is not None and self.b_OR is not None:
            added(out, y_LI @ self.a_RD.t(), self.b_OR.t(), out)
        return out if self.bias_O is None else out.add_(self.bias_O)

    def side_back(self, grad_LO: Tensor) -> Tensor | None:
        """(L, R) the gradient by what A gave."""
        return None if self.b_OR is None else grad_LO @ self.b_OR

    def back(self, grad_LO: Tensor, side_LR: Tensor | None) -> Tensor:
        """The gradient by what was read; `side_LR`: from `side_back`."""
        d_LD = grad_LO @ self.matrix()
        return d_LD if side_LR is None or self.a_RD is None else d_LD.addmm_(side_LR, self.a_RD)


class Gradients:
    """Of the parameters of projections, added up over the tiles of a pass: in float32 where there are several."""

    def __init__(self, of: Projections, needed: Sequence[bool], tiles: int = 1) -> None:
        self._of, self._needed, self._several = of, list(needed), tiles > 1
        count, biases = len(of.weights), len(of.biases)
        self._for_weights, self._for_biases = any(needed[:count]), any(needed[count : count + biases])
        self._for_adapters = any(needed[count + biases :])
        self._sums: dict[str, Tensor] = {}

    @property
    def wanted(self) -> bool:
        """Whether any is."""
        return any(self._needed)

    def add(self, grad_LO: Tensor, side_LR: Tensor | None, x_LD: Tensor) -> None:
        """A tile's: the gradients of what came out and of what A gave, and what was read."""
        of = self._of
        if self._for_weights:
            self._add("weights", grad_LO.t(), x_LD, of.weights[0].dtype)
        if self._for_biases:
            self._sums["biases"] = grad_LO.sum(0, dtype=torch.float32) + self._sums.get("biases", 0.0)
        if not self._for_adapters or of.a_RD is None or side_LR is None:
            return
        kind = next(adapter.a_RD.dtype for adapter in of.adapters if adapter is not None)
        self._add("a", side_LR.t(), x_LD, kind)
        given_LR = x_LD @ of.a_RD.t()
        row = column = 0
        for number, (size, adapter) in enumerate(zip(of.sizes, of.adapters, strict=True)):
            if adapter is not None:
                mine, rank = grad_LO[:, row : row + size], adapter.rank
                self._add(f"b{number}", mine.t(), given_LR[:, column : column + rank], kind)
                column += rank
            row += size

    def _add(self, name: str, left: Tensor, right: Tensor, dtype: torch.dtype) -> None:
        if name in self._sums:
            added(self._sums[name], left, right, out=self._sums[name])
            return
        dtype = torch.promote_types(dtype, torch.float32) if self._several else dtype
        self._sums[name] = torch.empty(len(left), right.shape[1], dtype=dtype, device=left.device)
        product(left, right, self._sums[name])

    def found(self) -> list[Tensor | None]:
        """In the order and the types of the parameters; None where none is needed."""
        of, sums, sizes = self._of, self._sums, list(self._of.sizes)
        nothing = [None] * len(sizes)
        parts: list[Tensor | None] = []
        if of.weights:
            parts += torch.split(sums["weights"], sizes) if "weights" in sums else nothing
        if of.biases:
            parts += torch.split(sums["biases"], sizes) if "biases" in sums else nothing
        column = 0
        for number, adapter in enumerate(of.adapters):
            if adapter is not None:
                a = sums["a"][column : column + adapter.rank] if "a" in sums else None
                b = sums[f"b{number}"] * adapter.scale if "a" in sums else None
                parts, column = [*parts, a, b], column + adapter.rank
        return [
            None if grad is None or not wanted else grad.to(own.dtype)
            for grad, own, wanted in zip(parts, of.parameters, self._needed, strict=True)
        ]


class Packed:
    """The modules of projections, and the memory that their weights are multiplied from."""

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._modules, self._dtype = list(modules), dtype
        self.bases: list[Any] = [unwrapped(module)[0] for module in modules]
        kinds = [type(base) for base in self.bases]
        if odd := [kind.__name__ for kind in kinds if kind is not nn.Linear and kind.__name__ not in QUANTISED]:
            raise Unsupported(f"it has a {odd[0]}, which is no plain linear layer")
        self.quantised = any(kind is not nn.Linear for kind in kinds)
        self.sizes = tuple(int(base.out_features) for base in self.bases)
        self.width = int(self.bases[0].in_features)
        self._biases = tuple(base.bias for base in self.bases if base.bias is not None)
        if len(self._biases) not in (0, len(self.bases)):
            raise Unsupported("some of its projections have a bias")
        self._copies: dict[str, Tensor] = {}
        self._thin: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = {}

    def now(self, copies: Copies) -> Projections:
        """As they are at this moment, adapters included; what is to be rounded first goes to `copies`."""
        weights = () if self.quantised else tuple(base.weight for base in self.bases)
        adapters = tuple(unwrapped(module)[1] for module in self._modules)
        a_RD, b_OR = self._factors(adapters, copies)
        return Projections(
            weights=weights,
            biases=self._biases,
            adapters=adapters,
            sizes=self.sizes,
            whole=self._together("weights", weights, copies) if weights else None,
            bias_O=self._together("biases", self._biases, copies) if self._biases else None,
            a_RD=a_RD,
            b_OR=b_OR,
            quantised=tuple(self.bases) if self.quantised else (),
            dtype=self._dtype,
        )

    def _together(self, name: str, parts: Sequence[Tensor], copies: Copies) -> Tensor:
        if (whole := side_by_side(parts, self._dtype)) is not None:
            self._copies.pop(name, None)
            return whole
        if name not in self._copies:
            self._copies[name] = rounded(parts, self._dtype)
        whole = self._copies[name]
        copies += zip(torch.split(whole, [len(part) for part in parts]), (p.detach() for p in parts), strict=True)
        return whole

    def _factors(self, adapters: Sequence[Adapter | None], copies: Copies) -> tuple[Tensor | None, Tensor | None]:
        """A, one below the other, and B along a diagonal, scaled."""
        found = [adapter for adapter in adapters if adapter is not None]
        if not found:
            return None, None
        # Each has memory of its own: a reference may be scored between a pass and its way back.
        key = tuple((0, 0) if adapter is None else (id(adapter.a_RD), adapter.rank) for adapter in adapters)
        if key not in self._thin:
            empty, ranks = found[0].a_RD.detach(), sum(adapter.rank for adapter in found)
            a_RD = empty.new_zeros(ranks, self.width, dtype=self._dtype)
            self._thin[key] = a_RD, empty.new_zeros(sum(self.sizes), ranks, dtype=self._dtype)
        a_RD, b_OR = self._thin[key]
        copies += factor_copies(adapters, self.sizes, a_RD, b_OR)
        return a_RD, b_OR


def factor_copies(adapters: Sequence[Adapter | None], sizes: Sequence[int], a_RD: Tensor, b_OR: Tensor) -> Copies:
    """What fills A, one below the other, and B along a diagonal: to, from."""
    found: Copies = []
    row = column = 0
    for size, adapter in zip(sizes, adapters, strict=True):
        if adapter is not None:
            a, b, end = adapter.a_RD.detach(), adapter.b_OR.detach(), column + adapter.rank
            found.append((a_RD[column:end], a))
            found.append((b_OR[row : row + size, column:end], b if adapter.scale == 1 else b * adapter.scale))
            column = end
        row += size
    return found


_rounded: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()


def rounded(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The parts in another type, one below the other: one memory for sampling and for gradients, while any holds it.

    Whoever is about to read it rounds the parts into it first: between two updates all write the same.
    """
    key = (dtype, *((id(part), part.data_ptr(), part.shape) for part in parts))
    found = _rounded.get(key)
    if found is None:
        found = _rounded[key] = torch.cat([part.detach().to(dtype) for part in parts])
    return found


def side_by_side(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The parts as one tensor, the parts becoming views of it; None where they are kept in another type."""
    if any(part.dtype != dtype for part in parts):
        return None
    if (whole := one_memory(parts, dtype)) is not None:
        return whole
    with torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, mine in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
            part.data = mine
    return whole


def one_memory(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The parts as one tensor where they lie in memory like that."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.dtype != dtype or not part.is_contiguous() or part.data_ptr() != at:
            return None
        at += part.numel() * part.element_size()
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _dequantised(module: Any, dtype: torch.dtype) -> Tensor:
    """A linear layer's weight as numbers."""
    from peft.utils.integrations import dequantize_module_weight

    weight: Tensor = dequantize_module_weight(module)
    return weight.detach().to(dtype)
