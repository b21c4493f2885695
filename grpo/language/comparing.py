"""What some recipes compare tries with beside their rewards: turns that were told the same, a greedy try, energies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo.core.advantages import group_mean
from grpo.credit import trajectory_reward
from grpo.language.samples import Prompt, Sample
from grpo.protocols import CollectRequest
from grpo.rollouts import Rollouts, Status

if TYPE_CHECKING:
    from grpo.language.source import LanguageSource

GREEDY = 3
"""Its stream of randomness: an environment or a reward may draw."""


def comparisons(
    source: LanguageSource, rollouts: Rollouts, starts: Sequence[Prompt], own: range, request: CollectRequest
) -> dict[str, Tensor]:
    """The fields of `Rollouts` that the recipe asks for beyond rewards and log-probs."""
    recipe, found = source.config.recipe, dict[str, Tensor]()
    if recipe.turn_coef:
        found["group_NT"] = turn_groups(rollouts.inputs, rollouts.group_N.tolist(), rollouts.mask_NT)
    if recipe.baseline == "optimal_token":
        with source.policy.precision():
            found["energy_NT"] = source.policy.scorer.energies(rollouts.inputs, int(rollouts.mask_NT.shape[1]))
    if recipe.baseline == "greedy":
        found["baseline_NT"] = _greedy(source, rollouts, starts, own, request)
    return found


def turn_groups(samples: Sequence[Sample], groups: Sequence[int], mask_NT: Tensor) -> Tensor:
    """Turns of one group that were told the same, whatever had been said before, have the same number."""
    group_NT = torch.zeros(tuple(mask_NT.shape), dtype=torch.int64)
    for row, (sample, group) in enumerate(zip(samples, groups, strict=True)):
        heard: list[int] = []
        talking, number = False, 0
        for step, (token, made) in enumerate(zip(sample.ids.tolist(), sample.made.tolist(), strict=True)):
            if made and not talking:
                number = _number(group, sample.prompt, heard)
                heard = []
            talking = made
            if made:
                group_NT[row, step] = number
            else:
                heard.append(token)
    return group_NT.to(mask_NT.device)


def _number(group: int, prompt: Prompt, heard: Sequence[int]) -> int:
    told = repr((group, prompt.row, heard or list(prompt.ids))).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=7).digest())


def _greedy(
    source: LanguageSource, rollouts: Rollouts, starts: Sequence[Prompt], own: range, request: CollectRequest
) -> Tensor:
    """The reward of each start's likeliest answer, for all its tries; their mean where that answer failed."""
    recipe, mask_NT = source.config.recipe, rollouts.mask_NT
    sampling = replace(source.config.sampling, temperature=0.0)
    samples, judged = source.judged(starts, 1, sampling, GREEDY, (request.step, request.attempt), own=own)
    failed_S = torch.tensor([sample.error is not None for sample in samples])
    tried = Rollouts(
        group_N=torch.arange(len(samples)),
        mask_NT=torch.ones(len(samples), 1, dtype=torch.bool),
        old_logp_NT=torch.zeros(len(samples), 1),
        reward_parts_NK=torch.as_tensor(source.parts(samples, judged), dtype=torch.float32),
        status_N=torch.where(failed_S, int(Status.FAILED), int(Status.TERMINATED)),
    )
    reward_S, weight_S = (found.to(mask_NT.device) for found in trajectory_reward(tried, recipe))
    own_N, weight_N = trajectory_reward(rollouts, recipe)
    slot_N = rollouts.group_N - own.start
    mean_N = group_mean(own_N, rollouts.group_N, weight_N)
    baseline_N = torch.where(weight_S[slot_N] > 0, reward_S[slot_N].to(mean_N), mean_N)
    return baseline_N[:, None].expand(tuple(mask_NT.shape)).contiguous()
