"""Walkers in minutes: whose policy counts, and what the clock leaves out."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "bench"))  # its scripts import each other as scripts do

pytest.importorskip("mujoco")
import walkers_minutes  # noqa: E402


def test_the_policy_of_the_best_look_is_kept_and_looking_is_not_on_the_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(walkers_minutes.time, "perf_counter", lambda: now[0])
    weights, returns = {"w": [0]}, iter([5.0, 9.0, 7.0])

    def judge(starts):
        now[0] += 100.0
        return next(returns)

    clock = walkers_minutes.Clock(30.0, 10.0, judge, lambda: weights)
    for step in (1, 2, 3):
        now[0] += 10.0
        weights["w"][0] = step  # as an optimizer does it: in place
        assert clock.look(step) == (step == 3)
    assert clock.kept() == {"w": [2]}
    assert clock.curve == [(1, 10.0, 5.0), (2, 20.0, 9.0), (3, 30.0, 7.0)]


def test_the_table_tells_what_was_left_and_how_steady_it_was():
    shared = {"task": "hopper", "method": "ours", "minutes": 5.0, "cores": 1}
    rows = [
        shared | {"seed": 100, "best": 2600.0, "curve": [(1, 1, 100), (2, 2, 200), (3, 3, 300), (4, 4, 400)]},
        shared | {"seed": 101, "best": 2400.0, "curve": [(6, 1, 90)]},
    ]
    assert walkers_minutes.table(rows).splitlines()[2:] == [
        "| hopper | 2,500 | ours | 5, 1 | 2,600, 2,400 | 1 of 2 | 300, 90 | 5 |"
    ]
