"""What some recipes compare tries with beside their rewards: turns that were told the same, a greedy try, energies,
roles, and what the best policy would be given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.agreement import by_chief
from grpo.config import ConfigError
from grpo.core.advantages import group_count, group_mean, soft_maximum
from grpo.credit import trajectory_reward
from grpo.language.config import LanguageConfig
from grpo.language.data.prompts import Prompts
from grpo.language.rewards import Judgement
from grpo.language.samples import Prompt, Sample
from grpo.protocols import CollectRequest, State
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts, Status

if TYPE_CHECKING:
    from grpo.language.source import LanguageSource

GREEDY = 3
"""Its stream of randomness: an environment or a reward may draw."""
VALUES = 4
"""The stream of the answers before the first step."""


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
    if recipe.baseline == "optimal_value":
        found["baseline_NT"] = _optimal(source, rollouts)
    if source.config.role_column is not None:
        roles = [_number(sample.prompt.columns.get(source.config.role_column)) for sample in rollouts.inputs]
        found["role_N"] = torch.tensor(roles, device=rollouts.mask_NT.device)
    return found


def expect_comparable(config: LanguageConfig, prompts: Prompts) -> None:
    """Refuse rows that lack what the recipe compares by."""
    column = config.role_column
    if column is not None and column not in prompts.told:
        raise ConfigError(f"role_column={column}: no such column; found {', '.join(prompts.told) or 'none'}")
    if column is not None and (found := prompts.without([column])) is not None:
        raise ConfigError(f"{found[0]} has no {column} (role_column); fill it in, or leave the row out")
    if config.recipe.baseline == "optimal_value" and prompts.streamed:
        raise ConfigError(
            "baseline=optimal_value answers every prompt before the first step, and a stream has no end; give rows "
            "that can be counted, or another recipe"
        )


def learn_values(source: LanguageSource) -> None:
    """Have the source know what the best policy near this one would be given at every prompt; the chief asks."""
    told = by_chief(source.ranks, "answers before the first step", lambda: _values(source))
    source.value_R = torch.as_tensor(told.arrays["value_R"])
    source.num_tokens += told.values["tokens"]


def _values(source: LanguageSource) -> State:
    """From `value_samples` answers to each row, NaN where all of them failed; and how many tokens that took."""
    config, prompts = source.config, source.prompts
    count, tokens = config.value_samples, 0
    at_once = max(config.groups_per_step * config.group_size // count, 1)
    found: dict[int, float] = {}
    for first in range(0, len(prompts), at_once):
        some = [prompts[i] for i in range(first, min(first + at_once, len(prompts)))]
        samples, judged = source.judged(some, count, config.sampling, VALUES, (0, first))
        reward_S, weight_S = _rewarded(source, samples, judged)
        group_S = torch.arange(len(samples)) // count
        value_S = soft_maximum(reward_S, group_S, config.recipe.value_beta, weight_S)
        known_S = group_count(group_S, weight_S) > 0
        value_S = torch.where(known_S, value_S, torch.nan)
        found |= {prompt.row: float(value) for prompt, value in zip(some, value_S[::count], strict=True)}
        tokens += sum(len(sample.prompt.ids) + sample.length for sample in samples)
    value_R = torch.full((max(found) + 1,), torch.nan, dtype=torch.float64)
    value_R[list(found)] = torch.tensor(list(found.values()), dtype=torch.float64)
    return State({"tokens": tokens}, {"value_R": value_R})


def turn_groups(samples: Sequence[Sample], groups: Sequence[int], mask_NT: Tensor) -> Tensor:
    """Turns of one group that were told the same, whatever had been said before, have the same number."""
    group_NT = torch.zeros(tuple(mask_NT.shape), dtype=torch.int64)
    for row, (sample, group) in enumerate(zip(samples, groups, strict=True)):
        heard: list[int] = []
        talking, number = False, 0
        for step, (token, made) in enumerate(zip(sample.ids.tolist(), sample.made.tolist(), strict=True)):
            if made and not talking:
                number = _number(group, sample.prompt.row, heard or list(sample.prompt.ids))
                heard = []
            talking = made
            if made:
                group_NT[row, step] = number
            else:
                heard.append(token)
    return group_NT.to(mask_NT.device)


def _number(*told: Any) -> int:
    """The same for the same, in every process."""
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=7).digest())


def _greedy(
    source: LanguageSource, rollouts: Rollouts, starts: Sequence[Prompt], own: range, request: CollectRequest
) -> Tensor:
    """The reward of each start's likeliest answer, for all its tries."""
    sampling = replace(source.config.sampling, temperature=0.0)
    samples, judged = source.judged(starts, 1, sampling, GREEDY, (request.step, request.attempt), own=own)
    reward_S, weight_S = _rewarded(source, samples, judged)
    slot_N = (rollouts.group_N - own.start).cpu()
    return _known_or_mean(torch.where(weight_S > 0, reward_S, torch.nan)[slot_N], rollouts, source.config.recipe)


def _optimal(source: LanguageSource, rollouts: Rollouts) -> Tensor:
    """The value of each row's prompt, for all its tries."""
    rows = [sample.prompt.row for sample in rollouts.inputs]
    if source.value_R is None or min(rows) < 0:
        raise ConfigError(
            "baseline=optimal_value: the prompt was not answered before the first step, which a trainer does for the "
            "rows of its data; use these, or another recipe"
        )
    return _known_or_mean(source.value_R[rows], rollouts, source.config.recipe)


def _rewarded(source: LanguageSource, samples: Sequence[Sample], judged: Judgement) -> tuple[Tensor, Tensor]:
    """Rewards of single answers, and 0 for those that have none."""
    failed_S = torch.tensor([sample.error is not None for sample in samples])
    tried = Rollouts(
        group_N=torch.arange(len(samples)),
        mask_NT=torch.ones(len(samples), 1, dtype=torch.bool),
        old_logp_NT=torch.zeros(len(samples), 1),
        reward_parts_NK=torch.as_tensor(source.parts(samples, judged), dtype=torch.float32),
        status_N=torch.where(failed_S, int(Status.FAILED), int(Status.TERMINATED)),
    )
    return trajectory_reward(tried, source.config.recipe)


def _known_or_mean(baseline_N: Tensor, rollouts: Rollouts, recipe: Recipe) -> Tensor:
    """The baseline of every decision; the group's mean where it is not known (NaN)."""
    reward_N, weight_N = trajectory_reward(rollouts, recipe)
    mean_N = group_mean(reward_N, rollouts.group_N, weight_N)
    baseline_N = baseline_N.to(mean_N)
    baseline_N = torch.where(baseline_N.isnan(), mean_N, baseline_N)
    return baseline_N[:, None].expand(tuple(rollouts.mask_NT.shape)).contiguous()
