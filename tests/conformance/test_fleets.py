"""Every fleet keeps what `grpo.envs.fleet` promises, whatever it is made of."""

import numpy as np
import pytest

from grpo.envs.fleet import EnvError, Fleet
from grpo.envs.make import make_fleet
from tests.extras import needs_envpool

KINDS = {
    "serial": {"kind": "serial"},
    "processes": {"kind": "processes", "workers": 2},
    "vector": {"kind": "vector"},
    "classic": {"kind": "classic"},
    "envpool": {"kind": "envpool"},
}
MARKS = {"envpool": [needs_envpool]}
RIGHT_LEFT = np.array([1, 0, 1])


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, [])) for name in KINDS])
def fleet(request):
    made = make_fleet("CartPole-v1", 3, horizon=5, **KINDS[request.param])
    yield made
    made.close()
    made.close()  # a second time does nothing


def seen(answer):
    return answer.observation.tolist()


def refusal(fleet):
    """Why member 0 does not step: some fleets refuse the call, others report the position."""
    try:
        return fleet.step([0], np.array([1])).errors.get(0, "")
    except EnvError as error:
        return str(error)


def test_it_is_one(fleet):
    assert isinstance(fleet, Fleet)
    assert (fleet.name, fleet.size, fleet.horizon) == ("CartPole-v1", 3, 5)


def test_one_seed_is_one_start(fleet):
    first = fleet.reset([0, 1, 2], [7, 7, 9])
    assert first.errors == {} and first.observation.shape == (3, 4)
    assert all(observation in fleet.observation_space for observation in first.observation)
    assert seen(first)[0] == seen(first)[1] != seen(first)[2]
    assert seen(fleet.reset([2], [7])) == seen(first)[:1]


def test_rows_come_in_the_order_in_which_members_are_named(fleet):
    forward, backward = fleet.reset([0, 1, 2], [1, 2, 3]), fleet.reset([2, 1, 0], [3, 2, 1])
    assert seen(forward) == seen(backward)[::-1]


def test_a_step_has_a_row_a_member_and_moves_nobody_else(fleet):
    fleet.reset([0, 1, 2], [4, 4, 4])
    stepped = fleet.step([2, 0], np.array([1, 0]))
    assert stepped.errors == {} and stepped.reward_M.tolist() == [1.0, 1.0]
    assert stepped.terminated_M.dtype == stepped.truncated_M.dtype == bool
    assert seen(stepped)[0] != seen(stepped)[1]
    assert seen(fleet.step([1], np.array([1])))[0] == seen(stepped)[0]  # it had stood still


def test_the_limit_truncates_and_nothing_resets_by_itself(fleet):
    fleet.reset([0, 1], [5, 6])
    for step in range(5):
        stepped = fleet.step([0, 1], RIGHT_LEFT[[step % 2, step % 2]])
        assert stepped.truncated_M.tolist() == [step == 4] * 2 and not stepped.terminated_M.any()
    assert "reset" in refusal(fleet)
    assert fleet.reset([0], [5]).errors == {}


def test_a_bad_action_costs_its_position_only(fleet):
    fleet.reset([0, 1, 2], [1, 2, 3])
    stepped = fleet.step([0, 1, 2], np.array([1, 7, 0]))
    assert list(stepped.errors) == [1] and stepped.reward_M.tolist() == [1.0, 0.0, 1.0]
    assert not (stepped.terminated_M[1] or stepped.truncated_M[1])
    assert fleet.reset([1], [2]).errors == {}


def test_members_are_put_back_where_another_was(fleet):
    fleet.reset([0], [8])
    fleet.step([0], np.array([1]))
    moment = fleet.snapshot([0])
    assert moment[0].seed == 8 and moment[0].actions.tolist() == [1]
    onward = fleet.step([0], np.array([1]))
    back = fleet.restore([1, 2], moment * 2)
    assert back.errors == {} and seen(back)[0] == seen(back)[1]
    again = fleet.step([1, 2], np.array([1, 0]))
    assert seen(again)[0] == seen(onward)[0] != seen(again)[1]


@pytest.mark.parametrize("members", [[0, 0], [3], [-1]], ids=str)
def test_members_are_distinct_and_known(fleet, members):
    with pytest.raises(EnvError):
        fleet.reset(members, [1] * len(members))
