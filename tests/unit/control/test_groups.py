"""What makes a group, and that its members really share what they should."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer
from grpo.control.groups import EVALUATION, TRAINING, TRUNKS, anchors, seeds
from grpo.envs.fleet import EnvError
from grpo.protocols import CollectRequest
from tests.extras import needs_envpool


def collect(step=0, **settings):
    made = GRPOTrainer(**{"env": "CartPole-v1"} | settings)
    try:
        return made, made.source.collect(CollectRequest(step)).rollouts
    finally:
        made.source.close()


def first(rollouts) -> np.ndarray:
    return rollouts.inputs["observation"][:, 0].numpy()


def test_no_start_is_used_for_training_and_evaluation():
    training = {s for step in range(50) for stream in (TRAINING, TRUNKS) for s in seeds(0, step, stream, 20)}
    evaluation = set(seeds(0, 0, EVALUATION, 1000))
    assert all(s % 2 == 0 for s in training) and all(s % 2 == 1 for s in evaluation)
    assert len(training) > 1990 and len(evaluation) == 1000
    assert seeds(0, 1, TRAINING, 3) == seeds(0, 1, TRAINING, 3) != seeds(1, 1, TRAINING, 3)


@pytest.mark.parametrize(
    "vector", ["classic", "vector", pytest.param("envpool", marks=needs_envpool), "serial", "processes"]
)
def test_a_group_starts_from_one_state(vector):
    more = {"workers": 2} if vector == "processes" else {}
    _, rollouts = collect(vector=vector, group_size=4, groups_per_step=3, **more)
    start = first(rollouts).reshape(3, 4, 4)
    np.testing.assert_array_equal(start, np.repeat(start[:, :1], 4, axis=1))
    assert len(np.unique(start[:, 0], axis=0)) == 3


def test_seats_do_not_decide_who_shares_a_start():
    _, rollouts = collect(num_envs=3, group_size=4, groups_per_step=3)
    start = first(rollouts).reshape(3, 4, 4)
    np.testing.assert_array_equal(start, np.repeat(start[:, :1], 4, axis=1))


def test_a_batch_has_a_start_for_each_and_one_group():
    _, rollouts = collect(group_by="batch", group_size=4, groups_per_step=3)
    assert len(np.unique(first(rollouts), axis=0)) == 12
    assert rollouts.group_N.unique().tolist() == [0]


@pytest.mark.parametrize("vector", ["classic", "serial"])
def test_branches_share_a_visited_state(vector):
    made, rollouts = collect(group_by="branch", group_size=4, groups_per_step=6, vector=vector)
    start = first(rollouts).reshape(6, 4, 4)
    np.testing.assert_array_equal(start, np.repeat(start[:, :1], 4, axis=1))
    assert np.abs(start[:, 0]).max() > 0.05  # beyond where an episode can begin
    assert made.source.env_steps > int(rollouts.mask_NT.sum())  # the episodes that were branched count too


def test_branch_points_are_spread_over_an_episode():
    made = GRPOTrainer(env="Pendulum-v1", group_by="branch", group_size=2, groups_per_step=40)
    points, _ = __import__("grpo.control.groups", fromlist=["x"]).branch_points(
        made.config, 0, made.source.fleet, made.source.policy, made.source.scaling, np.random.default_rng(0)
    )
    steps = sorted(len(point.actions) for point in points)
    assert 60 < np.mean(steps) < 140 and steps[0] < 40 and steps[-1] > 160


def test_equal_observations_are_anchors():
    seen = {"a": np.array([[0, 1], [1, 0]]), "b": np.array([[[1.0], [2.0]], [[2.0], [1.0]]])}
    found = anchors(seen, 2, 2)
    assert found[0, 0] == found[1, 1] and found[0, 1] == found[1, 0] and found[0, 0] != found[0, 1]


def test_anchor_groups_compare_decisions_at_one_place():
    _, rollouts = collect(env="FrozenLake-v1", group_by="anchor", advantage="step", gamma=0.9)
    mask, place = rollouts.mask_NT, rollouts.inputs["observation"]
    for number in rollouts.group_NT[mask].unique():
        assert len(place[mask & (rollouts.group_NT == number)].unique()) == 1


def test_anchors_need_observations_that_can_be_equal():
    with pytest.raises(EnvError, match="never equal; use group_by=start"):
        GRPOTrainer(env="CartPole-v1", group_by="anchor", advantage="step")


def test_same_step_means_leave_out_who_has_ended():
    made, rollouts = collect(advantage="step", group_size=4, groups_per_step=2, gamma=1.0, scale="none")
    from grpo.credit import advantages

    found = advantages(rollouts, made.recipe)
    to_go = torch.flip(torch.cumsum(torch.flip(rollouts.reward_NT, [1]), 1), [1])
    for group in (0, 1):
        rows = rollouts.group_N == group
        for t in range(rollouts.mask_NT.shape[1]):
            here = rows & rollouts.mask_NT[:, t]
            if here.sum() > 1:
                expected = to_go[here, t] - to_go[here, t].mean()
                torch.testing.assert_close(found[here, t], expected)
            elif here.any():
                assert found[here, t] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_by": "anchor"}, "needs advantage=step or leave_one_out"),
        ({"group_by": "steps", "advantage": "episode"}, "needs advantage=step or leave_one_out"),
        ({"group_by": "steps", "advantage": "step", "memory": 8}, "set memory=0"),
        ({"memory": 8, "decisions_per_minibatch": 4}, "use rows_per_minibatch"),
        ({"group_by": "branch", "memory": 8}, "set memory=0"),
        ({"advantage": "linear", "baseline": "none"}, "already says baseline"),
        ({"loss_type": "grpo", "baseline": "given"}, "needs advantage, one of"),
        ({"beta": 0.1, "kl_estimator": "exact"}, "set kl_to=old"),
        ({"gae_lambda": 0.9}, "it needs advantage=critic"),
        ({"reward_scale": 0.1}, "divides it out"),
        ({"workers": 2, "vector": "serial"}, "needs vector=processes"),
        ({"group_size": 1}, "group_size"),
        ({"group_by": "branch", "no_signal": "resample", "advantage": "episode"}, "can be asked for again"),
        ({"vectr": "serial"}, "did you mean"),
    ],
)
def test_impossible_settings_are_refused_with_the_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        ControlConfig(**settings)


def test_one_group_size_for_environments_and_algorithm():
    made, rollouts = collect(group_size=5, groups_per_step=2)
    assert len(rollouts) == 10 and made.source.fleet.size == 10 and made.config.group_size == 5


def test_a_lone_environment_without_a_spec_plays_one_after_the_other():
    class Short(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

        def step(self, action):
            self.t += 1
            return np.zeros(2, np.float32), float(action), self.t >= 3, False, {}

    made = GRPOTrainer(env=Short(), group_size=4, groups_per_step=2)
    reports = made.train(steps=8, progress=None)
    assert made.source.fleet.size == 1
    assert reports[-1]["return"] > reports[0]["return"]
    assert made.evaluate(4).return_E.shape == (4,)


def test_a_branched_step_reports_the_whole_episodes():
    made = GRPOTrainer(env="Pendulum-v1", group_by="branch", group_size=2, groups_per_step=4)
    assert made.step()["episode_length"] == 200


def test_held_actions_count_the_steps_that_were_really_made():
    made = GRPOTrainer(env="Pendulum-v1", action_repeat=30, group_size=2, groups_per_step=1)
    assert made.step()["episode_length"] == 200 and made.evaluate(2).length_E.tolist() == [200, 200]
