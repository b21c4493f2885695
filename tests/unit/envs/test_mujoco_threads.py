"""MuJoCo's own threads play Gymnasium's walkers: same starts, steps, rewards and ends, and moments that are exact."""

import numpy as np
import pytest

from grpo.envs.fleet import EnvError, Fleet
from grpo.envs.make import make_fleet
from grpo.envs.mujoco_threads import WALKERS, MuJoCoFleet

pytest.importorskip("mujoco")


def drawn(fleet, random, count):
    return random.uniform(-1, 1, (count, *fleet.action_space.shape)).astype(np.float32)


@pytest.mark.parametrize("id", WALKERS)
def test_episodes_are_gymnasiums(id):
    theirs, ours = (make_fleet(id, 3, kind=kind, horizon=40) for kind in ("serial", "mujoco"))
    assert isinstance(ours, Fleet) and ours.observation_space == theirs.observation_space
    begun = [fleet.reset([0, 1, 2], [5, 6, 5]).observation for fleet in (theirs, ours)]
    assert begun[0].tolist() == begun[1].tolist() and begun[1].dtype == begun[0].dtype
    live, random, ends = np.arange(3), np.random.default_rng(0), 0
    while len(live):
        action = drawn(ours, random, len(live))
        one, other = theirs.step(live, action), ours.step(live, action)
        for name in ("observation", "reward_M", "terminated_M", "truncated_M"):
            np.testing.assert_allclose(getattr(other, name), getattr(one, name), atol=1e-6, err_msg=name)
        ends += int((~one.going_M).sum())
        live = live[one.going_M]
    assert ends == 3
    theirs.close(), ours.close()


@pytest.mark.parametrize("kept", ["state", "actions"])
def test_a_moment_is_gone_on_from_exactly(kept):
    fleet, random = MuJoCoFleet("Hopper-v5", 3), np.random.default_rng(1)
    fleet.reset([0, 1], [3, 4])
    for _ in range(4):
        fleet.step([0, 1], 0.1 * drawn(fleet, random, 2))
    moment, future = fleet.snapshot([1])[0], 0.1 * drawn(fleet, random, 1)
    if kept == "actions":
        moment = type(moment)(moment.seed, moment.actions)
    expected = fleet.step([1], future)
    assert fleet.restore([2], [moment]).errors == {}
    found = fleet.step([2], future)
    assert found.observation.tolist() == expected.observation.tolist()
    assert found.reward_M.tolist() == expected.reward_M.tolist()
    fleet.close()


def test_options_are_the_environments_own():
    fleet = MuJoCoFleet("Hopper-v5", 1, {"healthy_reward": 5.0, "exclude_current_positions_from_observation": False})
    plain = MuJoCoFleet("Hopper-v5", 1)
    still = np.zeros((1, 3), np.float32)
    paid = [made.reset([0], [0]) and made.step([0], still) for made in (fleet, plain)]
    assert paid[0].reward_M - paid[1].reward_M == pytest.approx(4.0)
    assert paid[0].observation.shape[1] == paid[1].observation.shape[1] + 1
    with pytest.raises(EnvError, match="legs"):
        MuJoCoFleet("Hopper-v5", 1, {"legs": 2})


def test_a_simulation_that_explodes_is_an_error_of_its_member_alone():
    fleet = MuJoCoFleet("HalfCheetah-v5", 2)
    fleet.reset([0, 1], [0, 1])
    bad = fleet.snapshot([0])[0]
    bad.state["physics"][1:] = 1e12
    fleet.restore([0], [bad])
    stepped = fleet.step([0, 1], np.zeros((2, 6), np.float32))
    assert list(stepped.errors) == [0] and "HalfCheetah-v5 member 0" in stepped.errors[0]
    assert np.isfinite(stepped.observation).all() and stepped.going_M.tolist() == [False, True]
    assert fleet.reset([0], [0]).errors == {}
    assert fleet.step([0], np.zeros((1, 6), np.float32)).errors == {}


def test_others_are_told_where_to_go():
    with pytest.raises(EnvError, match=r"vector='mujoco' is for .*Hopper-v5.*'processes'"):
        make_fleet("Ant-v5", 2, kind="mujoco")
