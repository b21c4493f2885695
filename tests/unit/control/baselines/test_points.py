"""Games of points: a try ends with a reward, and nothing after it says anything of it."""

import gymnasium as gym
import numpy as np
import pytest

from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer
from grpo.control.baselines.fitted import FittedValue
from grpo.control.baselines.points import until_reward
from grpo.control.play import Episodes
from grpo.core.advantages import reward_to_go
from grpo.protocols import CollectRequest

GAMMA = 0.9


def played(reward, length, terminated=(True, False), errors=()):
    reward_NT = np.array(reward, float)
    rows, steps = reward_NT.shape
    seen = np.random.default_rng(0).normal(size=(rows, steps, 2)).astype(np.float32)
    over_N = np.array(terminated)
    return Episodes(
        observation=seen, raw=seen, action_NT=np.zeros((rows, steps), int), logp_NT=np.zeros((rows, steps)),
        out_NTF=None, reward_NT=reward_NT, mask_NT=np.arange(steps) < np.array(length)[:, None],
        offset_N=np.array([0, 7]), terminated_N=over_N, truncated_N=~over_N, success_N=np.full(rows, np.nan),
        last=np.ones((rows, 2), np.float32), errors=dict(errors), steps_N=np.array(length),
    )  # fmt: skip


def judged(episodes, judge):
    return_NT, expected_NT = until_reward(judge, episodes, episodes.reward_NT, np.array([0, 1]), GAMMA)
    return return_NT - expected_NT


TWO = played([[0, -1, 0, 0, 1], [0, 0, 2, 0, 0]], length=[5, 4])


def test_pieces_end_with_their_reward_and_are_put_back_where_they_were():
    found = []

    def nothing(pieces, reward_KT, return_KT, half_K):
        found.append((pieces, return_KT, half_K))
        return np.zeros_like(return_KT)

    gain_NT = judged(TWO, nothing)
    np.testing.assert_allclose(gain_NT, [[-0.9, -1, 0.81, 0.9, 1], [1.62, 1.8, 2, 0, 0]])
    ((pieces, _, half_K),) = found
    assert pieces.length_N.tolist() == [2, 3, 3, 1] and half_K.tolist() == [0, 0, 1, 1]
    assert pieces.terminated_N.tolist() == [True, True, True, False]
    assert pieces.truncated_N.tolist() == [False, False, False, True], "only where the window cut"
    assert pieces.offset_N.tolist() == [0, 2, 7, 10]
    np.testing.assert_array_equal(pieces.raw[1, :3], TWO.raw[0, 2:5])


def test_rows_without_rewards_are_judged_as_they_are():
    silent = played([[0, 0, 0], [0, 0, 0]], length=[3, 2])
    settings = {"advantage": "fitted", "gamma": GAMMA, "baseline_features": 0}
    for judge in (lambda e, r, g, h: np.full_like(g, 0.5), _value(settings).baseline):
        whole = judge(silent, silent.reward_NT, np.zeros((2, 3)), np.array([0, 1]))
        np.testing.assert_allclose(judged(silent, judge)[silent.mask_NT], -whole[silent.mask_NT])


def _value(settings):
    return FittedValue(gym.spaces.Box(-9, 9, (2,)), ControlConfig(**settings))


def test_a_row_that_failed_fails_in_all_its_pieces_and_an_empty_one_is_no_trouble():
    seen = []

    def judge(pieces, reward_KT, return_KT, half_K):
        seen.append(dict(pieces.errors))
        return return_KT

    assert not judged(played([[0, -1, 0], [0, 0, 0]], length=[3, 0], errors={0: "no"}), judge).any()
    assert seen == [{0: "no", 1: "no"}]


class Volley(gym.Env):
    """Three points; right when the ball is right wins one, and each takes two steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action):
        if self.t % 2 == 0:
            self.won = int(action) == int(self.ball > 0)
        self.t += 1
        reward = 0.0 if self.t % 2 else (1.0 if self.won else -1.0)
        return self._look(), reward, self.t == 6, False, {}

    def _look(self):
        if self.t % 2 == 0:
            self.ball = float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self.ball, self.t % 2], np.float32)


SETTINGS = {"group_by": "steps", "advantage": "fitted", "gamma": 0.99, "group_size": 64, "groups_per_step": 4}


def test_the_setting_changes_what_is_learned_and_points_are_learned():
    made = {on: GRPOTrainer(env=Volley, vector="serial", credit_until_reward=on, **SETTINGS) for on in (False, True)}
    gains = {on: trainer.step().experience.advantage_NT for on, trainer in made.items()}
    assert gains[True].shape == gains[False].shape and not np.allclose(gains[True], gains[False])
    made[True].train(steps=6, progress=None)
    assert made[True].evaluate(20).return_E.mean() == 3.0


def test_what_comes_later_cancels_and_explains_nothing():
    made = GRPOTrainer(env=Volley, vector="serial", credit_until_reward=True, **SETTINGS)
    value = made.source.baseline.fitted
    value.baseline = lambda pieces, reward, returns, half: np.where(pieces.mask_NT, 0.5, 0.0)
    rollouts = made.source.collect(CollectRequest(0)).rollouts
    reward_NT, return_NT = (np.asarray(x) for x in (rollouts.reward_NT, _to_go(rollouts)))
    first = [int(np.flatnonzero(row)[0]) for row in reward_NT]
    for row, t in enumerate(first):
        gain_T = (return_NT - np.asarray(rollouts.baseline_NT))[row, : t + 1]
        np.testing.assert_allclose(gain_T, reward_NT[row, t] * 0.99 ** np.arange(t, -1, -1) - 0.5, atol=1e-5)
    assert made.source.metrics()["baseline_explained"] == pytest.approx(0.0, abs=1e-9), "one number for all"


def _to_go(rollouts):
    return reward_to_go(np.asarray(rollouts.reward_NT, np.float64), np.asarray(rollouts.mask_NT), 0.99)


def test_without_a_value_that_is_solved_for_it_is_refused():
    with pytest.raises(ConfigError, match="credit_until_reward has no effect here: it needs advantage=fitted"):
        GRPOTrainer(env="CartPole-v1", credit_until_reward=True)
