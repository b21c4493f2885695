"""From per-decision numbers to one number. The denominators are those of the *whole* minibatch.

Each reduction is a sum over what it is given divided by a global count, so adding up micro-batches, accumulation
steps or ranks gives the same loss and the same gradient as one big batch.
"""

from __future__ import annotations

from typing import NamedTuple

from grpo.core.arrays import Array, clip, expect_ndim, expect_shape, is_traced, masked, namespace, row_mean, wide


class Denominators(NamedTuple):
    """What one optimizer step averages over, counted on the whole minibatch (and all ranks) before it is split."""

    tokens: float
    """Decisions that count."""
    rows: float
    """Trajectories that were not dropped, with or without the fully masked ones."""
    selected: float
    """Decisions that also passed the entropy gate: what an entropy bonus averages over."""
    length: float
    """The constant length of Dr. GRPO: the longest a trajectory may be, not how this batch happens to be padded."""


def count(
    mask_NT: Array,
    count_empty_rows: bool,
    selected_NT: Array | None = None,
    present_N: Array | None = None,
    length: float = 1.0,
) -> Denominators:
    """Denominators of a minibatch; none is below 1, so that a fully masked one has loss 0 instead of NaN.

    `present_N`: rows that are in the batch at all; others are not counted even where empty rows are.
    """
    expect_ndim(2, mask=mask_NT)
    xp = namespace(mask_NT)
    tokens = _counted(mask_NT)
    counted_N = xp.any(mask_NT, axis=1)
    if count_empty_rows:
        counted_N = counted_N | ~counted_N if present_N is None else counted_N | present_N
    selected = tokens if selected_NT is None else _counted(mask_NT & selected_NT)
    return Denominators(tokens, _counted(counted_N), selected, length)


def _counted(mask: Array) -> float:
    """How many are set, at least 1; inside a JAX transformation an array that has no value yet."""
    found: Array = namespace(mask).sum(mask)
    return clip(wide(found), 1.0, None) if is_traced(found) else max(float(found), 1.0)


def _total(x_NT: Array, mask_NT: Array) -> Array:
    expect_shape(tuple(x_NT.shape), mask=mask_NT)
    return namespace(x_NT).sum(masked(wide(x_NT), mask_NT))


def token_mean(x_NT: Array, mask_NT: Array, over: Denominators) -> Array:
    """Σ x / (number of decisions): every decision weighs the same. DAPO, arXiv:2503.14476 (eq. 8)."""
    return _total(x_NT, mask_NT) / over.tokens


def sequence_mean(x_NT: Array, mask_NT: Array, over: Denominators) -> Array:
    """Mean over rows of the mean over the row's decisions: all rows weigh the same. arXiv:2402.03300 (eq. 3)."""
    expect_shape(tuple(x_NT.shape), mask=mask_NT)
    return namespace(x_NT).sum(row_mean(wide(x_NT), mask_NT)) / over.rows


def sequence_sum(x_NT: Array, mask_NT: Array, over: Denominators) -> Array:
    """Mean over rows of the sum over the row's decisions: the plain policy gradient. LUSPO, arXiv:2602.05261."""
    return _total(x_NT, mask_NT) / over.rows


def fixed_length(x_NT: Array, mask_NT: Array, over: Denominators) -> Array:
    """Σ x / (rows · a constant length): no bias by length. Dr. GRPO, arXiv:2503.20783."""
    return _total(x_NT, mask_NT) / (over.rows * over.length)
