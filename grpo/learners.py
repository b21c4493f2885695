"""More tries are sampled than are learned from: which of them learn, and what is asked about those alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.config import GRPOConfig
from grpo.core import selection
from grpo.core.arrays import astype
from grpo.credit import trajectory_reward
from grpo.experience import Experience, learners
from grpo.protocols import SequencePolicy
from grpo.recipes import Recipe
from grpo.resample import members_of
from grpo.rollouts import Rollouts, Status, row_index
from grpo.seeding import generator


def marked(rollouts: Rollouts, config: GRPOConfig, step: int, attempt: int = 0) -> Rollouts:
    """Tries with those that learn marked, where settings say that not all do and nobody has marked them already.

    What is drawn at random for a group follows from (seed, step, attempt) and the group's number.
    """
    if config.select is None or rollouts.learns_N is not None:
        return rollouts
    if rollouts.episode_N is not None:
        raise ValueError("select chooses single rows of a group, and here several make one episode (episode_N)")
    reward_N, weight_N = trajectory_reward(rollouts, config.recipe)
    if config.select_by in ("length", "random") and not config.recipe.outcome_coef:  # there may be no reward at all
        weight_N = astype(rollouts.scored_N, weight_N)
    if config.recipe.mask_truncated and rollouts.status_N is not None:  # those would not learn
        weight_N = weight_N * (rollouts.status_N != Status.TRUNCATED)
    group_N, count = rollouts.group_N, config.select
    if config.select_by == "variance":
        return rollouts.but(learns_N=selection.most_varied(reward_N, group_N, count, weight_N))
    if config.select_by == "extremes":
        return rollouts.but(learns_N=selection.extremes(reward_N, group_N, count, weight_N))
    key_N = rollouts.mask_NT.sum(1).to(reward_N)
    if config.select_by == "random":
        key_N = _drawn(group_N, (config.seed, step, attempt)).to(reward_N)
    return rollouts.but(learns_N=selection.smallest(key_N, group_N, count, weight_N))


def scored(rollouts: Rollouts, score: Callable[[Rollouts], Tensor], recipe: Recipe) -> Tensor:
    """What `score` says of the rows that learn, 0 for the others; of all where every try's reward has its KL in it."""
    if rollouts.learns_N is None or (recipe.beta and recipe.kl_in == "reward"):
        return score(rollouts)
    rows = learners(rollouts)
    some_NT = score(rollouts.select(rows))
    found_NT = torch.zeros(tuple(rollouts.mask_NT.shape), dtype=some_NT.dtype, device=some_NT.device)
    found_NT[row_index(rows, found_NT)] = some_NT
    return found_NT


@torch.no_grad()
def scored_now(rollouts: Rollouts, policy: SequencePolicy, recipe: Recipe) -> Tensor:
    """The same by the policy as it is."""
    return scored(rollouts, lambda rows: policy.score(rows).logp_NT, recipe)


class Pass(NamedTuple):
    """Rows that go through the policy at once."""

    rows: Sequence[int]
    learns: bool
    """False: their gradient is zero, and need not be computed."""


def passes(
    batch: Experience, recipe: Recipe, split: Callable[[Rollouts], Sequence[Sequence[int]]], apart: bool
) -> list[Pass]:
    """A minibatch in passes; where it takes several, groups that cannot move the policy go apart and only forward.

    Forward, because metrics are of all rows.
    """
    parts = split(batch.rollouts)
    everything = [Pass(rows, True) for rows in parts]
    if len(parts) == 1 or not apart or batch.teacher_choice_logp_NTK is not None:  # choices are scored with gradient
        return everything
    pulls_N = _pulls(batch, recipe).tolist()
    groups = members_of(batch.rollouts)
    moving = [row for rows in groups if any(pulls_N[row] for row in rows) for row in rows]
    if len(moving) == len(batch):
        return everything
    if not moving:
        return [Pass(rows, False) for rows in parts]
    still = [row for rows in groups if not any(pulls_N[row] for row in rows) for row in rows]
    forward = [Pass([still[row] for row in rows], False) for rows in split(batch.rollouts.select(still))]
    # Those that learn are cut last: a policy may remember what it chose for them.
    return [Pass([moving[row] for row in rows], True) for rows in split(batch.rollouts.select(moving))] + forward


def in_order(parts: Sequence[Pass], found: Sequence[Tensor]) -> Tensor:
    """What passes found of their rows, as the minibatch has them."""
    if len(parts) == 1:
        return found[0]
    order = torch.as_tensor([row for part in parts for row in part.rows]).argsort()
    return torch.cat([*found])[order.to(found[0].device)]


def _pulls(batch: Experience, recipe: Recipe) -> Tensor:
    """Rows in which something counts that has a gradient."""
    counts_NT: Tensor = batch.mask_NT
    if recipe.still_without_advantage:
        counts_NT = counts_NT & (batch.advantage_NT != 0)
    return counts_NT.any(1)


def _drawn(group_N: Tensor, moment: tuple[int, ...]) -> Tensor:
    """A random number a row."""
    sizes = Counter(group_N.tolist())
    numbers = {group: iter(generator(*moment, group % 2**32).random(size).tolist()) for group, size in sizes.items()}
    return torch.as_tensor([next(numbers[group]) for group in group_N.tolist()], dtype=torch.float64)
