"""Games of points: a reward ends a try inside an episode, and what follows is the next try's affair.

    row of an episode  0 0 0 −1 0 0 0 0 +1 0 0   ─►   0 0 0 −1 │ 0 0 0 0 +1 │ 0 0 …

The pieces are judged as episodes of their own: after a reward comes nothing, so neither the next point nor the end of
the game, which no picture foretells, is noise in what is said of this one.

Letters: K tries inside of episodes, F numbers of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from grpo.control.baselines.linear import returns_to_go
from grpo.control.play import Episodes
from grpo.envs.spaces import each

Judge = Callable[[Episodes, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(episodes, reward_NT, return_NT, half_N) → baseline_NT."""


def until_reward(
    judge: Judge, episodes: Episodes, reward_NT: np.ndarray, half_N: np.ndarray, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of each decision: its return until the next reward, and what `judge` expects of it."""
    row_K, first_K, length_K = _cuts(episodes, reward_NT)
    step_T = np.arange(max(int(length_K.max(initial=0)), 1))
    made_KT = step_T < length_K[:, None]
    column_KT = np.minimum(first_K[:, None] + step_T, reward_NT.shape[1] - 1)

    def cut(x_NT: np.ndarray) -> np.ndarray:
        return np.asarray(x_NT[row_K[:, None], column_KT])

    paid_KT = np.where(made_KT, cut(reward_NT), 0.0)
    final_K = first_K + length_K == episodes.length_N[row_K]
    over_K = ~final_K | (paid_KT != 0.0).any(1)  # every piece but an episode's last one ends with a reward
    raw = each(episodes.raw, cut)
    pieces = replace(
        episodes,
        observation=raw,
        raw=raw,
        action_NT=cut(episodes.action_NT),
        logp_NT=cut(episodes.logp_NT),
        out_NTF=None,
        reward_NT=paid_KT,
        mask_NT=made_KT,
        offset_N=episodes.offset_N[row_K] + first_K,
        terminated_N=over_K | episodes.terminated_N[row_K],
        truncated_N=~over_K & episodes.truncated_N[row_K],
        success_N=episodes.success_N[row_K],
        last=each(episodes.last, lambda x: x[row_K]),
        errors={k: episodes.errors[row] for k, row in enumerate(row_K.tolist()) if row in episodes.errors},
        steps_N=length_K,
    )
    return_KT = returns_to_go(pieces, paid_KT, gamma)
    expected_KT = judge(pieces, paid_KT, return_KT, half_N[row_K])

    def put_back(x_KT: np.ndarray) -> np.ndarray:
        x_NT = np.zeros(reward_NT.shape)
        x_NT[np.broadcast_to(row_K[:, None], made_KT.shape)[made_KT], column_KT[made_KT]] = x_KT[made_KT]
        return x_NT

    return put_back(return_KT), put_back(expected_KT)


def _cuts(episodes: Episodes, reward_NT: np.ndarray) -> np.ndarray:
    """Row, first decision and length of each piece, (3, K); an empty row is an empty piece."""
    cuts: list[tuple[int, int, int]] = []
    for row, length in enumerate(episodes.length_N.tolist()):
        scored = (np.flatnonzero(reward_NT[row, :length]) + 1).tolist()
        ends = [0, *scored] if scored and scored[-1] == length else [0, *scored, length]
        cuts += [(row, a, b - a) for a, b in pairwise(ends)]
    return np.array(cuts, np.int64).reshape(-1, 3).T
