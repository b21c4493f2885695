"""Environments that misbehave. A module of its own, so that workers load it and nothing heavy."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np

STEP = 3
"""The step at which an unruly environment does its deed."""


class Walk(gym.Env):
    """Behaves: a walk that begins where the seed says and ends after `length` steps."""

    def __init__(self, length=10, render_mode=None):
        self.observation_space = gym.spaces.Box(-100, 100, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.steps = seed, 0
        self.at = self.np_random.normal(size=3).astype(np.float32)
        return self.at.copy(), {}

    def step(self, action):
        self.steps += 1
        self.at += np.float32(action - 0.5) + self.np_random.normal(size=3).astype(np.float32)
        return self.at.copy(), float(self.at.sum()), self.steps == self.length, False, {}


class Unruly(Walk):
    """Behaves, except at one step of an episode whose seed stands for a deed."""

    def step(self, action):
        answer = list(super().step(action))
        deed = dict(zip(SEEDS.values(), SEEDS, strict=True)).get(self.seed)
        if deed is None or self.steps != STEP:
            return tuple(answer)
        return DEEDS[deed](self, answer)


def raises(env, answer):
    print("about to misbehave", flush=True)  # which the pipe to the parent must not mind
    raise ValueError("no\nsuch state")


def spins(env, answer):
    while True:
        pass


def starts_another(env, answer):
    started = subprocess.Popen(["sleep", "1000"])
    Path(os.environ["UNRULY_STARTED"]).write_text(str(started.pid))
    time.sleep(1000)


def with_part(at, value):
    """The answer with another value at one place."""

    def deed(env, answer):
        return (*answer[:at], value, *answer[at + 1 :])

    return deed


def grows(env, answer):
    env.observation_space = gym.spaces.Box(-100, 100, (5,), np.float32)
    return (np.zeros(5, np.float32), *answer[1:])


def interrupts(env, answer):
    raise KeyboardInterrupt


DEEDS = {
    "raises": raises,
    "exits": lambda env, answer: sys.exit(1),
    "dies": lambda env, answer: os.kill(os.getpid(), signal.SIGKILL),
    "leaves": lambda env, answer: os._exit(3),
    "sleeps": lambda env, answer: time.sleep(1000),
    "spins": spins,
    "starts another": starts_another,
    "NaN observation": with_part(0, np.array([0, np.nan, 0], np.float32)),
    "infinite observation": with_part(0, np.array([0, 0, -np.inf], np.float32)),
    "too large for its type": with_part(0, np.full(3, 1e300)),
    "wrong shape": with_part(0, np.zeros((3, 1), np.float32)),
    "wrong type": with_part(0, np.array(["left", "a", "bit"])),
    "no observation": with_part(0, None),
    "NaN reward": with_part(1, np.nan),
    "infinite reward": with_part(1, np.inf),
    "many rewards": with_part(1, np.zeros(3)),
    "no reward": with_part(1, None),
    "odd end": with_part(2, "yes"),
    "odd info": with_part(4, None),
    "old interface": lambda env, answer: (answer[0], answer[1], False, {}),
    "grows": grows,
    "both ends": lambda env, answer: (answer[0], answer[1], True, True, {}),
    "large reward": with_part(1, 1e39),
    "long reward": with_part(1, 10**5000),
    "interrupts": interrupts,
}
SEEDS = {deed: 1000 + i for i, deed in enumerate(DEEDS)}


class Stuck(Walk):
    """Neither draws nor closes itself; whatever is raised inside is caught."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def render(self):
        for _ in range(2):
            with contextlib.suppress(Exception):
                time.sleep(10)

    close = render


class Endless(Walk):
    """Never ends by itself."""

    def __init__(self):
        super().__init__(length=-1)


class Slow(Walk):
    """Takes its time over every step."""

    def step(self, action):
        time.sleep(0.3)
        return super().step(action)


class Brief(Walk):
    """Every episode ends with its first step."""

    def __init__(self):
        super().__init__(length=1)


class Forgetful(Walk):
    """Pays no heed to seeds."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = np.random.default_rng().normal(size=3).astype(np.float32)
        return self.at.copy(), {}


class Restless(Walk):
    """Begins where the seed says, and then does as it likes."""

    def step(self, action):
        self.at += np.random.default_rng().normal(size=3).astype(np.float32)
        return super().step(action)


class Shy(Walk):
    """Dies as it is made."""

    def __init__(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Strict(Walk):
    """Cannot be made twice in one process, nor more than so often."""

    made = 0

    def __init__(self):
        super().__init__()
        Strict.made += 1
        if Strict.made > 2:
            raise RuntimeError("enough of these")


class Once(Walk):
    """Only one process may have it."""

    def __init__(self):
        super().__init__()
        path = Path(os.environ["ONLY_ONCE"])
        if path.exists() and path.read_text() != str(os.getpid()):
            raise FileExistsError("made already")
        path.write_text(str(os.getpid()))


class Old(Walk):
    """Speaks the interface of old."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class Older(Walk):
    """Gives four things where five are wanted."""

    def step(self, action):
        return super().step(action)[:4]


class Wordy(Walk):
    """Sees words only."""

    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Text(10)


class Undecided(Walk):
    """Wants several kinds of actions at once."""

    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Dict({"a": gym.spaces.Discrete(2)})
