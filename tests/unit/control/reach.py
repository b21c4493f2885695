"""A point that must be brought to a place: the smallest robot."""

import gymnasium as gym
import numpy as np


class Reach(gym.Env):
    """A point in the plane, moved by two numbers; success is being near the origin, and is the only reward.

    It does not end by itself unless told to: like many robots it goes on after its success until the time is over.
    """

    observation_space = gym.spaces.Box(-4, 4, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, ends=False, limit=12, near=0.5):
        self.ends, self.limit, self.near = ends, limit, near

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.at = self.np_random.uniform(-1.5, 1.5, 2).astype(np.float32)
        return self.at.copy(), {}

    def step(self, action):
        self.t += 1
        self.at = np.clip(self.at + 0.4 * np.asarray(action, np.float32), -4, 4)
        there = bool(np.linalg.norm(self.at) < self.near)
        return self.at.copy(), float(there), there and self.ends, self.t >= self.limit, {"is_success": there}


def straight(seen):
    """An expert: to the origin, as fast as it goes."""
    return np.clip(-seen / 0.4, -1, 1)


def raising(seen):
    """No expert."""
    raise KeyError("no such part")


def shapeless(seen):
    """No expert."""
    return 0.0


def hopeless(seen):
    """No expert: away from the origin."""
    return np.sign(seen)
