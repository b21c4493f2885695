"""What a program's step comes to, as the ordinary way tells it: episodes, what was learned from, metrics.

All of it in NumPy, for whoever has a program: a trainer of PyTorch's, or a command that has read it from the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.control.config import ControlConfig
from grpo.control.episodes import Episodes, learned_from
from grpo.experience import Experience, count
from grpo.report import Update, Updates
from grpo.rollouts import Rollouts, Status

BROKEN = "an observation or a reward of this episode is not a finite number; --compiled false says which step it was"


@dataclass(frozen=True)
class Facts:
    """What a record needs to know of the program."""

    env: str
    """Who is named where an episode fails."""
    names: tuple[str, ...]
    """What is told of an update."""
    group_N: np.ndarray
    linear: bool
    detached: bool


def longest(made: Any) -> int:
    """Decisions of the longest episode: padding beyond it is cut off."""
    return int(np.asarray(made.length_N).max())


def cut(x: Any, most: int) -> np.ndarray:
    """An array of its own; NumPy cuts, because JAX would compile each length."""
    return np.array(np.asarray(x)[:, :most])


def episodes(made: Any, facts: Facts) -> Episodes:
    """What was played, as players record it; made: a `Step`, or what is named like one."""
    most = longest(made)
    seen_NTD, length_N = cut(made.seen_NTD, most), np.asarray(made.length_N)
    action_NT = cut(made.action_NT, most)
    terminated_N = np.array(made.terminated_N)
    return Episodes(
        observation=seen_NTD,
        raw=seen_NTD,
        action_NT=action_NT.astype(np.int64) if action_NT.dtype.kind == "i" else action_NT,
        logp_NT=cut(made.logp_NT, most),
        out_NTF=None,
        reward_NT=cut(made.reward_NT, most),
        mask_NT=np.arange(most)[None] < length_N[:, None],
        offset_N=np.zeros(len(length_N), np.int64),
        terminated_N=terminated_N,
        truncated_N=~terminated_N,
        success_N=np.full(len(length_N), np.nan),
        last=seen_NTD[:, -1],
        errors={int(row): f"{facts.env}: {BROKEN}" for row in np.flatnonzero(np.asarray(made.failed_N))},
        steps_N=np.asarray(made.steps_N),
    )


def experience(made: Any, facts: Facts, config: ControlConfig, played: Episodes, first: int) -> Experience:
    """What was learned from, as the ordinary way records it; first: the number of the first row."""
    most, mask_NT = longest(made), played.mask_NT
    status_N = np.where(played.terminated_N, int(Status.TERMINATED), int(Status.TRUNCATED))
    status_N[~played.ok_N] = int(Status.FAILED)
    row_N1 = first + np.arange(len(played))[:, None]
    rollouts = Rollouts(
        group_N=facts.group_N,
        mask_NT=mask_NT,
        old_logp_NT=played.logp_NT,
        reward_NT=learned_from(played, config).astype(np.float32),
        inputs={
            "observation": played.observation,
            "action": played.action_NT,
            "row": np.repeat(row_N1, mask_NT.shape[1], 1),
        },
        baseline_NT=None if made.baseline_NT is None else cut(made.baseline_NT, most).astype(np.float32),
        status_N=status_N,
    )
    teaches_NT, present_N = cut(made.teaches_NT, most), np.array(made.present_N)
    return Experience(
        rollouts=rollouts,
        mask_NT=teaches_NT,
        present_N=present_N,
        advantage_NT=cut(made.advantage_NT, most),
        old_logp_NT=None if facts.detached else rollouts.old_logp_NT,
        ref_logp_NT=None,
        mismatch_NT=None,
        denominators=count(teaches_NT, config.recipe, present_N=present_N),
    )


def updates(made: Any, names: Sequence[str], learned: Experience) -> Updates:
    """The step's updates as the trainer counts them; made: a `Told`, or what is named like one."""
    found, nothing, values_KV = Updates(learned), np.zeros(0), np.asarray(made.values_KV)
    finite_K, taken_K, skipped_K = (np.asarray(x) for x in (made.finite_K, made.taken_K, made.skipped_K))
    for k in range(int(made.count)):
        own = dict(zip(names, values_KV[k].tolist(), strict=True))
        found.add(Update(range(0), nothing, own, bool(finite_K[k]), bool(taken_K[k]), bool(skipped_K[k])))
    return found


def explained(made: Any, facts: Facts) -> dict[str, float | None]:
    """How well the baseline foresaw the returns, where there is one."""
    share = float(made.explained)
    return {"baseline_explained": None if np.isnan(share) else share} if facts.linear else {}


def judged(return_E: np.ndarray, length_E: np.ndarray) -> dict[str, float | None]:
    """Metrics of an evaluation; NaN: an episode that failed."""
    ok_E = ~np.isnan(return_E)
    failed = float((~ok_E).sum())
    if not ok_E.any():
        return {"return": None, "failed": failed}
    found: dict[str, float | None] = {
        "return": float(return_E[ok_E].mean()),
        "return_std": float(return_E[ok_E].std()),
        "length": float(length_E[ok_E].mean()),
    }
    return found | ({"failed": failed} if failed else {})
