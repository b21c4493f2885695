"""The held-out linear baseline."""

import numpy as np
import pytest

from grpo.core.advantages import ridge_baselines


def ridge_baseline(feature_MD, target_M, half_M, weight_M=None, ridge=1e-3):
    return ridge_baselines(feature_MD, target_M, half_M, [ridge], weight_M)[0]


def noisy(seed: int = 0, count: int = 60):
    random = np.random.default_rng(seed)
    feature_MD = random.normal(size=(count, 3)) * [1.0, 50.0, 0.02] + [0.0, 7.0, -1.0]
    half_M = np.arange(count) % 2
    target_M = feature_MD @ [2.0, -0.1, 30.0] + 4.0 + random.normal(size=count)
    return feature_MD, target_M, half_M


def test_a_linear_target_is_found_exactly(kind):
    feature_MD, _, half_M = noisy()
    target_M = feature_MD @ [2.0, -0.1, 30.0] + 4.0
    found = ridge_baseline(kind.floats(feature_MD), kind.floats(target_M), kind.ints(half_M), ridge=0.0)
    kind.close(found, target_M, 1e-9)


def test_each_half_is_predicted_by_the_other_halfs_least_squares(kind):
    feature_MD, target_M, half_M = noisy()
    found = ridge_baseline(kind.floats(feature_MD), kind.floats(target_M), kind.ints(half_M), ridge=0.0)
    expected = np.empty_like(target_M)
    for half in (0, 1):
        one_MD = np.column_stack([feature_MD, np.ones(len(feature_MD))])
        weights = np.linalg.lstsq(one_MD[half_M != half], target_M[half_M != half], rcond=None)[0]
        expected[half_M == half] = one_MD[half_M == half] @ weights
    kind.close(found, expected, 1e-9)


def test_a_prediction_does_not_depend_on_its_own_half():
    feature_MD, target_M, half_M = noisy()
    other_M = np.where(half_M == 0, target_M + 100.0, target_M)
    before, after = ridge_baseline(feature_MD, target_M, half_M), ridge_baseline(feature_MD, other_M, half_M)
    np.testing.assert_array_equal(before[half_M == 0], after[half_M == 0])
    assert (after[half_M == 1] > before[half_M == 1] + 50).all()


def test_entries_without_weight_are_not_fitted_on():
    feature_MD, target_M, half_M = noisy()
    weight_M = np.ones(len(target_M))
    weight_M[:10] = 0.0
    wild_M = target_M.copy()
    wild_M[:10] = 1e6
    found, expected = (ridge_baseline(feature_MD, y, half_M, weight_M) for y in (wild_M, target_M))
    np.testing.assert_allclose(found, expected)


def test_a_strong_penalty_leaves_the_other_halfs_mean():
    feature_MD, target_M, half_M = noisy()
    found = ridge_baseline(feature_MD, target_M, half_M, ridge=1e9)
    for half in (0, 1):
        np.testing.assert_allclose(found[half_M == half], target_M[half_M != half].mean(), atol=1e-6)


def test_features_that_never_move_and_empty_halves_are_survived():
    feature_MD, target_M, _ = noisy(count=8)
    feature_MD[:, 1] = 5.0
    found = ridge_baseline(feature_MD, target_M, np.zeros(8, int))
    np.testing.assert_array_equal(found, 0.0)  # nobody in the other half to learn from


def test_shapes_are_checked():
    feature_MD, target_M, half_M = noisy()
    with pytest.raises(ValueError, match="half"):
        ridge_baseline(feature_MD, target_M, half_M[:-1])


def test_several_penalties_at_once_are_each_alone():
    feature_MD, target_M, half_M = noisy()
    together = ridge_baselines(feature_MD, target_M, half_M, [1e-3, 0.1, 10.0])
    for found, ridge in zip(together, (1e-3, 0.1, 10.0), strict=True):
        np.testing.assert_allclose(found, ridge_baseline(feature_MD, target_M, half_M, ridge=ridge))
