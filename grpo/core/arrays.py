"""One namespace for NumPy, PyTorch and JAX, and the few operations their namespaces do not share.

Nothing here imports a framework: an array brings its own. Half-precision inputs are widened to float32 at the
door (`wide`), because a ratio of e^20 does not fit in float16.
"""

from __future__ import annotations

import sys
from typing import Any

Array = Any
"""A NumPy, PyTorch or JAX array. Trailing capitals in a name are its dimensions (see `grpo.rollouts`)."""

_FOUND: dict[type, Any] = {}
_MODULES = {"torch": "torch", "jax": "jax.numpy", "jaxlib": "jax.numpy", "numpy": "numpy"}

EXP_LIMIT = 20.0
"""Largest log-ratio that is exponentiated: e^20 ≈ 4.9e8 is finite in float32 and beyond any useful ratio."""


def namespace(*arrays: Array) -> Any:
    """The module (`numpy`, `torch` or `jax.numpy`) whose arrays these are; the first array decides."""
    for array in arrays:
        kind = type(array)
        if kind not in _FOUND:  # looked up once a type: a step asks some four hundred times
            _FOUND[kind] = _module_of(kind)
        if _FOUND[kind] is not None:
            return _FOUND[kind]
    kinds = ", ".join(type(a).__name__ for a in arrays) or "nothing"
    raise TypeError(f"expected a NumPy, PyTorch or JAX array, got {kinds}; convert it first, e.g. numpy.asarray(x)")


def _module_of(cls: type) -> Any:
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _MODULES:
            return sys.modules[_MODULES[root]]
    return None


def is_torch(array: Array) -> bool:
    """Whether the array is a PyTorch tensor."""
    return namespace(array).__name__ == "torch"


def is_traced(array: Array) -> bool:
    """Whether the array has no values to look at (inside `jax.jit`, `jax.grad`)."""
    return "Tracer" in type(array).__name__


def visible(array: Array) -> Array | None:
    """The array, as something whose values can be looked at; None inside a JAX transformation of it.

    A constant that `jax.jit` captures has values, but operations on it are traced: NumPy looks at it instead.
    """
    if is_traced(array):
        return None
    return sys.modules["numpy"].asarray(array) if namespace(array).__name__ == "jax.numpy" else array


def stop_gradient(x: Array) -> Array:
    """The same values, treated as a constant by automatic differentiation."""
    if is_torch(x):
        return x.detach()
    if namespace(x).__name__ == "numpy":
        return x
    return sys.modules["jax"].lax.stop_gradient(x)


def with_gradient_of(value: Array, gradient: Array) -> Array:
    """`value` going forward, the gradient of `gradient` going backward (straight-through)."""
    return stop_gradient(value) + (gradient - stop_gradient(gradient))  # in this order the value stays exact


def astype(x: Array, like: Array) -> Array:
    """`x` in the dtype of `like`, on the device of `like`."""
    return x.to(device=like.device, dtype=like.dtype) if is_torch(x) else x.astype(like.dtype)


def wide(x: Array) -> Array:
    """`x` in at least float32, so that half precision neither overflows nor loses small ratios."""
    xp = namespace(x)
    if is_torch(x):
        return x.float() if x.dtype in (xp.float16, xp.bfloat16) or not x.is_floating_point() else x
    kind = str(x.dtype)
    return x if kind in ("float32", "float64") else x.astype(xp.float32)


def machine_epsilon(x: Array) -> float:
    """Spacing of floating-point numbers around 1 in the dtype of `x`."""
    return float(namespace(x).finfo(x.dtype).eps)


def zeros(shape: tuple[int, ...], like: Array, fill: float = 0.0) -> Array:
    """An array of `fill` with the dtype and device of `like`."""
    xp = namespace(like)
    kwargs = {"device": like.device} if is_torch(like) else {}
    return xp.full(shape, fill, dtype=like.dtype, **kwargs)


def positions(count: int, like: Array) -> Array:
    """0, 1, …, count − 1 as integers on the device of `like`."""
    xp = namespace(like)
    return xp.arange(count, device=like.device) if is_torch(like) else xp.arange(count)


def stable_order(x_M: Array) -> Array:
    """Which entries come first when sorted, equal ones in the order they have."""
    xp = namespace(x_M)
    return xp.argsort(x_M, kind="stable") if xp.__name__ == "numpy" else xp.argsort(x_M, stable=True)


def absolute(x: Array) -> Array:
    """|x| with gradient sign(x), 0 at 0: PyTorch's convention (JAX's own is 1 there)."""
    return x * stop_gradient(namespace(x).sign(x))


def clip(x: Array, low: float | None, high: float | None) -> Array:
    """`x` limited to [low, high], an open side is None; on a bound the gradient is whole (JAX's own halves it)."""
    xp = namespace(x)
    if xp.__name__ == "jax.numpy":
        x = x if low is None else xp.where(x < low, low, x)
        return x if high is None else xp.where(x > high, high, x)
    return x if low is None and high is None else xp.clip(x, low, high)


def masked(x: Array, mask: Array) -> Array:
    """`x` where the mask is set and exact zeros elsewhere: garbage (even NaN) there has no value and no gradient."""
    return namespace(x).where(mask, x, 0)


def log_sum_exp(x: Array) -> Array:
    """log Σ exp(x) over the last axis, which stays with length 1; −inf where all of it is."""
    xp = namespace(x)
    top = stop_gradient(xp.amax(x, axis=-1, keepdims=True))
    top = masked(top, top > float("-inf"))
    return top + xp.log(xp.sum(xp.exp(x - top), axis=-1, keepdims=True))


def row_sum(x_NT: Array, mask_NT: Array) -> Array:
    """Σ_t over the decisions that count, as (N, 1)."""
    return namespace(x_NT).sum(masked(x_NT, mask_NT), axis=1, keepdims=True)


def row_mean(x_NT: Array, mask_NT: Array) -> Array:
    """Mean over the decisions that count, as (N, 1); 0 for a row without any."""
    return row_sum(x_NT, mask_NT) / clip(row_count(mask_NT, x_NT), 1.0, None)


def row_count(mask_NT: Array, like: Array) -> Array:
    """Number of decisions that count in each row, as (N, 1), in the dtype of `like`."""
    return astype(namespace(mask_NT).sum(mask_NT, axis=1, keepdims=True), like)


def group_index(group_M: Array) -> Array:
    """Group ids as numbers below M, so that they can index an array of M slots; any integers come in.

    What JAX knows while it traces comes back as NumPy's, so that it stays known.
    """
    xp, seen_M = namespace(group_M), visible(group_M)
    group_M = group_M.long() if is_torch(group_M) else group_M.astype(int)
    if seen_M is not None and int(seen_M.min()) >= 0 and int(seen_M.max()) < group_M.shape[0]:
        # such numbers already, as rooms give them
        return seen_M.astype(int) if xp.__name__ == "jax.numpy" else group_M
    if xp.__name__ == "jax.numpy":
        return xp.unique(group_M, return_inverse=True, size=group_M.shape[0])[1].reshape(-1)
    return xp.unique(group_M, return_inverse=True)[1].reshape(-1)


def segment_sum(x_M: Array, index_M: Array) -> Array:
    """Sum of the entries of each group, in M slots (only the first, one per group, are filled)."""
    slots = zeros(x_M.shape, x_M)
    if is_torch(x_M):
        return slots.index_add(0, index_M, x_M)
    if namespace(x_M).__name__ == "numpy":
        sys.modules["numpy"].add.at(slots, index_M, x_M)
        return slots
    return slots.at[index_M].add(x_M)


def segment_max(x_M: Array, index_M: Array) -> Array:
    """Largest entry of each group, in M slots; −inf where a slot has no entry."""
    slots = zeros(x_M.shape, x_M, float("-inf"))
    if is_torch(x_M):
        return slots.scatter_reduce(0, index_M, x_M, "amax")
    if namespace(x_M).__name__ == "numpy":
        sys.modules["numpy"].maximum.at(slots, index_M, x_M)
        return slots
    return slots.at[index_M].max(x_M)


def one_group(like_M: Array) -> Array:
    """The index of entries that are all of one group."""
    xp = namespace(like_M)
    if is_torch(like_M):
        return xp.zeros(like_M.shape, dtype=xp.int64, device=like_M.device)
    return sys.modules["numpy"].zeros(like_M.shape, int)


def expect_shape(shape: tuple[int, ...], **arrays: Array | None) -> None:
    """Raise unless every given array has this shape: broadcasting (N,) against (N, T) is how GRPO goes wrong."""
    for name, array in arrays.items():
        if array is not None and namespace(array) and tuple(array.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {tuple(shape)}")


def expect_ndim(ndim: int, **arrays: Array) -> None:
    """Raise unless every array has this many dimensions."""
    for name, array in arrays.items():
        if getattr(array, "ndim", None) != ndim:
            shape = tuple(array.shape) if hasattr(array, "shape") else type(array).__name__
            raise ValueError(f"{name} has shape {shape}, expected {ndim} dimension(s)")


def expect_finite(where: Array | None = None, **arrays: Array | None) -> None:
    """Raise on NaN or inf, naming the field and the row, except where `where` is unset (those never count)."""
    for name, given in arrays.items():
        array = None if given is None else visible(given)
        counts = None if where is None else visible(where)
        if array is None or (where is not None and counts is None):
            continue
        xp = namespace(array)
        bad = ~xp.isfinite(wide(array))
        bad = bad if counts is None else bad & counts
        if bool(xp.any(bad)):
            rows = [[int(i) for i in index] for index in xp.argwhere(bad)]
            column = "part" if "parts" in name else "decision"
            place = f"row {rows[0][0]}" + (f", {column} {rows[0][1]}" if len(rows[0]) > 1 else "")
            value = float(array[tuple(rows[0])])
            more = f" ({len(rows)} entries in all)" if len(rows) > 1 else ""
            raise ValueError(f"{name}: {place} is {value}{more}; every entry that counts must be finite")
