"""Robots learn: in chunks, from sparse success, after imitation; and a flow that GRPO has never heard of."""

import math

import pytest
import torch

from examples import flow_policy as flow
from grpo.app.builders import configs
from grpo.app.look import FRESH
from grpo.app.settings import preset_layer, resolve
from grpo.control import GRPOTrainer
from grpo.envs.fleet import EnvError
from tests.unit.control.reach import Reach

# --- chunks ---------------------------------------------------------------------------------------------------------

QUICK = {"vector": "serial", "hidden": (32,), "group_size": 8, "groups_per_step": 8, "learning_rate": 1e-2}
QUICK |= {"end_on_success": True, "num_iterations": 10}


@pytest.mark.parametrize(
    "settings",
    [
        {"action_chunk": 1},
        {"action_chunk": 3},
        {"action_chunk": 3, "logprob_type": "chunk_level", "reward_type": "chunk_level"},
        {"action_chunk": 3, "logprob_type": "token_level"},
        {"action_chunk": 3, "advantage": "episode", "filter_rewards": True, "rewards_lower_bound": 0.1,
         "rewards_upper_bound": 0.9},
    ],
    ids=["one by one", "chunks", "chunk level", "token level", "filtered"],
)  # fmt: skip
def test_a_sparse_goal_is_found_in_chunks(settings):
    made = GRPOTrainer(env=Reach, seed=1, **QUICK | settings)
    before = made.evaluate(100).success_E.mean()
    made.train(steps=25, progress=None)
    after = made.evaluate(100, seed=FRESH).success_E.mean()
    assert before < 0.4 and after > 0.85


def test_grpo_goes_on_where_imitation_ends():
    """Two shown episodes are not enough; with them the goal is found often enough to learn the rest."""
    settings = {"warm_start": "tests.unit.control.reach:straight", "warm_start_episodes": 2, "warm_start_passes": 8}
    made = GRPOTrainer(env=lambda: Reach(near=0.3), seed=0, eval_episodes=100, **QUICK | settings)
    reports = made.train(steps=20, progress=None)
    imitating = reports[0]["warm_start/after/success"]
    assert reports[0]["warm_start/before/success"] <= imitating < 0.9
    assert made.evaluate(100, seed=FRESH).success_E.mean() > max(imitating, 0.85)


@pytest.mark.slow
def test_the_block_of_rlinf_trains_a_robot():
    pytest.importorskip("gymnasium_robotics")
    made = GRPOTrainer(config=resolve([preset_layer("rlinf_embodied")], configs()).config)
    assert made.evaluate(50).success_E.mean() <= 0.3
    made.train(steps=20, progress=None)
    assert made.evaluate(100, seed=FRESH).success_E.mean() >= 0.8


@pytest.mark.slow
def test_an_arm_reaches_for_points():
    pytest.importorskip("gymnasium_robotics")
    try:
        made = GRPOTrainer(config=resolve([preset_layer("fetch-reach")], configs()).config)
    except EnvError as error:
        pytest.skip(str(error))
    made.train(steps=30, progress=None)
    assert made.evaluate(100, seed=FRESH).success_E.mean() >= 0.8


@pytest.mark.slow
def test_the_maze_is_solved_from_less_than_a_third():
    pytest.importorskip("gymnasium_robotics")
    resolved = resolve([preset_layer("pointmaze")], configs())
    made = GRPOTrainer(config=resolved.config)
    first = made.step()
    assert first["warm_start/before/success"] <= 0.3
    made.train(steps=resolved.run.steps, evaluate_every=5, progress=None)
    assert made.evaluate(100, seed=FRESH).success_E.mean() >= 0.8


# --- a flow ---------------------------------------------------------------------------------------------------------


def test_the_log_probs_of_a_flow_are_those_of_its_sampler_s_steps():
    torch.manual_seed(0)
    policy = flow.FlowPolicy(steps=4, noise=0.6)
    states = list(flow.drawn_states(3, torch.Generator().manual_seed(0)))
    actions = [path for group in policy.generate_actions(states, 2) for path in group]
    twice = [state for state in states for _ in range(2)]
    logp = policy.get_log_probabilities(twice, actions)
    assert logp.shape == policy.get_mask(twice, actions).shape == (6, 4)
    for row, (state, path) in enumerate(zip(twice, actions, strict=True)):
        for step in range(4):
            t, dt, x = step / 4, 0.25, path[step]
            v = policy.velocity(x[None], torch.tensor([t]), state[None])[0]
            mean = x + (v - 0.18 * (x - t * v)) * dt
            normal = torch.distributions.Normal(mean, 0.6 * math.sqrt((1 - t) * dt))
            torch.testing.assert_close(logp[row, step], normal.log_prob(path[step + 1]).sum())


@pytest.mark.parametrize("noise", [0.0, 0.7, 1.4])
def test_the_stochastic_sampler_has_the_marginals_of_the_flow(noise):
    """Where plans are N(m, s²) the velocity is known; sampled with any noise, plans come out as N(m, s²)."""
    mean, deviation = 1.5, 0.4

    class Known(flow.FlowPolicy):
        def velocity(self, x_NA, t, state_NS):
            t = t[:, None]
            variance = (1 - t) ** 2 + t**2 * deviation**2
            return mean + (t * deviation**2 - (1 - t)) / variance * (x_NA - t * mean)

    torch.manual_seed(1)
    end = Known(size=2, steps=200, noise=noise).paths(torch.zeros(4000, 2))[:, -1]
    assert end.mean().item() == pytest.approx(mean, abs=0.02) and end.std().item() == pytest.approx(deviation, abs=0.02)


@pytest.mark.slow
def test_a_flow_learns_what_it_could_hardly_imitate():
    _, (untrained, imitating, learned) = flow.trained(seed=0, steps=25)
    assert untrained[0] < 0.05 and imitating[0] < 0.4 and learned[0] > imitating[0] + 0.2
