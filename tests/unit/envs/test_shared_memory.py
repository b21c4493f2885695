"""Shared memory: what workers see arrives as it was, whoever fails, and nothing is left behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from grpo.envs.processes import ProcessFleet
from grpo.envs.serial import SerialFleet
from grpo.envs.shared_memory import SharedObservations, share
from tests.unit.control.catch import Catch

WIDE = gym.spaces.Dict(
    {
        "picture": gym.spaces.Box(0, 255, (80, 80), np.uint8),
        "x": gym.spaces.Box(-1, 1, (3,)),
        "n": gym.spaces.Discrete(5),
    }
)


def test_both_sides_see_the_same_rows_of_every_part():
    ours = SharedObservations(WIDE, 3)
    theirs = SharedObservations(WIDE, 3, ours.name)
    drawn = {key: np.stack([space.sample() for _ in range(2)]) for key, space in WIDE.spaces.items()}
    theirs.write([2, 0], drawn)
    seen = ours.read([0, 1, 2])
    for key, rows in drawn.items():
        np.testing.assert_array_equal(seen[key], np.stack([rows[1], rows[0] * 0, rows[0]]))
        assert seen[key].dtype == rows.dtype
    theirs.write([0], {key: rows[:1] for key, rows in drawn.items()})
    np.testing.assert_array_equal(seen["x"][0], drawn["x"][1], "what was read is a copy")
    theirs.close()
    ours.close()
    with pytest.raises(FileNotFoundError):
        SharedMemory(ours.name)


def test_small_observations_are_sent_as_they_are():
    assert share(gym.spaces.Box(-1, 1, (4,)), 64) is None


def test_memory_that_is_promised_and_not_there_is_not_used(monkeypatch):
    """A worker that wrote there would be killed by the system."""
    claimed = []

    def full(file, start, size):
        claimed.append(size)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = _there()
    assert share(WIDE, 3) is None
    if os.path.isdir("/dev/shm"):
        assert claimed == [3 * (80 * 80 + 3 * 4 + 8)] and _there() == before


def _there():
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")} if os.path.isdir("/dev/shm") else set()


class Falling(Catch):
    """A drawn game whose member with an odd seed dies at its second step."""

    observation_space = gym.spaces.Box(0, 255, (80, 80, 1), np.uint8)

    def reset(self, *, seed=None, options=None):
        self.odd, self.t = bool(seed % 2), 0
        return super().reset(seed=seed)

    def step(self, action):
        self.t += 1
        if self.odd and self.t == 2:
            raise RuntimeError("no")
        return super().step(action)

    def _drawn(self):
        return super()._drawn().repeat(2, 0).repeat(2, 1)


def test_a_fleet_in_processes_sees_what_one_here_sees_also_when_somebody_fails():
    here, there = SerialFleet(Falling, 3), ProcessFleet(Falling, 3, workers=2)
    try:
        assert there._shared is not None
        name = there._shared.name
        np.testing.assert_array_equal(
            here.reset([0, 1, 2], [2, 3, 4]).observation, there.reset([0, 1, 2], [2, 3, 4]).observation
        )
        for members in ([2, 0, 1], [1, 2, 0], [0, 2]):
            one, other = (fleet.step(members, np.array([0, 1, 2][: len(members)])) for fleet in (here, there))
            np.testing.assert_array_equal(one.observation, other.observation)
            assert set(one.errors) == set(other.errors)
        assert set(there.step([1], np.array([0])).errors) == {0}
    finally:
        there.close()
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)


class Dying(Falling):
    """Its process goes in the middle of a step."""

    def step(self, action):
        if self.odd and self.t == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.t += 1
        return super(Falling, self).step(action)


def test_a_process_that_died_writes_again_once_it_is_replaced():
    here, there = SerialFleet(Falling, 2), ProcessFleet(Dying, 2, workers=2)
    try:
        there.reset([0, 1], [2, 3])
        there.step([0, 1], np.array([0, 0]))
        stepped = there.step([1, 0], np.array([0, 0]))
        assert set(stepped.errors) == {0} and not stepped.observation[0].any() and stepped.observation[1].any()
        here.reset([0, 1], [2, 4])
        for _ in range(2):
            here.step([0], np.array([0]))
        there.reset([1], [4])
        one, other = (fleet.step([0, 1], np.array([0, 2])) for fleet in (here, there))
        assert not other.errors
        np.testing.assert_array_equal(one.observation, other.observation)
    finally:
        there.close()


HELD = """
import os, sys
from grpo.envs.processes import ProcessFleet
from tests.unit.envs.test_shared_memory import Falling
if __name__ == "__main__":
    fleet = ProcessFleet(Falling, 2, workers=1)
    fleet.reset([0, 1], [0, 2])
    print(fleet._shared.name, flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "interrupted":
        raise KeyboardInterrupt
"""


@pytest.mark.parametrize("how", ["forgotten", "interrupted", "killed"])
def test_nothing_is_left_behind_however_the_program_ends(tmp_path, how):
    script = tmp_path / "held.py"
    script.write_text(HELD)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    settings = {"env": os.environ | {"PYTHONPATH": paths}, "capture_output": True, "text": True, "timeout": 300}
    ended = subprocess.run([sys.executable, script, how], **settings)
    name = ended.stdout.strip()
    assert name, ended.stderr
    assert how == "killed" or ("leaked" not in ended.stderr and "BufferError" not in ended.stderr)
    until = time.monotonic() + 120
    while name in _there() and time.monotonic() < until:  # after a kill, once the workers have noticed
        time.sleep(0.1)
    assert name not in _there()
