"""JAX's own random numbers, drawn faster on a CPU: the same bits, without its loop over Threefry's rounds.

JAX goes through the rounds in a loop there, each of them several operations of XLA's; written out, all are one. To draw
eight numbers was half of what a step of eight small episodes took.

Letters: M numbers.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as extended

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
"""Threefry 2×32: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011)."""


def quick(key: Any) -> Any:
    """The same key, whose draws are written out; for what stays in the program (environments get JAX's own)."""
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if str(jax.random.key_impl(key)) != "threefry2x32" or not partitionable:
        return key  # other bits were asked for
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_QUICK)


def threefry(key: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """The two words that a key makes of each pair."""
    first, second = key[0], key[1]
    keys = first, second, first ^ second ^ jnp.uint32(0x1BD11BDA)
    high, low = high + first, low + second
    for i in range(5):
        for turn in ROTATIONS[i % 2]:
            high = high + low
            low = high ^ ((low << turn) | (low >> (32 - turn)))
        high, low = high + keys[(i + 1) % 3], low + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return high, low


def _each(key: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    number_M = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    return threefry(key, jnp.zeros_like(number_M), number_M)


def _bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
    high, low = _each(key, shape)
    if width == 64:
        return ((high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)).reshape(shape)
    return (high ^ low).astype(f"uint{width}").reshape(shape)


def _split(key: Any, shape: tuple[int, ...]) -> Any:
    return jnp.stack(_each(key, shape), -1).reshape(*shape, 2)


def _seed(number: Any) -> Any:
    return jnp.stack([jnp.uint32(0), jnp.asarray(number).astype(jnp.uint32)])


def _fold_in(key: Any, number: Any) -> Any:
    return jnp.stack(threefry(key, *_seed(number)))


_QUICK: Any = extended.define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_bits,
    fold_in=_fold_in,
    name="threefry written out",
    tag="tfo",
)
