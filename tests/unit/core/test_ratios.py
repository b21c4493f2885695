"""Log-ratios, their exponentials, chunks and holes: values and gradients."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from grpo.core import ratios
from tests.unit.conftest import plain

NAN, INF = float("nan"), float("inf")

LOGP = [[-1.0, -2.0, -0.5], [-3.0, -0.25, -1.5]]
OLD = [[-1.5, -1.8, -0.5], [-2.0, -0.5, -1.0]]
MASK = [[1, 1, 1], [1, 0, 1]]


# --- the log-ratio ---------------------------------------------------------------------------------------------------


def test_log_ratio_is_the_difference_where_the_mask_is_set(kind):
    actual = ratios.log_ratio(kind.floats(LOGP), kind.floats(OLD), kind.bools(MASK))
    kind.close(actual, [[0.5, -0.2, 0.0], [-1.0, 0.0, -0.5]])


@pytest.mark.parametrize("garbage", [NAN, 1e30, -1e30, INF, -INF])
def test_masked_garbage_has_no_value(kind, garbage):
    mask = kind.bools([[1, 0, 0, 0]])
    logp, old = kind.floats([[-1.0, garbage, -1.0, garbage]]), kind.floats([[-1.5, -1.0, garbage, garbage]])
    assert plain(ratios.log_ratio(logp, old, mask)).tolist() == [[0.5, 0.0, 0.0, 0.0]]
    assert plain(ratios.token_ratio(ratios.log_ratio(logp, None, mask))).tolist() == [[1.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("garbage", [NAN, 1e30, -1e30, INF, -INF])
def test_masked_garbage_has_no_gradient(autodiff, garbage):
    mask = autodiff.bools([[1, 0, 0, 0]])
    logp, old = [[-1.0, garbage, -1.0, garbage]], autodiff.floats([[-1.5, -1.0, garbage, garbage]])

    def loss(x, old=old):
        return (ratios.token_ratio(ratios.log_ratio(x, old, mask)) ** 2).sum()

    np.testing.assert_allclose(autodiff.gradient(loss, logp), [[2 * math.e, 0.0, 0.0, 0.0]], rtol=1e-12, atol=0)
    assert autodiff.gradient(lambda x: loss(x, None), logp).tolist() == [[2.0, 0.0, 0.0, 0.0]]


def test_without_old_log_probs_the_ratio_is_one_and_its_gradient_too(autodiff):
    mask = autodiff.bools(MASK)
    ratio = ratios.token_ratio(ratios.log_ratio(autodiff.floats(LOGP), None, mask))
    assert plain(ratio).tolist() == [[1.0] * 3] * 2
    gradient = autodiff.gradient(lambda x: ratios.token_ratio(ratios.log_ratio(x, None, mask)).sum(), LOGP)
    assert gradient.tolist() == plain(autodiff.floats(MASK)).tolist()


def test_old_log_probs_get_no_gradient(autodiff):
    logp, mask = autodiff.floats(LOGP), autodiff.bools(MASK)
    assert not autodiff.gradient(lambda old: ratios.log_ratio(logp, old, mask).sum(), OLD).any()


@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_a_gap_of_100_stays_finite(library, dtype, gap):
    if library == "numpy" and dtype == "bfloat16":
        dtype = jnp.bfloat16
    make = {
        "numpy": lambda x: np.asarray(x, dtype),
        "torch": lambda x: torch.tensor(x, dtype=getattr(torch, str(dtype), None)),
        "jax": lambda x: jnp.asarray(x, dtype),
    }[library]
    mask = make([[1.0, 1.0]]) > 0
    log_ratio = ratios.log_ratio(make([[gap / 2, -1.0]]), make([[-gap / 2, -1.0]]), mask)
    for ratio in (
        ratios.token_ratio(log_ratio),
        ratios.sequence_ratio(log_ratio, mask),
        ratios.sequence_token_ratio(log_ratio, mask),
    ):
        assert "float32" in str(ratio.dtype)
        assert np.isfinite(plain(ratio)).all()
    expected = [[math.exp(math.copysign(20, gap)), 1.0]]
    np.testing.assert_allclose(plain(ratios.token_ratio(log_ratio)), expected, rtol=1e-6)


@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_gap_of_100_has_a_finite_gradient_in_half_precision(gap):
    for dtype in (torch.float16, torch.bfloat16):
        logp = torch.tensor([[gap / 2, -1.0]], dtype=dtype, requires_grad=True)
        old, mask = torch.tensor([[-gap / 2, -1.0]], dtype=dtype), torch.tensor([[True, True]])
        ratios.token_ratio(ratios.log_ratio(logp, old, mask)).sum().backward()
        assert logp.grad.tolist() == [[0.0, 1.0]]


def test_the_limits_of_the_log_ratio_can_be_chosen(kind):
    logp, old, mask = kind.floats([[3.0, -3.0, 30.0]]), kind.floats([[0.0] * 3]), kind.bools([[1] * 3])
    kind.close(ratios.log_ratio(logp, old, mask, -1.0, 2.0), [[2.0, -1.0, 2.0]])
    kind.close(ratios.log_ratio(logp, old, mask, None, None), [[3.0, -3.0, 30.0]])
    kind.close(ratios.log_ratio(logp, old, mask), [[3.0, -3.0, 20.0]])


def test_log_ratio_names_the_argument_of_wrong_shape(kind):
    logp, old, mask = kind.floats(LOGP), kind.floats(OLD), kind.bools(MASK)
    with pytest.raises(ValueError, match=r"^logp has shape \(3,\), expected 2 dim"):
        ratios.log_ratio(logp[0], old, mask)
    with pytest.raises(ValueError, match=r"^old_logp has shape \(2, 1\), expected \(2, 3\)"):
        ratios.log_ratio(logp, old[:, :1], mask)
    with pytest.raises(ValueError, match=r"^mask has shape \(1, 3\), expected \(2, 3\)"):
        ratios.log_ratio(logp, None, mask[:1])


# --- ratios ----------------------------------------------------------------------------------------------------------

LOG_RATIO = [[0.5, -0.2, 0.3], [-1.0, 7.0, -0.5], [9.0, 9.0, 9.0]]
HOLES = [[1, 1, 1], [1, 0, 1], [0, 0, 0]]
SEQUENCE = [math.exp(0.2), math.exp(-0.75), 1.0]
LENGTHS = [3, 2, 1]


def test_token_ratio(kind):
    kind.close(ratios.token_ratio(kind.floats([[0.0, math.log(2.0), -math.log(4.0)]])), [[1.0, 2.0, 0.25]])


@pytest.mark.parametrize("ratio", [ratios.sequence_ratio, ratios.sequence_token_ratio])
def test_the_sequence_ratio_is_the_geometric_mean_for_every_decision(kind, ratio):
    actual = ratio(kind.floats(LOG_RATIO), kind.bools(HOLES))
    kind.close(actual, [[s] * 3 for s in SEQUENCE])


def test_the_gradient_of_a_sequence_ratio_is_ratio_over_length(autodiff):
    mask = autodiff.bools(HOLES)
    for t in range(3):  # one entry of each row: it depends on all decisions of the row alike
        gradient = autodiff.gradient(lambda x, t=t: ratios.sequence_ratio(x, mask)[:, t].sum(), LOG_RATIO)
        expected = [[s / n * m for m in row] for s, n, row in zip(SEQUENCE, LENGTHS, HOLES, strict=True)]
        np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=0)


def test_the_gradient_of_a_sequence_token_ratio_is_the_ratio_itself_and_stays_with_its_decision(autodiff):
    mask = autodiff.bools(HOLES)
    for t in range(3):
        gradient = autodiff.gradient(lambda x, t=t: ratios.sequence_token_ratio(x, mask)[:, t].sum(), LOG_RATIO)
        expected = [[s if i == t else 0.0 for i in range(3)] for s in SEQUENCE]
        np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=0)


def test_the_sequence_token_ratio_has_its_own_limit(kind):
    log_ratio, mask = kind.floats([[14.0, 16.0]]), kind.bools([[1, 1]])
    kind.close(ratios.sequence_token_ratio(log_ratio, mask), [[math.exp(10.0)] * 2])
    kind.close(ratios.sequence_token_ratio(log_ratio, mask, None), [[math.exp(15.0)] * 2])


def test_the_sequence_token_ratio_is_one_number_a_row_in_float32(kind):
    log_ratio, mask = kind.floats([[5.0, -5.0, 9e-4]], "float32"), kind.bools([[1, 1, 1]])
    actual = plain(ratios.sequence_token_ratio(log_ratio, mask))
    assert actual.tolist() == plain(ratios.sequence_ratio(log_ratio, mask)).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, mask: ratios.sequence_ratio(x, mask),
        lambda x, mask: ratios.sequence_token_ratio(x, mask),
        lambda x, mask: ratios.fold(x, mask, 2),
    ],
)
def test_ratios_name_a_mask_of_wrong_shape(kind, call):
    with pytest.raises(ValueError, match=r"^mask has shape \(3, 1\), expected \(3, 3\)"):
        call(kind.floats(LOG_RATIO), kind.bools(HOLES)[:, :1])


# --- chunks ----------------------------------------------------------------------------------------------------------

FIVE = [[1.0, 2.0, 4.0, 8.0, 16.0], [1.0, NAN, NAN, NAN, 5.0]]
FIVE_MASK = [[1, 1, 1, 1, 1], [1, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("size", "total", "mean", "mask"),
    [
        (1, [[1, 2, 4, 8, 16], [1, 0, 0, 0, 5]], [[1, 2, 4, 8, 16], [1, 0, 0, 0, 5]], [[1] * 5, [1, 0, 0, 0, 1]]),
        (2, [[3, 12, 16], [1, 0, 5]], [[1.5, 6, 16], [1, 0, 5]], [[1, 1, 1], [1, 0, 1]]),
        (3, [[7, 24], [1, 5]], [[7 / 3, 12], [1, 5]], [[1, 1], [1, 1]]),
        (5, [[31], [6]], [[6.2], [3]], [[1], [1]]),
        (8, [[31], [6]], [[6.2], [3]], [[1], [1]]),
    ],
)
def test_fold_for_lengths_that_divide_and_do_not(kind, size, total, mean, mask):
    x, given = kind.floats(FIVE), kind.bools(FIVE_MASK)
    kind.close(ratios.fold(x, given, size), total)
    kind.close(ratios.fold_mean(x, given, size), mean)
    kind.close(ratios.fold_mask(given, size), mask)
    assert "bool" in str(ratios.fold_mask(given, size).dtype)


def test_fold_passes_the_gradient_of_a_chunk_to_its_decisions(autodiff):
    mask, weight = autodiff.bools(FIVE_MASK), autodiff.floats([[1.0, 10.0, 100.0]])
    gradient = autodiff.gradient(lambda x: (ratios.fold(x, mask, 2) * weight).sum(), FIVE)
    assert gradient.tolist() == [[1.0, 1.0, 10.0, 10.0, 100.0], [1.0, 0.0, 0.0, 0.0, 100.0]]


def test_a_folded_row_of_log_ratios_is_the_log_of_the_product_of_ratios(kind):
    x, mask = kind.floats(LOG_RATIO), kind.bools(HOLES)
    product = plain(ratios.token_ratio(ratios.fold(x, mask, 3)))
    rows = zip(LOG_RATIO, HOLES, strict=True)
    one_by_one = [[math.prod(math.exp(d) for d, m in zip(*row, strict=True) if m)] for row in rows]
    np.testing.assert_allclose(product, one_by_one, rtol=1e-12)


# --- holes -----------------------------------------------------------------------------------------------------------
