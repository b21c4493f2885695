"""The seam between the core and three array libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from grpo.core import arrays
from tests.unit.conftest import plain

NAN, INF = float("nan"), float("inf")


# --- which library ---------------------------------------------------------------------------------------------------


def test_namespace_is_the_library_of_the_array(kind):
    assert arrays.namespace(kind.floats([1.0])) is kind.module


def test_namespace_knows_parameters_scalars_and_tracers():
    seen = []
    jax.jit(lambda x: seen.append(arrays.namespace(x)) or x)(jnp.ones(2))
    assert seen == [jnp]
    assert arrays.namespace(torch.nn.Parameter(torch.ones(2))) is torch
    assert arrays.namespace(np.float64(1.0)) is np


def test_namespace_of_several_is_that_of_the_first_array(kind):
    assert arrays.namespace(None, kind.floats([1.0])) is kind.module
    assert arrays.namespace(torch.ones(1), np.ones(1)) is torch


@pytest.mark.parametrize(("x", "word"), [([1.0, 2.0], "list"), (None, "NoneType"), (3.5, "float")])
def test_namespace_refuses_what_is_no_array_and_says_what_to_do(x, word):
    with pytest.raises(TypeError, match=rf"got {word}; convert it first, e\.g\. numpy\.asarray"):
        arrays.namespace(x)


def test_namespace_of_nothing_says_so():
    with pytest.raises(TypeError, match="got nothing"):
        arrays.namespace()


def test_is_torch(kind):
    assert arrays.is_torch(kind.floats([1.0])) is (kind.name == "torch")


def test_is_traced_only_inside_a_transformation(kind):
    assert not arrays.is_traced(kind.floats([1.0]))
    seen = []
    jax.jit(lambda x: seen.append(arrays.is_traced(x)) or x)(jnp.ones(2))
    jax.grad(lambda x: seen.append(arrays.is_traced(x)) or x)(1.0)
    assert seen == [True, True]


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "int64", "int32", "bool", "uint8"])
def test_wide_makes_float32_of_narrow_and_whole_numbers(kind, dtype):
    x = arrays.wide(kind.from_numpy(np.array([0, 1], dtype=dtype)))
    assert "float32" in str(x.dtype)
    kind.close(x, [0.0, 1.0])


@pytest.mark.parametrize("x", [torch.tensor([1.5], dtype=torch.bfloat16), jnp.asarray([1.5], jnp.bfloat16)])
def test_wide_makes_float32_of_bfloat16(x):
    x = arrays.wide(x)
    assert "bfloat16" not in str(x.dtype)
    assert "float32" in str(x.dtype)
    assert plain(x).tolist() == [1.5]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_leaves_the_rest_alone(kind, dtype):
    x = kind.floats([1.0], dtype)
    assert arrays.wide(x) is x


def test_machine_epsilon(kind):
    assert arrays.machine_epsilon(kind.floats([1.0])) == 2.0**-52
    assert arrays.machine_epsilon(kind.floats([1.0], "float32")) == 2.0**-23


def test_astype_takes_the_dtype_of_the_other(kind):
    x = arrays.astype(kind.bools([1, 0]), kind.floats([0.0], "float32"))
    assert "float32" in str(x.dtype)
    kind.close(x, [1.0, 0.0])


def test_zeros_and_positions(kind):
    x = arrays.zeros((2, 1), kind.floats([0.0], "float32"), 2.5)
    assert "float32" in str(x.dtype)
    kind.close(x, [[2.5], [2.5]])
    kind.close(arrays.positions(3, x), [0, 1, 2])
    assert "int" in str(arrays.positions(3, x).dtype)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(None, None, [-3, 0, 3]), (-1, None, [-1, 0, 3]), (None, 1, [-3, 0, 1]), (-1, 2, [-1, 0, 2])],
)
def test_clip_with_open_sides(kind, low, high, expected):
    kind.close(arrays.clip(kind.floats([-3.0, 0.0, 3.0]), low, high), expected)


def test_clip_has_its_whole_gradient_on_a_bound_and_none_beyond(autodiff):
    gradient = autodiff.gradient(lambda x: arrays.clip(x, -1.0, 2.0).sum(), [-1.5, -1.0, 0.0, 2.0, 2.5])
    assert gradient.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_absolute_has_no_gradient_at_zero(autodiff):
    autodiff.close(arrays.absolute(autodiff.floats([-2.0, 0.0, 3.0])), [2.0, 0.0, 3.0])
    assert autodiff.gradient(lambda x: arrays.absolute(x).sum(), [-2.0, 0.0, 3.0]).tolist() == [-1.0, 0.0, 1.0]


def test_visible_is_nothing_inside_a_transformation_and_the_values_of_a_captured_constant():
    seen, constant = [], jnp.asarray([3.0])
    jax.jit(lambda x: seen.extend([arrays.visible(x), arrays.visible(constant)]) or x)(jnp.ones(1))
    assert seen[0] is None
    assert seen[1].tolist() == [3.0]


def test_masked_replaces_garbage_by_zero(kind):
    kind.close(arrays.masked(kind.floats([1.0, NAN, INF, 4.0]), kind.bools([1, 0, 0, 1])), [1, 0, 0, 4])


def test_masked_garbage_has_no_gradient(autodiff):
    mask = autodiff.bools([1, 0, 0])
    gradient = autodiff.gradient(lambda x: (arrays.masked(x, mask) ** 2).sum(), [3.0, NAN, INF])
    assert gradient.tolist() == [6.0, 0.0, 0.0]


def test_row_sum_and_row_mean_count_only_the_mask(kind):
    x, mask = (
        kind.floats([[1.0, 2.0, NAN], [NAN, NAN, NAN], [3.0, 4.0, 8.0]]),
        kind.bools([[1, 1, 0], [0] * 3, [1] * 3]),
    )
    kind.close(arrays.row_sum(x, mask), [[3.0], [0.0], [15.0]])
    kind.close(arrays.row_mean(x, mask), [[1.5], [0.0], [5.0]])


# --- gradients -------------------------------------------------------------------------------------------------------


def test_stop_gradient_keeps_the_value_and_drops_the_gradient(autodiff):
    autodiff.close(arrays.stop_gradient(autodiff.floats([2.0])), [2.0])
    assert autodiff.gradient(lambda x: (arrays.stop_gradient(x) * x).sum(), [2.0]).tolist() == [2.0]


def test_stop_gradient_of_numpy_is_the_array():
    x = np.ones(2)
    assert arrays.stop_gradient(x) is x


def test_with_gradient_of_has_the_value_of_one_and_the_gradient_of_the_other(autodiff):
    x = [0.5, -2.0]
    autodiff.close(arrays.with_gradient_of(autodiff.floats(x) * 3, autodiff.floats(x) ** 2), [1.5, -6.0])
    gradient = autodiff.gradient(lambda x: arrays.with_gradient_of(x * 3, x**2).sum(), x)
    assert gradient.tolist() == [1.0, -4.0]


def test_with_gradient_of_is_exactly_the_value_however_large_the_other_is(kind):
    value, gradient = kind.floats([0.01, -15.3], "float32"), kind.floats([4e8, 4.5e6], "float32")
    assert plain(arrays.with_gradient_of(value, gradient)).tolist() == plain(value).tolist()


# --- groups ----------------------------------------------------------------------------------------------------------

IDS = [10**12, -5, 10**12, 0, -5, 7, 10**12]


def same_partition(index, ids):
    pairs = {(int(i), g) for i, g in zip(plain(index), ids, strict=True)}
    return len(pairs) == len({i for i, _ in pairs}) == len(set(ids))


def test_group_index_numbers_any_integers(kind):
    index = arrays.group_index(kind.ints(IDS))
    assert same_partition(index, IDS)
    assert 0 <= plain(index).min() <= plain(index).max() < len(IDS)


def test_group_index_under_jit():
    index = jax.jit(arrays.group_index)(jnp.asarray(IDS))
    assert same_partition(index, IDS)
    assert index.tolist() == arrays.group_index(np.asarray(IDS)).tolist()


@pytest.mark.parametrize("ids", [[0, 2, 0, 1], [2, 2, 0, 0], [3, 3, 3, 0], [4, 0, 4, 4], [-1, 0, -1, 1]])
def test_group_index_stays_below_the_number_of_entries(kind, ids):
    index = arrays.group_index(kind.ints(ids))
    assert same_partition(index, ids)
    assert 0 <= plain(index).min() <= plain(index).max() < len(ids)


def test_group_index_of_booleans_can_index(kind):
    index = arrays.group_index(kind.bools([1, 0, 1]))
    kind.close(arrays.segment_sum(kind.floats([1.0, 2.0, 4.0]), index)[index], [5.0, 2.0, 5.0])


def test_group_index_of_a_constant_captured_by_jit():
    group = jnp.asarray([0, 0, 1])
    assert jax.jit(lambda x: x + arrays.group_index(group))(jnp.zeros(3, int)).tolist() == [0, 0, 1]


def test_segment_sum_fills_one_slot_a_group(kind):
    total = arrays.segment_sum(kind.floats([1.0, 2.0, 4.0, 8.0]), kind.ints([1, 0, 1, 1]))
    kind.close(total, [2.0, 13.0, 0.0, 0.0])


def test_segment_max_is_minus_infinity_without_entries(kind):
    top = arrays.segment_max(kind.floats([-1.0, -2.0, -4.0, -8.0]), kind.ints([1, 0, 1, 1]))
    kind.close(top, [-2.0, -1.0, -INF, -INF])


def test_segment_sum_passes_the_gradient_to_every_entry(autodiff):
    index, weight = autodiff.ints([1, 0, 1]), autodiff.floats([10.0, 100.0, 0.0])
    gradient = autodiff.gradient(lambda x: (arrays.segment_sum(x, index) * weight).sum(), [1.0, 2.0, 3.0])
    assert gradient.tolist() == [100.0, 10.0, 100.0]


def test_row_mean_of_one_decision_is_its_value(eager):
    eager.close(arrays.row_mean(eager.floats([[7.0, NAN]]), eager.bools([[1, 0]])), [[7.0]])


def test_segment_operations_leave_their_input_alone():
    x, index = np.array([1.0, 2.0]), np.array([0, 0])
    arrays.segment_sum(x, index)
    arrays.segment_max(x, index)
    assert (x.tolist(), index.tolist()) == ([1.0, 2.0], [0, 0])


# --- checks at the door ----------------------------------------------------------------------------------------------


def test_expect_shape_names_the_array_and_both_shapes(kind):
    good, bad = kind.floats([[1.0, 2.0]]), kind.floats([1.0, 2.0])
    arrays.expect_shape((1, 2), a=good, b=None)
    with pytest.raises(ValueError, match=r"^mask has shape \(2,\), expected \(1, 2\)$"):
        arrays.expect_shape((1, 2), a=good, mask=bad)


def test_expect_ndim_names_the_array(kind):
    arrays.expect_ndim(1, value=kind.floats([1.0]))
    with pytest.raises(ValueError, match=r"^value has shape \(1, 1\), expected 1 dimension\(s\)$"):
        arrays.expect_ndim(1, value=kind.floats([[1.0]]))


def test_expect_ndim_names_the_type_of_what_is_no_array():
    with pytest.raises(ValueError, match=r"^value has shape list, expected 1 dimension\(s\)$"):
        arrays.expect_ndim(1, value=[1.0])


@pytest.mark.parametrize(("bad", "word"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
def test_expect_finite_names_field_row_and_value(kind, bad, word):
    with pytest.raises(ValueError, match=rf"^reward_N: row 2 is {word}; every entry that counts must be finite$"):
        arrays.expect_finite(reward_N=kind.floats([0.0, 1.0, bad]))


def test_expect_finite_names_the_decision_and_counts_the_rest(kind):
    x = kind.floats([[0.0, 1.0, 2.0], [0.0, 1.0, NAN], [INF, NAN, 1.0]])
    with pytest.raises(ValueError, match=r"^old_logp_NT: row 1, decision 2 is nan \(3 entries in all\);"):
        arrays.expect_finite(fine=kind.floats([1.0]), old_logp_NT=x)


def test_expect_finite_ignores_what_does_not_count(kind):
    x = kind.floats([NAN, 1.0, INF])
    arrays.expect_finite(where=kind.bools([0, 1, 0]), x=x, missing=None)
    with pytest.raises(ValueError, match=r"^x: row 2 is inf;"):
        arrays.expect_finite(where=kind.bools([0, 1, 1]), x=x)


def test_expect_finite_looks_at_half_precision(kind):
    with pytest.raises(ValueError, match="row 0 is inf"):
        arrays.expect_finite(x=kind.floats([INF], "float16"))


def test_expect_finite_lets_a_constant_captured_by_jit_pass():
    constant = jnp.ones(3)

    def identity(x):
        arrays.expect_finite(constant=constant)
        return x

    assert jax.jit(identity)(jnp.ones(2)).tolist() == [1.0, 1.0]


def test_expect_finite_lets_traced_arrays_pass():
    def identity(x):
        arrays.expect_finite(x=x)
        return x

    assert np.isnan(jax.jit(identity)(jnp.asarray([NAN]))).all()
