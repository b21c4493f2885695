"""How good a policy is: on starts of its own, with an honest interval; and what it looks like."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from grpo.control import GRPOTrainer
from grpo.control.evaluate import Player, watch
from grpo.control.groups import EVALUATION, seeds
from grpo.envs.evaluate import Evaluation, rendered
from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory
from grpo.envs.rules import EpisodeRules
from tests.faults import envs


def cartpole(**settings) -> GRPOTrainer:
    return GRPOTrainer(env="CartPole-v1", **{"hidden": (16,)} | settings)


def evaluation(returns, success=np.nan, failed=0, **more) -> Evaluation:
    returns = np.asarray(returns, float)
    return Evaluation(returns, np.full(len(returns), 7), np.broadcast_to(success, len(returns)), failed, **more)


# --- starts ---------------------------------------------------------------------------------------------------------


def test_the_same_starts_every_time_and_never_those_of_training(monkeypatch):
    made = cartpole()
    used = {"train": [], "judge": []}
    for name, fleet in (("train", made.source.fleet), ("judge", made.source.evaluator.copies.fleet(20))):
        real = fleet.reset

        def reset(members, seeds, real=real, name=name):
            used[name] += seeds
            return real(members, seeds)

        monkeypatch.setattr(fleet, "reset", reset)
    for _ in range(3):
        made.step()
        made.evaluate(20)
    assert used["judge"] == seeds(0, 0, EVALUATION, 20) * 3
    assert not {*used["train"]} & {*used["judge"]} and len({*used["train"]}) == 6


def test_a_seed_chooses_other_starts_and_greedy_play_repeats_itself():
    made = cartpole()
    one, same, other = made.evaluate(6), made.evaluate(6), made.evaluate(6, seed=99)
    assert one.return_E.tolist() == same.return_E.tolist() != other.return_E.tolist()
    drawn, again = made.evaluate(6, greedy=False), made.evaluate(6, greedy=False)
    assert drawn.return_E.tolist() == again.return_E.tolist() != one.return_E.tolist()


def test_more_episodes_than_copies_are_played_one_after_the_other():
    made = cartpole(num_envs=3)
    few = made.evaluate(8)
    assert made.source.evaluator.copies.fleet(1).size == 3
    assert few.return_E.tolist() == cartpole().evaluate(8).return_E.tolist()


def test_the_copies_for_evaluation_are_kept_and_grow_when_needed():
    made = cartpole()
    made.evaluate(4)
    first = made.source.evaluator.copies.fleet(1)
    made.evaluate(3)
    assert made.source.evaluator.copies.fleet(1) is first is not made.source.fleet
    made.evaluate(9)
    assert made.source.evaluator.copies.fleet(1).size == 9


def test_an_only_copy_is_lent_for_evaluation_and_given_back():
    made = GRPOTrainer(env=envs.Walk(), group_size=4, groups_per_step=1)
    before = made.evaluate(4).return_E.tolist()
    assert made.evaluate(4).return_E.tolist() == before and len(before) == 4
    assert made.step()["failed"] == 0  # evaluation must not have closed it


# --- numbers --------------------------------------------------------------------------------------------------------


def test_metrics_and_table_say_what_is_known():
    told = evaluation([1.0, 3.0], success=np.array([1.0, np.nan]))
    low = pytest.approx(0.2065, abs=1e-3)
    shares = {"success": 1.0, "success_low": low, "success_high": 1.0}
    assert told.metrics() == {"return": 2.0, "return_std": 1.0, "length": 7.0, **shares}
    assert [row["quantity"] for row in told.table()] == ["return", "length", "success"]
    row = evaluation([1.0, 3.0]).table()[0]
    assert (row["mean"], row["min"], row["max"], row["std"], row["episodes"]) == (2.0, 1.0, 3.0, 1.0, 2)
    assert "success" not in evaluation([1.0]).metrics()
    assert evaluation([1.0], failed=2).metrics()["failed"] == 2


def test_when_every_episode_failed_there_is_no_table():
    nothing = evaluation([], failed=3, why="Walk member 0, step 2: no")
    assert nothing.metrics() == {"return": None, "failed": 3.0}
    with pytest.raises(EnvError, match="all 3 episodes failed: Walk member 0, step 2: no"):
        nothing.table()


def test_failed_episodes_are_counted_and_left_out():
    starts = seeds(0, 0, EVALUATION, 3)

    class Sometimes(envs.Walk):
        def step(self, action):
            if self.seed == starts[1]:
                raise RuntimeError("not today")
            return super().step(action)

    found = GRPOTrainer(env=Sometimes, vector="serial").evaluate(3)
    assert found.failed == 1 and len(found.return_E) == 2 and "not today" in found.why


# --- one episode at a time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"memory": 4}, {"action_repeat": 3}, {"scale_observations": True}], ids=str)
def test_a_single_player_plays_as_the_fleet_does(settings):
    made = cartpole(vector="serial", **settings)
    made.step()
    found = made.evaluate(3).return_E.tolist()
    assert made.watch(3) == found and len(set(found)) > 1


def test_a_player_holds_its_action_and_forgets_between_episodes():
    asked = []

    class Policy:
        head = SimpleNamespace(to_env=lambda recorded: recorded)

        def begin(self, count):
            return 0

        def act(self, seen, random, memory):
            asked.append(memory)
            return SimpleNamespace(recorded=np.array([len(asked) % 2]), memory=memory + 1)

    player = Player(envs.Walk(length=7), Policy(), lambda seen: seen, EpisodeRules(action_repeat=3))
    player.episode(1)
    player.episode(2)
    assert asked == [0, 1, 2, 0, 1, 2]


def test_what_is_given_is_shown_itself_where_it_can_be():
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    assert rendered(env, "rgb_array") is env and rendered(env, None) is env
    plain = gym.make("CartPole-v1")
    again = rendered(plain, "rgb_array")
    assert again is not plain and again.render_mode == "rgb_array" and again.spec.id == "CartPole-v1"
    assert rendered(EnvFactory("CartPole-v1"), "rgb_array").render_mode == "rgb_array"
    with pytest.raises(EnvError, match=r"Walk was not made with gym\.make, so it cannot be made again to draw it"):
        rendered(envs.Walk(), "rgb_array")


def test_a_video_shows_the_same_episodes(tmp_path):
    made = cartpole()
    source = made.source
    place = tmp_path / "play.mp4"
    starts = seeds(0, 0, EVALUATION, 2)
    found = watch(EnvFactory("CartPole-v1"), source.policy, source.scaling, EpisodeRules(), starts, video=place)
    assert found == made.evaluate(2).return_E.tolist()
    assert place.stat().st_size > 1000 and b"ftyp" in place.read_bytes()[:16]
