"""The fitted value: GAE of a linear value, solved in closed form from rows that are not judged by it."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer
from grpo.control.baselines.fitted import RIDGE, FittedValue
from tests.unit.control.baselines.test_linear import episodes, played

SPACE = gym.spaces.Box(-1, 1, (2,), np.float32)
HALF = np.array([0, 1] * 3)


def make(space=SPACE, **settings) -> FittedValue:
    given = {"advantage": "fitted", "gamma": 0.9, "gae_lambda": 0.7, "baseline_features": 3}
    return FittedValue(space, ControlConfig(**given | settings))


def gains(value, made, half_N=HALF):
    """(N, T) advantages."""
    reward_NT = np.where(made.mask_NT, made.reward_NT, 0.0)
    return -value.baseline(made, reward_NT, np.zeros(reward_NT.shape), half_N)


def by_hand(value, made, weight_F, gamma, lam):
    """GAE of w·φ, one row at a time, one step at a time."""
    found = np.zeros(made.mask_NT.shape)
    for row, length in enumerate(made.length_N):
        after = value.features(made.last[row : row + 1]) @ weight_F if made.truncated_N[row] else [0.0]
        v = [*(value.features(made.observation[row, :length]) @ weight_F), *after]
        for t in range(length):
            found[row, t] = sum(
                (gamma * lam) ** k * (made.reward_NT[row, t + k] + gamma * v[t + k + 1] - v[t + k])
                for k in range(length - t)
            )
    return found


def solved(value, made, rows, gamma, lam):
    """w from the definition: GAE is linear in w, so its columns are GAE of one weight at a time."""
    count = value.features(made.last).shape[1]
    rows_NT = made.mask_NT & rows[:, None]
    phi_MF = value.features(made.observation[rows_NT])
    free_M = by_hand(value, made, np.zeros(count), gamma, lam)[rows_NT]
    u_MF = np.stack([free_M - by_hand(value, made, e, gamma, lam)[rows_NT] for e in np.eye(count)], 1)
    penalty = RIDGE * rows_NT.sum() * np.diag([1.0] * (count - 1) + [0.0])
    return np.linalg.solve(phi_MF.T @ u_MF + penalty, phi_MF.T @ free_M)


def test_advantages_are_gae_of_the_value_that_the_other_half_solves_for():
    value, made = make(), played()
    found = gains(value, made)
    for half in (0, 1):
        weight_F = solved(value, made, half != HALF, 0.9, 0.7)
        mine_NT = made.mask_NT & (half == HALF)[:, None]
        np.testing.assert_allclose(found[mine_NT], by_hand(value, made, weight_F, 0.9, 0.7)[mine_NT], rtol=1e-4)


def test_with_whole_returns_it_is_ridge_regression():
    value, made = make(gae_lambda=1.0), episodes(played().observation, played().reward_NT)
    found = gains(value, made)
    return_NT = np.stack([made.reward_NT[:, t:] @ 0.9 ** np.arange(5 - t) for t in range(5)], 1)
    for half in (0, 1):
        x, mine = value.features(made.observation[half != HALF].reshape(-1, 2)), half == HALF
        penalty = RIDGE * len(x) * np.diag([1.0] * (x.shape[1] - 1) + [0.0])
        weight_F = np.linalg.solve(x.T @ x + penalty, x.T @ return_NT[~mine].reshape(-1))
        expected = return_NT[mine] - (value.features(made.observation[mine].reshape(-1, 2)) @ weight_F).reshape(3, 5)
        np.testing.assert_allclose(found[mine], expected, rtol=1e-6, atol=1e-9)


def test_a_row_is_never_judged_by_its_own_reward():
    plain, changed = played(), played()
    changed.reward_NT[0, 4] += 100.0
    before, after = gains(make(), plain), gains(make(), changed)
    same = HALF == 0
    np.testing.assert_allclose(after[same][1:], before[same][1:])
    assert np.abs(after[~same] - before[~same])[plain.mask_NT[~same]].max() > 1.0
    np.testing.assert_allclose((after - before)[0], 100 * 0.63 ** np.arange(5)[::-1], rtol=1e-6)


def test_what_earlier_steps_told_fades():
    """A first step that says 'always 10'; what is left of it is what the second believes where it knows nothing."""
    left = {}
    for memory in (0.0, 0.9):
        value = make(baseline_memory=memory, baseline_features=0, gamma=0.0)
        rich = played()
        rich.reward_NT[:] = 10.0
        gains(value, rich)
        poor = played(seed=1)
        poor.reward_NT[:] = 0.0
        left[memory] = np.abs(gains(value, poor)).max()
    assert left[0.0] < 1e-6 and left[0.9] > 3.0


def test_random_features_see_what_squares_do_not():
    """A reward that is a wave in the observation."""
    random = np.random.default_rng(0)
    observation = random.uniform(-1, 1, size=(200, 10, 2)).astype(np.float32)
    made = episodes(observation, np.sin(6 * observation[..., 0]))
    half = np.arange(200) % 2
    left = [np.std(gains(make(baseline_features=n, gamma=0.0), made, half)) for n in (0, 200)]
    assert left[1] < 0.5 * left[0]


def test_failed_rows_teach_nothing_and_are_not_judged():
    strange = replace(played(), errors={1: "fell over"})
    strange.reward_NT[1] = 1e9
    found = gains(make(), strange)
    assert not found[1].any() and np.abs(found).max() < 100
    nobody = replace(strange, errors=dict.fromkeys(range(6), "fell over"))
    assert not gains(make(), nobody).any()


def test_saved_and_restored_it_goes_on_exactly():
    one, other = make(), make()
    for seed in range(2):
        gains(one, played(seed))
    other.load(one.arrays())
    np.testing.assert_array_equal(gains(one, played(7)), gains(other, played(7)))
    assert not np.array_equal(gains(make(), played(7)), gains(other, played(7)))


def test_codes_and_parts_are_read_and_pictures_refused():
    space = gym.spaces.Dict({"code": gym.spaces.Discrete(3), "x": SPACE})
    value = make(space)
    seen = {"code": np.array([0, 2]), "x": np.zeros((2, 2), np.float32)}
    assert value.features(seen).shape == (2, 2 * 5 + 3 + 1)
    with pytest.raises(ConfigError, match="advantage=fitted reads numbers, not pictures"):
        make(gym.spaces.Box(0, 255, (36, 36, 3), np.uint8))


# --- in the room ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"group_size": 4}, {"group_by": "steps", "group_size": 64}])
@pytest.mark.parametrize("advantage", ["fitted", "critic"])
def test_a_trainer_resumes_exactly_in_the_middle_of_a_stream(settings, advantage):
    settings = settings | {"advantage": advantage, "gamma": 0.99, "seed": 3}
    made = [GRPOTrainer(env="Pendulum-v1", **settings) for _ in range(2)]
    for _ in range(3):
        made[0].step()
    made[1].load_state(made[0].state())
    for one, other in zip(*([trainer.step() for _ in range(2)] for trainer in made), strict=True):
        assert one.metrics == other.metrics
    for one, other in zip(*(trainer.policy.parameters().values() for trainer in made), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(
    "changes", [{"gae_lambda": 0.5}, {"baseline_features": 8}, {"baseline_memory": 0.1}, {"gamma": 0.9}]
)
def test_every_setting_changes_what_is_learned(changes):
    found = []
    for settings in ({}, changes):
        given = {"advantage": "fitted", "group_by": "steps", "group_size": 64, "vector": "serial", "gamma": 0.99}
        given |= settings
        made = GRPOTrainer(env="Pendulum-v1", **given)
        for _ in range(2):
            made.step()
        found.append(np.concatenate([p.detach().numpy().ravel() for p in made.policy.parameters().values()]))
    assert not np.array_equal(*found)


def test_windows_with_a_fitted_value_learn():
    """CartPole to about 460 of 500 with 6,000 steps."""
    made = GRPOTrainer(
        env="CartPole-v1",
        group_by="steps",
        advantage="fitted",
        group_size=64,
        groups_per_step=8,
        gamma=0.98,
        decisions_per_minibatch=128,
        num_iterations=8,
    )
    made.train(steps=12, progress=None)
    assert made.evaluate(10).metrics()["return"] > 250
