"""A chunked policy is a policy whose action is a chunk; a group is never of unlike starts; a run with both resumes."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from grpo.config import ConfigError
from grpo.control import GRPOTrainer
from grpo.protocols import CollectRequest
from tests.unit.control.reach import Reach

SETTINGS = {"vector": "serial", "hidden": (16,), "group_size": 4, "groups_per_step": 3, "num_iterations": 3}
SETTINGS |= {"target_kl": None, "seed": 5}


def weights(made: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.policy.parameters().items()}


def trained(steps=3, **settings) -> dict[str, torch.Tensor]:
    made = GRPOTrainer(**SETTINGS | settings)
    for _ in range(steps):
        made.step()
    return weights(made)


@pytest.mark.parametrize("level", ["action_level", "chunk_level"])
@pytest.mark.parametrize("more", [{}, {"advantage": "episode"}, {"memory": 4}], ids=["linear", "episode", "memory"])
def test_chunks_of_one_are_no_chunks_bit_for_bit(level, more):
    levels = {"action_chunk": 1, "logprob_type": level, "reward_type": level, "entropy_type": level}
    plain, chunked = trained(env=Reach, **more), trained(env=Reach, **levels, **more)
    assert all(torch.equal(plain[name], chunked[name]) for name in plain)


class Keys(Reach):
    """The point moved by one of four keys."""

    action_space = gym.spaces.Discrete(4)

    def step(self, action):
        return super().step([[1, 0], [-1, 0], [0, 1], [0, -1]][int(action)])


class Long(gym.Wrapper):
    """An environment whose action is a chunk, played without looking; it is over when the inner one is."""

    def __init__(self, env, size):
        super().__init__(env)
        self.action_space = gym.spaces.MultiDiscrete([env.action_space.n] * size)

    def step(self, action):
        total = 0.0
        for part in action:
            seen, reward, terminated, truncated, info = self.env.step(part)
            total += reward
            if terminated or truncated:
                break
        return seen, total, terminated, truncated, info


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_chunked_policy_equals_one_whose_action_is_the_chunk(size):
    """Whole chunks compared and paid at once. The limit is a multiple of every size: no chunk is cut short."""
    settings = {"advantage": "episode", "entropy_coef": 0.02}
    levels = dict.fromkeys(("logprob_type", "reward_type", "entropy_type"), "chunk_level")
    start = weights(GRPOTrainer(**SETTINGS | {"env": Keys, "action_chunk": size}))
    chunked = trained(env=Keys, action_chunk=size, **levels, **settings)
    whole = trained(env=lambda: Long(Keys(), size), **settings)
    for name, value in whole.items():
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(chunked[name], value, rtol=1e-4, atol=1e-6)


def test_a_run_with_chunks_and_filtered_groups_resumes_exactly(tmp_path):
    settings = SETTINGS | {"env": Reach, "action_chunk": 3, "end_on_success": True, "advantage": "episode"}
    settings |= {"filter_rewards": True, "rewards_lower_bound": 0.05, "rewards_upper_bound": 0.95, "seed": 1}

    def run(folder, steps):
        made = GRPOTrainer(**settings)
        made.train(steps=steps, folder=tmp_path / folder, evaluate_every=2, progress=None)
        made.source.close()
        return weights(made)

    whole = run("whole", 6)
    run("cut", 3)
    again = run("cut", 6)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    read = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert read[0] == read[1]


# --- a group never mixes initial states -----------------------------------------------------------------------------


class Quick(Reach):
    """Episodes of different lengths, so that seats are taken over at odd moments; some succeed, some never do."""

    def reset(self, *, seed=None, options=None):
        seen, info = super().reset(seed=seed)
        self.limit = 2 + int(self.np_random.integers(6))
        return seen, info


AXES = {
    "group_by": ["start", "branch", "anchor"],
    "num_envs": [1, 3, 64],
    "action_chunk": [1, 3],
    "end_on_success": [False, True],
    "refill": ["none", "resample", "filter"],
    "vector": ["serial", "classic"],
}


def combined(group_by, num_envs, action_chunk, end_on_success, refill, vector) -> dict:
    settings = {"group_by": group_by, "num_envs": num_envs, "action_chunk": action_chunk, "vector": vector}
    settings |= {"env": Quick} if vector == "serial" else {"env": "CartPole-v1", "max_episode_steps": 20}
    settings |= {"end_on_success": end_on_success, "group_size": 3, "groups_per_step": 4, "hidden": (8,)}
    settings |= {"advantage": "step"} if group_by == "anchor" else {"advantage": "episode"}
    bounds = {"filter_rewards": True, "rewards_lower_bound": 0.2, "rewards_upper_bound": 15.0}
    return settings | {"none": {}, "resample": {"no_signal": "resample"}, "filter": bounds}[refill]


@pytest.mark.parametrize("values", list(itertools.product(*AXES.values())), ids=lambda v: "-".join(map(str, v)))
def test_a_group_never_mixes_initial_states(values):
    """Over every combination of settings that is not refused, and over several steps: the members of a group saw the
    same thing first, which is what a reset (or the restored moment) of their start shows; groups differ."""
    try:
        made = GRPOTrainer(**combined(*values))
    except (ConfigError, ValueError) as error:
        assert any(word in str(error) for word in ("anchor", "branch", "credit")), error
        return
    for step in range(2):
        made.steps_done = step
        collected = made.source.collect(CollectRequest(step))
        rollouts, _ = made._collect(None)
        for record, starts in ((collected.rollouts, collected.starts), (rollouts, None)):
            first = record.inputs["observation"][:, 0]
            groups = record.group_N.unique().tolist()
            for group in groups:
                mine = first[record.group_N == group]
                assert bool((mine == mine[0]).all()), (group, mine)
                if starts is not None and made.config.group_by == "start":
                    begun = made.source.fleet.reset([0], [starts[group]])
                    np.testing.assert_array_equal(begun.observation[0], mine[0].numpy())
            heads = torch.stack([first[record.group_N == group][0] for group in groups])
            assert len(torch.unique(heads, dim=0)) == len(groups)
    made.source.close()
