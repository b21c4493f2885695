"""Draws that are written out are JAX's own, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

from grpo.control.compiled.draws import quick
from grpo.control.compiled.room import seed_key
from grpo.envs.functions.numbers import numbers


def drawn(key, number) -> list:
    """All that programs ask for, and what keys are made by."""
    folded = jax.random.fold_in(key, number)
    first, second = jax.random.split(folded)
    return [
        jax.random.uniform(first, (7,), "float32"),
        jax.random.normal(second, (5, 3), "float32"),
        jax.random.uniform(first, (3,), "float64"),
        jax.random.bits(second, (2, 3), "uint8"),
        jax.random.uniform(second, ()),
        jax.random.key_data(jax.random.split(first, (2, 3))),
    ]


def test_draws_are_those_of_jax() -> None:
    with numbers():
        for number in (0, 1, 4_000_000_000):
            key = jax.random.wrap_key_data(seed_key(number))
            for one, other in zip(jax.jit(drawn)(quick(key), number), drawn(key, number), strict=True):
                np.testing.assert_array_equal(one, other)
        keys = jax.random.split(key, 4)
        together = jax.vmap(lambda key: jax.random.normal(quick(key), (3,)))(keys)
        np.testing.assert_array_equal(together, [jax.random.normal(key, (3,)) for key in keys])


def test_other_numbers_of_jax_are_left_to_it() -> None:
    for name in ("rbg", "threefry2x32"):
        with jax.threefry_partitionable(name == "rbg"):
            key = jax.random.key(3, impl=name)
            assert quick(key) is key
