"""What a decision's return is compared with, where the room knows more than the group: linear, auto.

All are held out: what is expected of a decision comes from fits and means that never saw how it went itself, so the
gradient stays unbiased up to the choice among a handful of them, which all returns make together.

None bootstraps (`fitted` does): a linear fit of returns that fills in what comes after a time limit is too crude, and
learning fails with it. So a return that a time limit cut off is the return until then, and late decisions look as if
little was left to win.

Letters: M decisions, D features, K penalties, H numbers that the policy makes of an observation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from grpo.control.play import Episodes
from grpo.core import advantages as adv
from grpo.envs.fleet import Tree
from grpo.envs.spaces import leaves, take

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 1e3)
"""Penalties that the linear fit chooses from."""
MAX_FEATURES = 1024
"""Of an observation part with more entries than this (an image) the linear fit sees what the policy makes of it."""

Sight: TypeAlias = Callable[[Tree], np.ndarray]
"""From M observations to (M, H): what a policy makes of them before it decides."""


@dataclass(frozen=True)
class Baseline:
    """What was expected of each decision."""

    baseline_NT: np.ndarray
    explained: float | None
    """Share of the returns' variance that it explains; None where they do not vary."""
    choice: str


def returns_to_go(episodes: Episodes, reward_NT: np.ndarray, gamma: float) -> np.ndarray:
    """Σ γ^k r of each decision, until its row ends."""
    return np.asarray(adv.reward_to_go(reward_NT.astype(np.float64), episodes.mask_NT, gamma))


def linear(
    episodes: Episodes, return_NT: np.ndarray, half_N: np.ndarray, horizon: int, sight: Sight | None = None
) -> np.ndarray:
    """Ridge regression of the return on [o, o², t, t², t³, 1]: fitted on half of each group, applied to the other.

    Of several penalties the one that leaves least, held out; the largest of them leaves the mean alone, so that a fit
    on a handful of early episodes does no harm.
    """
    mask_NT = episodes.mask_NT & episodes.ok_N[:, None]
    half_NT = np.repeat(half_N[:, None], mask_NT.shape[1], 1)
    return_M = return_NT[mask_NT]
    feature_MD = features(episodes, mask_NT, horizon, sight)
    expected_KM = adv.ridge_baselines(feature_MD, return_M, half_NT[mask_NT], RIDGES)
    left_K = np.square(return_M - expected_KM).sum(1)
    baseline_NT = np.zeros_like(return_NT)
    baseline_NT[mask_NT] = expected_KM[left_K.argmin()]
    return baseline_NT


def features(episodes: Episodes, mask_NT: np.ndarray, horizon: int, sight: Sight | None = None) -> np.ndarray:
    """What the linear fit sees of each decision; without `sight` nothing of images."""
    steps_NT = (episodes.offset_N[:, None] + np.arange(mask_NT.shape[1])[None]) / horizon
    t_M = steps_NT[mask_NT]
    parts = [t_M[:, None] ** power for power in (1, 2, 3)]
    found = leaves(episodes.observation)
    small = [x for x in found if np.prod(x.shape[2:]) <= MAX_FEATURES]
    if sight is not None and len(small) < len(found):
        parts.append(sight(take(episodes.observation, mask_NT)))
    for x in small:
        seen = x[mask_NT]
        if seen.dtype.kind in "iu" and seen.ndim == 1:
            seen = seen - seen.min(initial=0)
            choices = int(seen.max(initial=0)) + 1
            if choices <= MAX_FEATURES:
                parts.append(np.eye(choices)[seen])
        else:
            flat = seen.reshape(len(seen), int(np.prod(seen.shape[1:]))).astype(np.float64)
            parts += [flat, flat**2] if seen.dtype.kind == "f" else [flat]
    return np.concatenate(parts, axis=1)


def choose(
    episodes: Episodes,
    return_NT: np.ndarray,
    group_N: np.ndarray,
    half_N: np.ndarray,
    horizon: int,
    sight: Sight | None = None,
) -> Baseline:
    """The best of three by the variance that each leaves: linear, the group's and the batch's mean at the same step.

    The means leave out the decision's own return; where nobody else is left, the linear fit stands in.
    """
    mask_NT = episodes.mask_NT & episodes.ok_N[:, None]
    fitted_NT = linear(episodes, return_NT, half_N, horizon, sight)
    steps = mask_NT.shape[1]
    batch_NT = episodes.offset_N[:, None] + np.arange(steps)[None]
    candidates = {"linear": fitted_NT}
    for name, group_NT in (("step", adv.step_groups(group_N, steps)), ("batch_step", batch_NT)):
        group_M, weight_M = np.asarray(group_NT).reshape(-1), mask_NT.reshape(-1).astype(np.float64)
        mean_M = adv.leave_one_out(return_NT.reshape(-1), group_M, weight_M)
        alone_M = adv.group_count(group_M, weight_M) < 2
        candidates[name] = np.where(alone_M, fitted_NT.reshape(-1), mean_M).reshape(mask_NT.shape)
    if not mask_NT.any():  # nobody is left to compare with
        return Baseline(fitted_NT, None, "linear")
    left = {name: float(np.var((return_NT - found)[mask_NT])) for name, found in candidates.items()}
    choice = min(left, key=lambda name: left[name])
    return Baseline(candidates[choice], explained(return_NT, candidates[choice], mask_NT), choice)


def explained(return_NT: np.ndarray, baseline_NT: np.ndarray, mask_NT: np.ndarray) -> float | None:
    """1 − Var(return − baseline) / Var(return)."""
    spread = float(np.var(return_NT[mask_NT])) if mask_NT.any() else 0.0
    return 1.0 - float(np.var((return_NT - baseline_NT)[mask_NT])) / spread if spread > 1e-12 else None
