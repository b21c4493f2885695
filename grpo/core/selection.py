"""Which tries of a group learn, where more are sampled than are learned from: masks over the rows of all groups.

What the others are worth is known, and they are compared with; what is saved is to score them and to learn from them.
Rows without a reward (weight 0) are chosen last, and of equal ones the first.
"""

from __future__ import annotations

from grpo.core.advantages import entries, group_std
from grpo.core.arrays import (
    Array,
    astype,
    machine_epsilon,
    namespace,
    positions,
    segment_sum,
    stable_order,
    zeros,
)


def most_varied(value_M: Array, group_M: Array, count: int, weight_M: Array | None = None) -> Array:
    """The `count` tries of each group whose rewards vary most: some of the best and some of the worst.

    No other choice of as many has a larger variance. PODS, arXiv:2504.13818 (max-variance down-sampling).
    """
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    xp = namespace(value_M)
    kept_M, spread_M, valid_M = weight_M > 0, zeros(tuple(value_M.shape), value_M, -1.0), weight_M > 0
    place_M = _places(value_M, index_M, weight_M)
    for best in sorted(range(count + 1), key=lambda best: abs(2 * best - count)):  # of equal ones the most balanced
        some_M = _ends(place_M, index_M, valid_M, best, count - best)
        found_M = group_std(value_M, index_M, astype(some_M & valid_M, value_M), 0.0)
        better_M = found_M > spread_M * (1 + 4 * machine_epsilon(value_M))
        kept_M, spread_M = xp.where(better_M, some_M, kept_M), xp.where(better_M, found_M, spread_M)
    return kept_M


def extremes(value_M: Array, group_M: Array, count: int, weight_M: Array | None = None) -> Array:
    """The best and the worst of each group, `count` in all, one best more where that is odd. PODS, arXiv:2504.13818."""
    value_M, index_M, weight_M = entries(value_M, group_M, weight_M)
    place_M = _places(value_M, index_M, weight_M)
    return _ends(place_M, index_M, weight_M > 0, count - count // 2, count // 2)


def smallest(key_M: Array, group_M: Array, count: int, weight_M: Array | None = None) -> Array:
    """The `count` tries of each group with the smallest key.

    Their lengths: GFPO, arXiv:2508.09726. Random numbers: as many at random.
    """
    key_M, index_M, weight_M = entries(key_M, group_M, weight_M)
    return _places(key_M, index_M, weight_M) < count


def _ends(place_M: Array, index_M: Array, valid_M: Array, best: int, worst: int) -> Array:
    """So many of the best and so many of the worst of each group by their places; all where it has no more."""
    members_M = segment_sum(astype(valid_M, place_M), index_M)[index_M]
    last_M = ~valid_M & (place_M < best + worst)
    return last_M | (valid_M & ((place_M < worst) | (place_M >= members_M - best)))


def _places(key_M: Array, index_M: Array, weight_M: Array) -> Array:
    """Each entry's place in its group by its key, 0 the smallest; those of weight 0 come last."""
    xp = namespace(key_M)
    order_M = stable_order(xp.where(weight_M > 0, key_M, zeros((), key_M, float("inf"))))
    order_M = order_M[stable_order(index_M[order_M])]  # by group, and by key within it
    sizes_M = segment_sum(positions(len(index_M), index_M) * 0 + 1, index_M)
    first_M = xp.cumsum(sizes_M, axis=0) - sizes_M
    return stable_order(order_M) - first_M[index_M]
