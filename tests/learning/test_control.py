"""The control room learns: presets solve their tasks; each way of grouping, seeing, acting and remembering works."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as gs

from grpo.app.builders import configs
from grpo.app.look import FRESH
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.control import GRPOTrainer

QUICK = {"vector": "serial", "num_iterations": 10, "learning_rate": 1e-2, "hidden": (32,)}


def learned(env, steps, seed=0, episodes=20, **settings) -> tuple[float, float]:
    """Greedy returns on independent starts, before and after so many steps."""
    made = GRPOTrainer(env=env, seed=seed, **QUICK | settings)
    before = made.evaluate(episodes).return_E.mean()
    made.train(steps=steps, progress=None)
    after = made.evaluate(episodes).return_E.mean()
    made.source.close()
    return float(before), float(after)


# --- presets --------------------------------------------------------------------------------------------------------


def solved(preset, seed, stop_at) -> GRPOTrainer:
    """The preset's trainer once greedy episodes on independent starts return so much, within the preset's steps."""
    resolved = resolve([preset_layer(preset)], configs())
    made = GRPOTrainer(config=resolved.config.but(seed=seed))
    reports = made.train(steps=resolved.run.steps, stop_at=stop_at, evaluate_every=2, progress=None)
    assert reports[-1]["eval/return"] >= stop_at, len(reports)
    return made


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_cartpole_is_solved(seed):
    made = solved("cartpole", seed, 475)
    assert made.evaluate(20, seed=seed + FRESH).return_E.mean() > 400


def test_pendulum_is_swung_up():
    """A random policy has −1200, holding it upright from the start about −150."""
    made = solved("pendulum", 0, -400)
    assert made.evaluate(20, seed=FRESH).return_E.mean() > -500


@pytest.mark.slow
def test_a_critic_learns_cartpole():
    settings = {"advantage": "critic", "gamma": 0.98, "critic_passes": 5, "decisions_per_minibatch": 1024}
    reports = GRPOTrainer(env="CartPole-v1", num_iterations=8, **settings).train(steps=15, progress=None)
    assert reports[0]["return"] < 30 and reports[-1]["return"] > 100  # of drawn actions


# --- remembering ----------------------------------------------------------------------------------------------------


def test_a_sign_is_remembered_and_only_by_a_memory():
    """The preset on a shorter corridor, with its GRU and without: all or half of the turns are right."""
    found = {}
    for memory in (32, 0):
        shorter = flag_layer([("env_kwargs", {"length": 4}), ("memory", memory)])
        made = GRPOTrainer(config=resolve([preset_layer("tmaze"), shorter], configs()).config)
        made.train(steps=15, progress=None)
        found[memory] = made.evaluate(100).metrics()["success"]
        made.source.close()
    assert found[32] > 0.95 and 0.3 < found[0] < 0.7


# --- acting and seeing ----------------------------------------------------------------------------------------------


class Several(gym.Env):
    """Three choices at once; each should say whether one of three numbers is positive."""

    observation_space = gs.Box(-1, 1, (3,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._see(), {}

    def step(self, action):
        self.t += 1
        right = float(np.mean(np.asarray(action) == (self.x > 0)))
        return self._see(), right, self.t == 5, False, {}

    def _see(self):
        self.x = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self.x


@pytest.mark.parametrize(
    "space", [gs.MultiDiscrete([2, 3, 2]), gs.MultiBinary(3)], ids=["MultiDiscrete", "MultiBinary"]
)
def test_several_choices_at_once_are_learned(space):
    before, after = learned(lambda: Several(space), 10)
    assert before < 3.5 and after > 4.2  # of 5


class Picture(gym.Env):
    """A bright pixel in the left or the right half of 8 × 8; which?"""

    observation_space, action_space = gs.Box(0, 255, (8, 8, 1), np.uint8), gs.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._see(), {}

    def step(self, action):
        self.t += 1
        right = float(action == self.right)
        return self._see(), right, self.t == 5, False, {}

    def _see(self):
        self.right = int(self.np_random.integers(2))
        seen = np.zeros((8, 8, 1), np.uint8)
        seen[self.np_random.integers(8), 4 * self.right + self.np_random.integers(4)] = 255
        return seen


def test_a_picture_is_read():
    before, after = learned(Picture, 10)
    assert before < 3.5 and after > 4.2  # of 5


# --- grouping -------------------------------------------------------------------------------------------------------


class Corridor(gym.Env):
    """Six cells: the reward is at the right end, and the time is short."""

    observation_space, action_space = gs.Discrete(6), gs.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = self.at = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        self.at = max(0, min(5, self.at + (1 if action else -1)))
        there = self.at == 5
        return self.at, float(there), there, self.t >= 14 and not there, {"is_success": there}


@pytest.mark.parametrize(
    "settings",
    [
        {"group_by": "start"},
        {"group_by": "start", "advantage": "auto"},
        {"group_by": "start", "loss_type": "grpo"},
        {"group_by": "branch"},
        {"group_by": "batch"},
        {"group_by": "anchor", "advantage": "step"},
        {"group_by": "steps", "advantage": "step", "group_size": 200, "groups_per_step": 1},
        {"group_by": "start", "advantage": "episode", "no_signal": "drop"},
        {"group_by": "start", "advantage": "episode", "no_signal": "resample"},
    ],
    ids=lambda settings: ", ".join(map(str, settings.values())),
)
def test_every_way_of_grouping_finds_a_distant_goal(settings):
    gamma = {} if settings.get("advantage") == "episode" or "loss_type" in settings else {"gamma": 0.9}
    before, after = learned(Corridor, 16, **settings | gamma)
    assert before < 0.5 and after == 1.0
