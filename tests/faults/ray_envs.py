"""Environments for actors: imported there by name."""

import os
import time

import gymnasium as gym
import numpy as np


class Walk(gym.Env):
    """Counts; what it is told to do at a step, it does: die, hang, raise."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(10)

    def __init__(self, marks=None, forgets=False):
        self.marks, self.forgets = marks, forgets

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.total = 0, 0.0
        return self._seen(), {}

    def _seen(self):
        drawn = time.time_ns() % 1000 if self.forgets else self.np_random.random()
        self.total += drawn
        return np.array([self.at, self.total], np.float32)

    def _first_time(self, what):
        """Whether nobody has done this before: a mark outlives the process."""
        try:
            os.close(os.open(os.path.join(self.marks, what), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def step(self, action):
        self.at += 1
        if self.at == 1:  # a fleet tries one step of any kind when it is made
            return self._seen(), float(action), False, False, {}
        if action == 9:
            os._exit(3)
        if action == 8:
            time.sleep(60)
        if action == 7:
            raise ValueError("it does not like 7")
        if action == 6 and self._first_time("died"):  # as with its machine: not the next time
            os._exit(3)
        return self._seen(), float(action), self.at >= 6, False, {}


class Forgetful:
    """Makes environments that never go the same way twice."""

    name = "Walk"

    def __call__(self):
        return Walk(forgets=True)


def longer(completion, **_):
    """A reward."""
    return float(len(completion))


def double(item: int):
    """For a pool: a number twice; some numbers do other things.

    Args:
        item: the number
    """
    if item == 13:
        os._exit(3)
    if item == 14:
        time.sleep(60)
    if item == 15:
        raise ValueError("not 15")
    return 2 * item
