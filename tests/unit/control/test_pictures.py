"""Pictures in the control room: bytes up to the network, raw returns beside clipped rewards, a baseline that sees."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from grpo.app.builders import configs
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer
from grpo.errors import SamplesFailed
from grpo.protocols import CollectRequest
from tests.unit.control.catch import Catch

QUICK = {"vector": "serial", "hidden": (16,), "activation": "relu", "group_size": 4, "groups_per_step": 2}


def make(balls=2, **settings):
    return GRPOTrainer(env=lambda: Catch(balls), **QUICK | settings)


def collected(made):
    return made.source.collect(CollectRequest(0)).rollouts


def test_pictures_stay_bytes_until_the_network():
    made = make()
    rollouts = collected(made)
    seen = rollouts.inputs["observation"]
    assert seen.dtype == torch.uint8 and seen.shape[2:] == (40, 40, 1)
    scored = made.source.policy.score(rollouts)
    torch.testing.assert_close(scored.logp_NT[rollouts.mask_NT], rollouts.old_logp_NT[rollouts.mask_NT])
    conv = made.actor.pictures[0][0]
    assert isinstance(conv, torch.nn.Conv2d) and conv.in_channels == 1 and conv.out_channels == 32, "the Nature-CNN"


def test_rewards_are_clipped_for_learning_and_reported_raw():
    made, plain = make(clip_rewards=0.25), make()
    clipped, raw = collected(made).reward_NT, collected(plain).reward_NT
    assert set(raw.unique().tolist()) == {-1.0, 0.0, 1.0}
    torch.testing.assert_close(clipped, raw.clip(-0.25, 0.25))
    assert made.source.metrics()["return"] == plain.source.metrics()["return"]
    with pytest.raises(ConfigError, match="clip_rewards"):
        ControlConfig(clip_rewards=0.0)


def test_clipping_comes_before_scaling():
    made = make(clip_rewards=0.5, reward_scale=10.0, scale="none")
    assert set(collected(made).reward_NT.unique().tolist()) == {-5.0, 0.0, 5.0}


def test_what_the_last_layer_is_given_is_what_the_policy_sees():
    made = make()
    policy = made.source.policy
    seen = np.random.default_rng(0).integers(0, 256, (5, 40, 40, 1)).astype(np.uint8)
    sight = policy.sight(seen)
    assert sight.shape == (5, 16) and (sight >= 0).all() and sight.any()
    with torch.no_grad():
        out = made.actor.layers[-1](torch.as_tensor(sight))
        torch.testing.assert_close(out, made.actor(torch.as_tensor(seen)))


class Bright(gym.Env):
    """Which half of the picture is bright says what five steps will pay, whatever is done."""

    observation_space = gym.spaces.Box(0, 255, (40, 40, 1), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._drawn(), {}

    def step(self, action):
        self.t += 1
        reward = 1.0 if self.top else -1.0
        return self._drawn(), reward, self.t == 5, False, {}

    def _drawn(self):
        self.top = bool(self.np_random.integers(2))
        picture = np.zeros((40, 40, 1), np.uint8)
        picture[: 20 if self.top else 40, :, :] = 200
        return picture


def test_the_linear_fit_sees_what_the_policy_makes_of_pictures():
    made = GRPOTrainer(
        env=Bright, **QUICK | {"group_size": 32, "gamma": 0.0, "group_by": "batch", "groups_per_step": 1}
    )
    collected(made)
    assert made.source.metrics()["baseline_explained"] > 0.9, "what is paid stands in the picture"
    policy = made.source.policy
    policy.sight = lambda seen: np.zeros((len(seen), 0))
    collected(made)
    assert made.source.metrics()["baseline_explained"] < 0.2, "the time alone says nothing"


def test_which_half_is_bright_is_learned_in_seconds():
    class Half(gym.Env):
        observation_space, action_space = Bright.observation_space, gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.half = int(self.np_random.integers(2))
            picture = np.zeros((40, 40, 1), np.uint8)
            picture[20 * self.half : 20 * self.half + 20] = 255
            return picture, {}

        def step(self, action):
            return np.zeros((40, 40, 1), np.uint8), float(action == self.half), True, False, {}

    made = GRPOTrainer(env=Half, **QUICK | {"groups_per_step": 16, "learning_rate": 1e-3})
    made.train(steps=10, progress=None)
    assert made.evaluate(40).return_E.mean() == 1.0


def test_a_recurrent_policy_reads_pictures_too():
    made = make(memory=8)
    report = made.train(steps=1, progress=None)[0]
    assert report["baseline_explained"] is not None


def test_a_resumed_picture_run_is_the_one_that_was_not_interrupted(tmp_path):
    whole, first = make(), make()
    whole.train(steps=2, progress=None, folder=tmp_path / "whole", evaluate_every=2)
    first.train(steps=1, progress=None, folder=tmp_path / "half", evaluate_every=2)
    second = make()
    second.train(steps=2, progress=None, folder=tmp_path / "half", evaluate_every=2)
    for name, tensor in whole.policy.parameters().items():
        assert torch.equal(tensor, second.policy.parameters()[name]), name


def test_a_checkpoint_of_a_policy_that_read_pictures_another_way_is_refused():
    made = make()
    state = made.state()
    state.values["source"].pop("way")  # as they were before pictures were taken less their mean
    with pytest.raises(ConfigError, match=r"reads pictures another way.*train anew"):
        make().load_state(state)
    board = GRPOTrainer(env="MiniGrid-Empty-5x5-v0", **QUICK)
    state = board.state()
    del state.values["source"]["way"]
    board.load_state(state)


class Broken(Catch):
    """Never begins, once it has been looked at."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        Broken.resets += 1
        if Broken.resets > 2:
            raise RuntimeError("no screen")
        return super().reset(seed=seed)


def test_pictures_of_which_none_came_are_no_trouble_for_the_value_that_reads_them():
    for more in ({}, {"credit_until_reward": True}):
        Broken.resets = 0
        made = GRPOTrainer(env=Broken, **QUICK | {"advantage": "fitted", "gamma": 0.9} | more)
        Broken.resets = 2
        with pytest.raises(SamplesFailed, match="no screen"):
            made.train(steps=1, progress=None)


def test_the_value_that_is_solved_for_reads_what_the_policy_makes_of_pictures():
    windows = {"group_by": "steps", "advantage": "fitted", "group_size": 20, "groups_per_step": 16, "gamma": 0.5}
    explained = []
    for blind in (False, True):
        made = GRPOTrainer(env=Bright, **QUICK | windows)
        if blind:
            made.source.policy.sight = lambda seen: np.zeros((len(seen), 16), np.float32)
        for step in range(6):  # it begins with the mean, and believes its features by and by
            made.source.collect(CollectRequest(step))
        explained.append(made.source.metrics()["baseline_explained"])
    assert explained[0] > 0.6 and explained[1] < 0.3, "what is paid stands in the picture"
    with pytest.raises(ConfigError, match="advantage=fitted reads numbers, not pictures"):
        GRPOTrainer(env=Bright, **QUICK | {"advantage": "fitted", "gamma": 0.9, "memory": 8})


def test_a_background_says_nothing_and_features_do_not_fade():
    network = make().actor
    ball = torch.zeros(2, 40, 40, 1, dtype=torch.uint8)
    ball[0, 5:9, 5:9], ball[1, 30:34, 20:24] = 100, 100
    with torch.no_grad():
        torch.testing.assert_close(network(ball + 87), network(ball), rtol=1e-3, atol=1e-5)
        before = network.sight(ball)
        network.layers[0].weight *= 0.1
        torch.testing.assert_close(network.sight(ball), before, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_catch_is_learned_in_windows_that_end_in_the_middle_of_a_game():
    windows = {"group_by": "steps", "group_size": 64, "groups_per_step": 8, "hidden": (64,), "gamma": 0.99}
    value = {"advantage": "fitted", "credit_until_reward": True, "baseline_features": 0}
    made = make(
        balls=20, num_iterations=4, decisions_per_minibatch=128, learning_rate=1e-3, target_kl=None, **windows | value
    )
    made.train(steps=24, progress=None)
    assert made.evaluate(8).return_E.mean() > 0, "chance is at −15"


@pytest.mark.slow
def test_pong_learns_from_its_first_points():
    """The preset, cut short: one step of it, its evaluation and its branches."""
    pytest.importorskip("ale_py", reason="Atari games are an extra: pip install 'anygrpo[atari]'")
    small = {"max_episode_steps": "90", "group_size": "95", "groups_per_step": "2", "vector": "serial"}
    small |= {"num_iterations": "1", "eval_episodes": "2", "num_envs": "2"}
    for more in ({}, {"group_by": "branch", "group_size": "2"}):
        config = resolve([preset_layer("pong"), flag_layer(list((small | more).items()))], configs()).config
        made = GRPOTrainer(config=config)
        before = [tensor.detach().clone() for tensor in made.policy.parameters().values()]
        report = made.step()
        assert report["return"] < 0 and report["failed"] == 0
        after = made.policy.parameters().values()
        assert any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert (made.evaluate(2).return_E < 0).all()
