"""Chunks, experts and faults: what goes wrong inside a chunk costs its own episode, and nothing else."""

import numpy as np
import pytest
import torch

from grpo.control import GRPOTrainer
from grpo.errors import SamplesFailed
from grpo.protocols import CollectRequest
from grpo.rollouts import Status
from tests.unit.control.reach import Reach


class Brittle(Reach):
    """Half of the starts break at their second step, which is inside a chunk."""

    def reset(self, *, seed=None, options=None):
        self.breaks = seed is not None and seed // 2 % 2 == 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        seen, reward, *rest = super().step(action)
        if self.breaks and self.t == 2:
            return self.broken(seen, reward, *rest)
        return seen, reward, *rest

    def broken(self, seen, reward, *rest):
        raise RuntimeError("a joint came off")


class Nan(Brittle):
    """The same with a reward that is none."""

    def broken(self, seen, reward, *rest):
        return seen, np.nan, *rest


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("env", [Brittle, Nan])
def test_a_failure_inside_a_chunk_costs_its_own_episode(env, level):
    settings = {"env": env, "vector": "serial", "hidden": (8,), "num_envs": 5, "group_size": 3, "groups_per_step": 6}
    made = GRPOTrainer(**settings, action_chunk=4, logprob_type=level, advantage="episode")
    collected = made.source.collect(CollectRequest(0))
    rollouts, width = collected.rollouts, made.policy.columns.width
    broken = torch.tensor([collected.starts[g] // 2 % 2 == 0 for g in rollouts.group_N.tolist()])
    assert bool(broken.any()) and not bool(broken.all())
    assert torch.equal(rollouts.status_N == int(Status.FAILED), broken)
    lengths = rollouts.mask_NT.sum(1)
    assert set(lengths[broken].tolist()) == {width} and set(lengths[~broken].tolist()) == {12 * width}
    said = [row["error"] for row in made.source.show(rollouts) if "error" in row]
    assert len(said) == int(broken.sum()) and all("step 2" in text for text in said)
    report = made.step()
    assert report["failed"] == float(broken.sum()) and np.isfinite(report["loss"])
    with pytest.raises(SamplesFailed, match="on the first step"):
        GRPOTrainer(**settings, action_chunk=4).train(steps=1, progress=None)


def test_groups_of_nothing_but_failures_are_outside_of_every_bound():
    class Broken(Brittle):
        def reset(self, *, seed=None, options=None):
            seen = super().reset(seed=seed, options=options)
            self.breaks = True
            return seen

    bounds = {"filter_rewards": True, "rewards_lower_bound": -1.0, "advantage": "episode", "max_attempts": 2}
    made = GRPOTrainer(env=Broken, vector="serial", hidden=(8,), group_size=2, groups_per_step=2, **bounds)
    report = made.step()
    assert report["filtered"] == 2.0 and not report.experience.mask_NT.any()
