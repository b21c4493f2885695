"""A small agent in a small world, for tests that need one."""

import torch

from grpo.worldmodel import GRPOTrainer

SMALL = {
    "envs": 2, "prefill": 40, "steps_per_collect": 10, "batch_size": 4, "batch_length": 8, "train_ratio": 16,
    "pretrain": 2, "horizon": 5, "group_size": 3, "groups_per_step": 4, "seed": 5, "video": False, "device": "cpu",
    "eval_episodes": 2, "films": False,
}  # fmt: skip


def make(env="CartPole-v1", **settings):
    """A trainer; a setting of None is left out."""
    given = {name: value for name, value in (SMALL | settings).items() if value is not None}
    return GRPOTrainer(env=env, **given)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weights(module):
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
