"""Starts whose tries were not worth keeping are asked for again, at the same place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from grpo.core.advantages import group_mean
from grpo.core.gates import has_signal
from grpo.credit import reward_size, trajectory_reward
from grpo.protocols import Collected, CollectRequest
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts, row_index


@dataclass(frozen=True)
class Resampled:
    """The groups that were worth keeping; the last tries where none was."""

    rollouts: Rollouts
    """Groups under the numbers of the starts they came from."""
    attempts: int
    missing: int
    """Starts whose tries were never worth keeping."""
    none_kept: bool


def resample(
    first: Collected,
    request: CollectRequest,
    worth: Callable[[Rollouts], Collection[int]],
    collect: Callable[[CollectRequest], Collected],
    max_attempts: int,
) -> Resampled:
    """Keep the groups that `worth` names and ask for the others again, until all are kept or attempts run out.

    `first` is what came of `request`; the attempts that follow are numbered from its own.
    """
    starts, rollouts = list(first.starts), first.rollouts
    slots, kept, attempts = list(range(len(starts))), [], 0
    while True:
        chosen = worth(rollouts)
        rows = [row for row, group in enumerate(rollouts.group_N.tolist()) if group in chosen]
        if rows:
            kept.append(_renumbered(rollouts.select(rows), slots))
        attempts += 1
        missing = [slot for group, slot in enumerate(slots) if group not in chosen]
        if not missing or attempts >= max_attempts:
            found = Rollouts.cat(kept or [_renumbered(rollouts, slots)])
            return Resampled(found, attempts, len(missing), none_kept=not kept)
        slots = missing
        again = replace(request, attempt=request.attempt + attempts, starts=[starts[slot] for slot in slots])
        rollouts = collect(again).rollouts


def members_of(rollouts: Rollouts) -> list[list[int]]:
    """The rows of each group."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(rollouts.group_N.tolist()):
        members.setdefault(group, []).append(row)
    return list(members.values())


def _renumbered(rollouts: Rollouts, slots: Sequence[int]) -> Rollouts:
    """The same rows with group g called slots[g]: a start that is sampled again keeps its place."""
    return rollouts.but(group_N=row_index(slots, rollouts.group_N)[rollouts.group_N])


def within_bounds(rollouts: Rollouts, recipe: Recipe, low: float | None, high: float | None) -> set[int]:
    """Groups whose mean reward is within the bounds; one in which every try failed has none."""
    reward_N, weight_N = trajectory_reward(rollouts, recipe)
    mean_N = group_mean(reward_N, rollouts.group_N, weight_N)
    kept_N = weight_N > 0
    kept_N = kept_N if low is None else kept_N & (mean_N >= low)
    kept_N = kept_N if high is None else kept_N & (mean_N <= high)
    return set(rollouts.group_N[kept_N].tolist())


def with_signal(rollouts: Rollouts, recipe: Recipe) -> set[int]:
    """Groups whose rewards differ."""
    reward_N, weight_N = trajectory_reward(rollouts, recipe)
    signal_N = has_signal(reward_N, rollouts.group_N, weight_N, reward_size(rollouts, recipe))
    return set(rollouts.group_N[signal_N].tolist())
