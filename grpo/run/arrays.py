"""A checkpoint's arrays and their file. PyTorch is imported where one of them is its: a run may do without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import numpy

from grpo.core.arrays import Array, is_torch


def on_host(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """All as arrays that can be written."""
    if not any(map(is_torch, arrays.values())):
        return {name: np.array(array, order="C") for name, array in arrays.items()}
    import torch

    tensors: dict[str, Array] = {}
    seen: set[int] = set()
    for name, array in arrays.items():
        tensor = array.detach() if is_torch(array) else torch.from_numpy(np.array(array))
        tensor = tensor.cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in seen else tensor  # tied weights: safetensors wants each its own
        seen.add(storage)
    return tensors


def as_saved(kind: str, array: Array) -> Array:
    """As it was when it was saved."""
    return array.numpy() if kind == "numpy" and is_torch(array) else array


def save_file(arrays: Mapping[str, Array], path: Path) -> None:
    """All of them NumPy's, or all tensors."""
    if not any(map(is_torch, arrays.values())):
        return numpy.save_file(dict(arrays), path)
    from safetensors import torch

    return torch.save_file(dict(arrays), path)


def load_file(path: Path, tensors: bool = True) -> Mapping[str, Array]:
    """All arrays of a file: NumPy's, or tensors, which know bfloat16."""
    if not tensors:
        return numpy.load_file(path)
    from safetensors import torch

    return torch.load_file(path)
