"""The T-maze pays the turn that the sign showed, and shows the sign once."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from grpo.envs.make import make_fleet
from grpo.envs.tmaze import FORWARD, LEFT, RIGHT, WALL, TMaze


def test_it_is_an_environment():
    check_env(TMaze(length=3), skip_render_check=True)


@pytest.mark.parametrize("turn", ["shown", "other"])
def test_only_the_turn_that_was_shown_pays(turn):
    env = TMaze(length=3)
    signs = set()
    for seed in range(8):
        seen, _ = env.reset(seed=seed)
        sign = int(seen.argmax())
        signs.add(sign)
        for at in range(3):
            seen, reward, over, cut, _ = env.step(FORWARD)
            assert seen.tolist() == [0, 0, at < 2, at == 2] and (reward, over, cut) == (0.0, False, False)
        _, reward, over, cut, info = env.step(sign if turn == "shown" else 1 - sign)
        assert over and not cut and reward == info["is_success"] == (turn == "shown")
    assert signs == {LEFT, RIGHT}


def test_walls_cost_and_the_sign_is_gone_after_the_first_step():
    env = TMaze(length=2)
    env.reset(seed=0)
    seen, reward, *_ = env.step(LEFT)
    assert seen.tolist() == [0, 0, 1, 0] and reward == WALL
    env.step(FORWARD), env.step(FORWARD)
    assert env.step(FORWARD)[1] == WALL


def test_time_runs_out():
    fleet = make_fleet("grpo.envs.tmaze:TMaze", 1, kind="serial", kwargs={"length": 2})
    assert fleet.horizon == 12
    fleet.reset([0], [0])
    ends = [fleet.step([0], np.array([LEFT])).truncated_M[0] for _ in range(12)]
    assert ends == [False] * 11 + [True]


def test_a_corridor_has_a_length():
    with pytest.raises(ValueError, match="length=0"):
        TMaze(length=0)
