"""What is expected of a decision: held out, in closed form where that is known, and the best of three when asked."""

from dataclasses import replace

import numpy as np
import pytest

from grpo.control import GRPOTrainer
from grpo.control.baselines.linear import MAX_FEATURES, RIDGES, choose, explained, features, linear, returns_to_go
from grpo.control.play import Episodes

HORIZON = 10


def episodes(observation, reward_NT, length_N=None, offset_N=None, errors=None) -> Episodes:
    """Episodes by hand; without lengths all are of the table's."""
    reward_NT = np.asarray(reward_NT, float)
    rows, steps = reward_NT.shape
    length_N = np.full(rows, steps) if length_N is None else np.asarray(length_N)
    no = np.zeros(rows, bool)
    return Episodes(
        observation=observation,
        raw=observation,
        action_NT=np.zeros((rows, steps), int),
        logp_NT=np.zeros((rows, steps)),
        out_NTF=None,
        reward_NT=reward_NT,
        mask_NT=np.arange(steps)[None] < length_N[:, None],
        offset_N=np.zeros(rows, int) if offset_N is None else np.asarray(offset_N),
        terminated_N=~no,
        truncated_N=no,
        success_N=np.full(rows, np.nan),
        last=None,
        errors=errors or {},
        steps_N=length_N,
    )


def played(seed=0, rows=6, steps=5, **more) -> Episodes:
    """Rows of random numbers, some of them cut off."""
    random = np.random.default_rng(seed)
    observation = random.normal(size=(rows, steps, 2)).astype(np.float32)
    made = episodes(observation, random.normal(size=(rows, steps)), length_N=[5, 4, 3, 2, 1, 5], **more)
    cut = np.array([True, False, True, False, False, False])
    last = random.normal(size=(rows, 2)).astype(np.float32)
    return replace(made, truncated_N=cut, terminated_N=~cut, last=last)


def random_episodes(rows=8, steps=6, seed=0, **more) -> Episodes:
    random = np.random.default_rng(seed)
    observation = random.normal(size=(rows, steps, 2)).astype(np.float32)
    return episodes(observation, random.normal(size=(rows, steps)), **more)


GROUP = np.array([0, 0, 0, 0, 1, 1, 1, 1])
HALF = np.array([0, 1] * 4)


def test_returns_are_discounted_and_end_with_the_row():
    played = episodes(np.zeros((2, 3, 1)), [[1, 2, 4], [1, 2, 99]], length_N=[3, 2])
    found = returns_to_go(played, np.where(played.mask_NT, played.reward_NT, 0.0), 0.5)
    np.testing.assert_allclose(found, [[3, 4, 4], [2, 2, 0]])


# --- linear ---------------------------------------------------------------------------------------------------------


def by_hand(played, return_NT, half_N):
    """(K, N, T): the held-out expectations for each penalty, from the normal equations."""
    mask = played.mask_NT
    t = np.tile(np.arange(mask.shape[1]) / HORIZON, (len(mask), 1))[..., None]
    o = played.observation.astype(float)
    x = np.concatenate([t, t**2, t**3, o, o**2], -1)
    z = np.concatenate([(x - x[mask].mean(0)) / x[mask].std(0), np.ones((*mask.shape, 1))], -1)
    found = np.zeros((len(RIDGES), *mask.shape))
    for half in (0, 1):
        fit, apply = mask & (half_N != half)[:, None], mask & (half_N == half)[:, None]
        for k, ridge in enumerate(RIDGES):
            penalty = ridge * fit.sum() * np.diag([1.0] * x.shape[-1] + [0.0])
            found[k][apply] = z[apply] @ np.linalg.solve(z[fit].T @ z[fit] + penalty, z[fit].T @ return_NT[fit])
    return found


def test_the_fit_is_that_of_ridge_regression_with_the_penalty_that_leaves_least():
    played = random_episodes(length_N=[6, 5, 4, 6, 2, 6, 1, 3])
    mask, chosen = played.mask_NT, set()
    for tilt in (0.0, 0.5, 10.0):
        noise = np.random.default_rng(1).normal(size=(8, 6))
        return_NT = np.where(mask, tilt * played.observation[..., 0] + noise, 0.0)
        found_KNT = by_hand(played, return_NT, HALF)
        best = np.square(return_NT - found_KNT).sum((1, 2)).argmin()
        chosen.add(int(best))
        found = linear(played, return_NT, HALF, HORIZON)
        np.testing.assert_allclose(found[mask], found_KNT[best][mask], rtol=1e-6, atol=1e-9)
        assert not found[~mask].any()
    assert len(chosen) > 1


@pytest.mark.parametrize("row", [0, 5])
def test_no_row_teaches_its_own_half(row):
    """Whatever becomes of its reward, what is expected of it comes from fits that never saw it."""
    played = random_episodes()
    return_NT = played.reward_NT.copy()
    same = HALF[row] == HALF
    known_KNT = by_hand(played, return_NT, HALF)[:, same]
    before = linear(played, return_NT, HALF, HORIZON)
    return_NT[row] += 100.0
    after = linear(played, return_NT, HALF, HORIZON)
    for found in (before, after):
        assert min(np.abs(found[same] - known_NT).max() for known_NT in known_KNT) < 1e-6
    assert np.abs(after[~same] - before[~same]).max() > 1.0  # the other half does learn from it


def test_a_return_that_is_linear_in_what_is_seen_is_found():
    played = random_episodes(rows=20, steps=10)
    o = played.observation.astype(float)
    return_NT = 3 + 2 * o[..., 0] - o[..., 1] ** 2 + np.arange(10) / HORIZON
    found = linear(played, return_NT, np.arange(20) % 2, HORIZON)
    np.testing.assert_allclose(found, return_NT, atol=0.05)


def test_failed_rows_teach_nothing_and_are_not_judged():
    whole = random_episodes()
    failed = random_episodes(errors={2: "fell over"})
    return_NT = whole.reward_NT.copy()
    return_NT[2] = 1e6
    found = linear(failed, return_NT, HALF, HORIZON)
    assert not found[2].any() and np.abs(found).max() < 100
    everyone = dict.fromkeys(range(8), "fell over")
    assert not linear(random_episodes(errors=everyone), return_NT, HALF, HORIZON).any()
    codes = episodes(np.zeros((8, 6), int), return_NT, errors=everyone)
    assert not linear(codes, return_NT, HALF, HORIZON).any()
    assert choose(codes, return_NT, GROUP, HALF, HORIZON).explained is None


# --- what the fit sees ----------------------------------------------------------------------------------------------


def test_features_are_codes_numbers_and_how_much_lies_behind():
    seen = {
        "code": np.array([[0, 2], [1, 0]]),
        "flags": np.array([[[1, 0], [0, 0]], [[1, 1], [0, 1]]], np.int8),
        "picture": np.zeros((2, 2, MAX_FEATURES + 1), np.uint8),
        "x": np.array([[[2.0], [3.0]], [[4.0], [5.0]]], np.float32),
    }
    played = episodes(seen, np.zeros((2, 2)), length_N=[2, 1], offset_N=[0, 5])
    found = features(played, played.mask_NT, HORIZON)
    t = np.array([0.0, 0.1, 0.5])
    np.testing.assert_allclose(found[:, :3], np.stack([t, t**2, t**3], 1))
    np.testing.assert_array_equal(found[:, 3:6], np.eye(3)[[0, 2, 1]])
    np.testing.assert_array_equal(found[:, 6:8], [[1, 0], [0, 0], [1, 1]])
    np.testing.assert_array_equal(found[:, 8:], [[2, 4], [3, 9], [4, 16]])


# --- auto -----------------------------------------------------------------------------------------------------------


def chosen(played, return_NT):
    found = choose(played, return_NT, GROUP, HALF, HORIZON)
    mask = played.mask_NT
    left = np.var((return_NT - found.baseline_NT)[mask])
    assert found.explained == pytest.approx(1 - left / np.var(return_NT[mask]))
    return found


def test_linear_is_chosen_where_the_observation_tells():
    played = random_episodes()
    assert chosen(played, 5 * played.observation[..., 0].astype(float)).choice == "linear"


def test_the_groups_step_is_chosen_where_groups_and_steps_differ():
    """A jump up and down over the steps, another in each group: no cubic in t, and the batch's mean blurs it."""
    jump_GT = np.random.default_rng(0).normal(size=(2, 6)) * 10
    return_NT = jump_GT[GROUP] + 0.1 * np.random.default_rng(1).normal(size=(8, 6))
    assert chosen(random_episodes(), return_NT).choice == "step"


def test_the_batchs_step_is_chosen_where_only_steps_differ():
    """The same jumps in both groups: more rows to take the mean of."""
    jump_T = np.random.default_rng(0).normal(size=6) * 10
    return_NT = jump_T[None] + np.random.default_rng(1).normal(size=(8, 6))
    assert chosen(random_episodes(), return_NT).choice == "batch_step"


def test_batch_steps_count_from_the_episodes_beginning():
    """Pairs of continuations, some from step 3: their first decision is compared with others' fourth."""
    jump = np.random.default_rng(0).normal(size=9) * 10
    offset_N, group_N = np.array([0, 0, 3, 3, 0, 0, 3, 3]), np.arange(8) // 2
    return_NT = jump[offset_N[:, None] + np.arange(6)[None]] + np.random.default_rng(1).normal(size=(8, 6))
    found = choose(random_episodes(offset_N=offset_N), return_NT, group_N, HALF, HORIZON)
    assert found.choice == "batch_step" and found.explained > 0.9


def test_means_leave_the_own_return_out():
    jump_GT = np.random.default_rng(0).normal(size=(2, 6)) * 10
    return_NT = jump_GT[GROUP] + 0.1 * np.random.default_rng(1).normal(size=(8, 6))
    found = chosen(random_episodes(), return_NT)
    for row in range(8):
        others = (GROUP[row] == GROUP) & (np.arange(8) != row)
        np.testing.assert_allclose(found.baseline_NT[row], return_NT[others].mean(0))


def test_where_nobody_else_is_left_the_fit_stands_in():
    played = random_episodes(length_N=[6, 3, 3, 3, 6, 3, 3, 3])
    jump_GT = np.random.default_rng(0).normal(size=(2, 6)) * 10
    return_NT = jump_GT[GROUP] + 0.1 * np.random.default_rng(1).normal(size=(8, 6))
    found = choose(played, return_NT, GROUP, HALF, HORIZON)
    assert found.choice == "step"
    fitted = linear(played, return_NT, HALF, HORIZON)
    np.testing.assert_array_equal(found.baseline_NT[0, 3:], fitted[0, 3:])
    assert (found.baseline_NT[0, :3] != fitted[0, :3]).all()


def test_explained_is_a_share_or_nothing():
    mask = np.ones((2, 2), bool)
    value = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert explained(value, value, mask) == 1.0
    assert explained(value, np.zeros((2, 2)), mask) == 0.0
    assert explained(value, -value, mask) == pytest.approx(-3.0)
    assert explained(np.ones((2, 2)), value, mask) is None
    assert explained(value, value, ~mask) is None


def test_the_choice_is_reported():
    made = GRPOTrainer(env="CartPole-v1", advantage="auto")
    report = made.step()
    picks = [report[f"baseline/{name}"] for name in ("linear", "step", "batch_step")]
    assert sorted(picks) == [0.0, 0.0, 1.0] and report["baseline_explained"] > 0
    assert "baseline/linear" not in GRPOTrainer(env="CartPole-v1").step()
