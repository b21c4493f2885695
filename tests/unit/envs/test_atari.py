"""An Atari game as it is usually played: skipped, grey, small, stacked; its moments restored bit for bit."""

from itertools import pairwise

import numpy as np
import pytest

from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory
from grpo.envs.pictures import smaller
from grpo.envs.serial import SerialFleet, self_test

ale_py = pytest.importorskip("ale_py", reason="Atari games are an extra: pip install 'anygrpo[atari]'")
from grpo.envs.atari import Atari  # noqa: E402 (needs ale-py)

NOOP, FIRE, UP, DOWN = 0, 1, 2, 3


def played(env, actions, seed=0):
    """Observations, rewards and ends."""
    seen = [env.reset(seed=seed)[0]]
    tape = [env.step(action) for action in actions]
    return np.stack(seen + [step[0] for step in tape]), [step[1] for step in tape], [step[2] for step in tape]


def test_what_is_seen_are_four_small_grey_frames():
    env = Atari("pong")
    seen, _, _ = played(env, [UP, DOWN] * 20)
    assert seen.shape == (41, 4, 84, 84) and seen.dtype == np.uint8 == env.observation_space.dtype
    assert all(env.observation_space.contains(one) for one in seen)
    assert (seen[0] == seen[0, 0]).all(), "before the first step only the first frame has been seen"
    for before, after in pairwise(seen):
        assert np.array_equal(after[:3], before[1:])
    assert any(not np.array_equal(one[2], one[3]) for one in seen), "things move"


def test_a_frame_is_the_brighter_of_the_last_two_of_four():
    env, bare = Atari("pong", noop_max=0, fire_reset=False), ale_py.ALEInterface()
    bare.setFloat("repeat_action_probability", 0.0)
    bare.loadROM(ale_py.roms.get_rom_path("pong"))
    bare.reset_game()
    env.reset(seed=0)
    for _ in range(30):
        screens = []
        for _ in range(4):
            bare.act(ale_py.Action.RIGHT)
            screens.append(bare.getScreenGrayscale())
        assert np.array_equal(env.step(UP)[0][-1], smaller(np.maximum(*screens[2:]), 84, 84))


def test_seeds_say_how_a_game_begins():
    env = Atari("pong")
    starts = [env.reset(seed=seed)[0] for seed in (0, 0, 1, 2, 3)]
    assert np.array_equal(starts[0], starts[1])
    futures = [played(env, [UP] * 30, seed)[0] for seed in (0, 1, 2, 3)]
    assert len({future.tobytes() for future in futures}) > 1


def test_points_are_counted_as_the_game_does():
    env = Atari("pong")
    _, rewards, ends = played(env, [NOOP] * 1200)
    at = ends.index(True)
    assert sum(rewards[: at + 1]) == -21.0 and set(rewards) == {0.0, -1.0}


def test_a_life_is_an_episode_where_that_is_asked_for():
    lives = {}
    for one_life in (True, False):
        env = Atari("breakout", episodic_life=one_life)
        env.reset(seed=0)
        steps = 0
        while True:
            steps += 1
            _, _, over, _, info = env.step(FIRE)
            if over or steps == 500:
                break
        lives[one_life] = info["lives"]
    assert lives[True] == 4 and lives[False] < 4


def test_fire_begins_a_game_that_waits_for_it():
    def moved(fire_reset):
        env = Atari("breakout", fire_reset=fire_reset)
        seen, _, _ = played(env, [NOOP] * 10)
        return not np.array_equal(seen[-1, 3], seen[-2, 3])

    assert moved(True) and not moved(False)


def test_fire_begins_a_game_although_actions_stick():
    env = Atari("breakout", repeat_action_probability=0.25)
    seen = [played(env, [NOOP] * 10, seed)[0] for seed in range(12)]
    assert not any(np.array_equal(one[-1, 3], one[-2, 3]) for one in seen)


@pytest.mark.parametrize("erase", [False, True])
def test_a_moment_can_be_restored(erase):
    assert self_test(EnvFactory("grpo.envs.atari:Atari", {"game": "pong", "erase_background": erase})) == "state"


def test_a_moment_is_restored_exactly_into_the_others_of_a_group():
    fleet = SerialFleet(EnvFactory("grpo.envs.atari:Atari", {"game": "breakout"}), 3)
    random = np.random.default_rng(0)
    fleet.reset([0, 1, 2], [4, 5, 6])
    for action in random.integers(0, 4, 40):
        fleet.step([0], np.array([action]))
    moment = fleet.snapshot([0])[0]
    assert moment.state is not None
    begun = fleet.restore([1, 2], [moment] * 2)
    assert not begun.errors
    for action in random.integers(0, 4, 60):
        stepped = fleet.step([0, 1, 2], np.array([action] * 3))
        assert (stepped.observation == stepped.observation[:1]).all()
        assert len(set(stepped.reward_M.tolist())) == 1 and len(set(stepped.terminated_M.tolist())) == 1


def test_sticky_actions_follow_the_seed():
    env = Atari("pong", repeat_action_probability=0.5)
    actions = [UP, DOWN] * 30
    one, again, other = (played(env, actions, seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    free = played(Atari("pong"), actions, 1)[0]
    assert not np.array_equal(one[-1], free[-1])


def test_the_screen_is_drawn_in_colours():
    env = Atari("pong", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (210, 160, 3) and env.metadata["render_fps"] == 15


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"game": "Ponk"}, "pong"),
        ({"game": "pong", "frame_skip": 0}, "frame_skip"),
        ({"game": "pong", "stack": 0}, "stack"),
        ({"game": "pong", "repeat_action_probability": 25}, "repeat_action_probability"),
    ],
)
def test_a_game_that_cannot_be_made_says_why(settings, says):
    with pytest.raises(EnvError, match=says):
        Atari(**settings)


def test_an_erased_background_leaves_what_moves_and_is_every_copys():
    plain, bare, again = Atari("pong"), Atari("pong", erase_background=True), Atari("pong", erase_background=True)
    for env in (plain, bare, again):
        env.reset(seed=3)
    for _ in range(60):
        (seen, *rest), (left, *others), (same, *_) = (env.step(3) for env in (plain, bare, again))
        assert rest == others, "the game is the same"
        np.testing.assert_array_equal(left, same)
    assert (seen[-1] > 0).mean() > 0.9 and 0 < (left[-1] > 0).mean() < 0.1
    np.testing.assert_array_equal(left[-1], np.abs(seen[-1].astype(int) - bare._background))
    assert bare._background is again._background, "looked for once a process"


def test_sticky_actions_and_other_games_have_a_background_too():
    sticky = Atari("pong", erase_background=True, repeat_action_probability=0.25)
    np.testing.assert_array_equal(sticky._background, Atari("pong", erase_background=True)._background)
    actions = [UP, DOWN] * 20
    np.testing.assert_array_equal(played(sticky, actions, 1)[0], played(sticky, actions, 1)[0])
    assert not np.array_equal(Atari("breakout", erase_background=True)._background, sticky._background)
