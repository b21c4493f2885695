"""The critic's advantages are GAE, its state is all of it."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from grpo.control import ControlConfig, GRPOTrainer
from grpo.control.baselines.critic import LearnedValue
from grpo.control.scaling import Scaling
from tests.unit.control.baselines.test_linear import episodes, played

SPACE = gym.spaces.Box(-1, 1, (2,), np.float32)
NO_SCALING = Scaling(SPACE, False)


def make(**settings) -> LearnedValue:
    return LearnedValue(SPACE, ControlConfig(**{"advantage": "critic", "gamma": 0.9, "gae_lambda": 0.7} | settings))


def zeroed(made):
    return np.where(made.mask_NT, made.reward_NT, 0.0)


def gae(made, critic, gamma, lam, scaling=NO_SCALING):
    """One row at a time, one step at a time."""
    found = np.zeros(made.mask_NT.shape)
    for row, length in enumerate(made.length_N):
        after = critic.values(scaling(made.last[row : row + 1]))[0] if made.truncated_N[row] else 0.0
        value = [*critic.values(made.observation[row, :length]), after]
        for t in range(length):
            found[row, t] = sum(
                (gamma * lam) ** k * (made.reward_NT[row, t + k] + gamma * value[t + k + 1] - value[t + k])
                for k in range(length - t)
            )
    return found


def test_advantages_are_gae_with_what_a_time_limit_cut_off_and_nothing_after_an_end():
    critic, made = make(), played()
    expected = gae(made, critic, 0.9, 0.7)
    return_NT = np.random.default_rng(5).normal(size=(6, 5))
    found = return_NT - critic.baseline(made, zeroed(made), return_NT, NO_SCALING)
    np.testing.assert_allclose(found[made.mask_NT], expected[made.mask_NT], rtol=1e-6, atol=1e-9)
    ended = replace(made, truncated_N=~made.truncated_N, terminated_N=made.truncated_N)
    other = return_NT - make().baseline(ended, zeroed(made), return_NT, NO_SCALING)
    assert (np.abs(other - found)[made.mask_NT] > 1e-4).all()  # every row's end matters to all its decisions


def test_an_end_that_is_both_is_an_end():
    critic, made = make(), played()
    both = replace(made, terminated_N=np.ones(6, bool))
    one, same = (
        make().baseline(e, zeroed(made), zeroed(made), NO_SCALING)
        for e in (both, replace(both, truncated_N=np.zeros(6, bool)))
    )
    np.testing.assert_array_equal(one, same)
    assert critic.values(made.last).shape == (6,)


def test_what_comes_after_is_scaled_as_the_policy_would_see_it():
    scaling = Scaling(SPACE, True)
    scaling.update(np.random.default_rng(0).normal(3.0, 2.0, size=(50, 2)))
    critic, made = make(), played()
    expected = gae(made, critic, 0.9, 0.7, scaling)
    found = -critic.baseline(made, zeroed(made), np.zeros((6, 5)), scaling)
    np.testing.assert_allclose(found[made.mask_NT], expected[made.mask_NT], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_the_limits_are_one_step_and_the_whole_return(lam):
    critic, made = make(gae_lambda=lam), played()
    expected = gae(made, critic, 0.9, lam)
    found = -critic.baseline(made, zeroed(made), np.zeros((6, 5)), NO_SCALING)
    np.testing.assert_allclose(found[made.mask_NT], expected[made.mask_NT], rtol=1e-6, atol=1e-9)


def test_it_learns_values_in_the_returns_own_units():
    critic = make(gamma=1.0, gae_lambda=1.0, critic_passes=60)
    random = np.random.default_rng(0)
    observation = random.uniform(-1, 1, size=(64, 1, 2)).astype(np.float32)
    made = episodes(observation, 1000 + 200 * observation[..., 0])
    for _ in range(3):
        critic.baseline(made, made.reward_NT, made.reward_NT, NO_SCALING)
    left = critic.values(observation[:, 0]) - made.reward_NT[:, 0]
    assert np.abs(left).mean() < 20  # of a spread of 115


def test_failed_rows_teach_it_nothing():
    whole = played()
    failed = replace(whole, errors={0: "fell over"}, truncated_N=np.array([False] * 2 + [True] + [False] * 3))
    strange = failed.reward_NT.copy()
    strange[0] = 1e6
    one, other = make(), make()
    one.baseline(failed, zeroed(failed), zeroed(failed), NO_SCALING)
    other.baseline(replace(failed, reward_NT=strange), strange, zeroed(failed), NO_SCALING)
    same(one.arrays(), other.arrays())
    before = one.arrays()
    nobody = replace(failed, errors=dict.fromkeys(range(6), "fell over"), truncated_N=np.zeros(6, bool))
    one.baseline(nobody, strange, zeroed(failed), NO_SCALING)
    same(one.arrays(), before)


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])), name


def test_saved_and_restored_it_goes_on_exactly():
    one, other = make(), make(seed=9)
    for seed in range(2):
        one.baseline(played(seed), zeroed(played(seed)), zeroed(played(seed)), NO_SCALING)
    other.load({name: np.asarray(value) for name, value in one.arrays().items()})
    same(one.arrays(), other.arrays())
    third = played(3)
    for critic in (one, other):
        critic.baseline(third, zeroed(third), zeroed(third), NO_SCALING)
    same(one.arrays(), other.arrays())


def test_restored_to_its_beginning_it_begins_again():
    one, fresh = make(), make()
    beginning = one.arrays()
    for critic in (one, fresh):
        critic.baseline(played(), zeroed(played()), zeroed(played()), NO_SCALING)
        if critic is one:
            one.load(beginning)
            same(one.arrays(), beginning)
            one.baseline(played(), zeroed(played()), zeroed(played()), NO_SCALING)
    same(one.arrays(), fresh.arrays())


def test_only_a_critic_has_one():
    assert GRPOTrainer(env="CartPole-v1").source.baseline.critic is None
    made = GRPOTrainer(env="CartPole-v1", advantage="critic")
    made.step()
    assert any(name.startswith("critic/moment/") for name in made.source.state().arrays)
