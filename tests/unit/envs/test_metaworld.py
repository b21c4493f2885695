"""Meta-World's arm: a seed is a task and a start, the script of each task succeeds, success alone is paid."""

import importlib.util

import numpy as np
import pytest

from grpo.envs.fleet import EnvError
from grpo.envs.make import make_fleet

THERE = importlib.util.find_spec("metaworld") is not None
ENV = "grpo.envs.metaworld:MetaWorld"


@pytest.mark.skipif(THERE, reason="Meta-World is installed")
def test_what_to_install_is_said():
    with pytest.raises(EnvError, match=r"pip install metaworld 'mujoco<3.12'"):
        make_fleet(ENV, 1, kind="serial")


@pytest.mark.skipif(not THERE, reason="Meta-World is not installed")
def test_a_seed_is_a_task_and_a_start_and_its_script_succeeds():
    from grpo.envs.metaworld import SEEN, expert, names

    fleet = make_fleet(ENV, 3, kind="serial", horizon=150)
    begun = fleet.reset([0, 1, 2], [7, 7, 9]).observation
    assert begun[0].tolist() == begun[1].tolist() and fleet.reset([2], [7]).observation[0].tolist() == begun[0].tolist()
    assert begun.shape == (3, SEEN + len(names("MT10"))) and begun[:, SEEN:].sum(1).tolist() == [1, 1, 1]
    assert begun[0, SEEN:].argmax() != begun[2, SEEN:].argmax()
    same = (
        make_fleet(ENV, 2, kind="serial", horizon=150, kwargs={"tasks": ["push-v3"]}).reset([0, 1], [1, 2]).observation
    )
    assert (same[0, 4:7] != same[1, 4:7]).any()  # what is pushed lies elsewhere
    now, paid = fleet.reset([0], [7]).observation, []
    while sum(paid) == 0 and len(paid) < 150:
        stepped = fleet.step([0], expert(now[0])[None])
        now, paid = stepped.observation, [*paid, float(stepped.reward_M[0])]
        assert stepped.success_M[0] == paid[-1]
    assert paid[-1] == 1.0 and not np.any(paid[:-1])


@pytest.mark.skipif(not THERE, reason="Meta-World is not installed")
def test_an_unknown_task_is_named():
    with pytest.raises(EnvError, match=r"MT10 has no task 'swim-v3'.*reach-v3"):
        make_fleet(ENV, 1, kind="serial", kwargs={"tasks": ["swim-v3"]})


@pytest.mark.skipif(not THERE, reason="Meta-World is not installed")
def test_differences_are_the_ways_between_hand_thing_and_goal_and_change_nothing_else():
    from grpo.envs.metaworld import WAYS, expert

    plain, more = (make_fleet(ENV, 1, kind="serial", kwargs={"differences": on}) for on in (False, True))
    few, all_ = (fleet.reset([0], [7]).observation[0] for fleet in (plain, more))
    assert all_.shape == more.observation_space.shape == (len(few) + WAYS,) and all_[:-WAYS].tolist() == few.tolist()
    hand, thing, goal = few[0:3], few[4:7], few[36:39]
    assert np.allclose(all_[-WAYS:], np.concatenate([thing - hand, goal - thing, goal - hand]))
    assert expert(all_).tolist() == expert(few).tolist()
