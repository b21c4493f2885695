"""Action chunks: several actions from one look, and the columns in which they are compared.

    a decision  ─►  size actions, played without looking again  ─►  each of so many tokens (numbers, choices)

A record has a column for each action, or for each token where log-probs are compared at that level. What was seen when
a chunk was decided on stands in the chunk's first column; a chunk that an episode's end cuts short has fewer columns.

Letters: D chunks, S actions, E tokens of an action, M actions that were made, K chunks that were decided, F numbers of
the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grpo.core.ratios import fold
from grpo.envs.spaces import each
from grpo.rollouts import Rollouts

Level = Literal["token_level", "action_level", "chunk_level"]


@dataclass(frozen=True)
class ChunkColumns:
    """How many columns a chunk has, and what its log-probs and entropies are of."""

    size: int = 1
    """Actions in a chunk."""
    tokens: int = 1
    """Numbers or choices in an action."""
    logprob: Level = "action_level"
    entropy: Level = "action_level"

    @property
    def width(self) -> int:
        """Columns an action has."""
        return self.tokens if self.logprob == "token_level" else 1

    @property
    def stride(self) -> int:
        """Columns a whole chunk has."""
        return self.size * self.width

    def firsts(self, x: Any) -> Any:
        """Of (N, T, …) arrays what stands where a chunk begins."""
        return each(x, lambda part: part[:, :: self.stride])

    def actions(self, out_KF: Tensor, mask_NT: Tensor) -> Tensor:
        """The numbers of each action that was made, from those of whole chunks."""
        if self.stride == 1:
            return out_KF
        decided_ND, acted_NS = mask_NT[:, :: self.stride], mask_NT[:, :: self.width]
        table = out_KF.new_zeros(*decided_ND.shape, out_KF.shape[1])
        table[decided_ND] = out_KF
        rows, chunks = decided_ND.shape
        return table.reshape(rows, chunks * self.size, -1)[:, : acted_NS.shape[1]][acted_NS]

    def entropies(self, token_ME: Tensor, mask_NT: Tensor) -> Tensor:
        """(N, T): the entropy of the token, action or chunk that a column belongs to; of finer ones their mean.

        A column of ratio=chunk is added up with the others of its chunk later on, so it has its share.
        """
        acted_NS = mask_NT[:, :: self.width]
        action_NS = _placed(token_ME.sum(-1), acted_NS)
        count_NS = self._over_chunk(acted_NS.to(action_NS.dtype), acted_NS).clamp(min=1.0)
        chunk_NS = self._over_chunk(action_NS, acted_NS)
        if self.logprob == "token_level":
            if self.entropy == "token_level":
                return _placed(token_ME.reshape(-1), mask_NT)
            wide_NT = (action_NS if self.entropy == "action_level" else chunk_NS).repeat_interleave(self.width, 1)
            return torch.where(mask_NT, wide_NT, 0.0)
        if self.logprob == "chunk_level":
            share_NS = torch.ones_like(count_NS) if self.entropy == "chunk_level" else count_NS
            return action_NS / (share_NS * self.tokens if self.entropy == "token_level" else share_NS)
        if self.entropy == "chunk_level":
            return torch.where(mask_NT, chunk_NS, 0.0)
        return action_NS / self.tokens if self.entropy == "token_level" else action_NS

    def _over_chunk(self, x_NS: Tensor, acted_NS: Tensor) -> Tensor:
        """Each action's chunk, added up over the actions that were made."""
        total_ND: Tensor = fold(x_NS, acted_NS, self.size)
        return total_ND.repeat_interleave(self.size, 1)[:, : x_NS.shape[1]]

    def recorded(self, action: Tensor, mask_NT: Tensor) -> Tensor:
        """The actions that were made, as the head recorded them."""
        if self.width == 1:
            return action[mask_NT]
        rows, columns = mask_NT.shape
        return action.reshape(rows, columns // self.width, self.width)[mask_NT[:, :: self.width]]


def paid_together(reward_NT: np.ndarray, length_N: np.ndarray, size: int) -> np.ndarray:
    """A chunk's rewards all with its last action that was made."""
    paid_NT = np.zeros_like(reward_NT)
    for first in range(0, reward_NT.shape[1], size):
        last_N = np.minimum(first + size, length_N) - 1
        rows = np.flatnonzero(last_N >= first)
        paid_NT[rows, last_N[rows]] = reward_NT[rows, first : first + size].sum(1)
    return paid_NT


def by_token(rollouts: Rollouts, columns: ChunkColumns, logp_NTE: Tensor) -> Rollouts:
    """A record that has a column for each action with one for each of its tokens instead; the last is rewarded."""
    width = columns.width

    def wide(x: Any) -> Any:
        return None if x is None else each(x, lambda part: part.repeat_interleave(width, 1))

    assert rollouts.reward_NT is not None
    reward_NTE = torch.nn.functional.pad(rollouts.reward_NT[..., None], (width - 1, 0))
    own = {"action": rollouts.inputs["action"].flatten(1, 2)}
    return rollouts.but(
        mask_NT=wide(rollouts.mask_NT),
        old_logp_NT=logp_NTE.flatten(1, 2),
        reward_NT=reward_NTE.flatten(1, 2),
        inputs={name: wide(x) for name, x in rollouts.inputs.items()} | own,
        group_NT=wide(rollouts.group_NT),
        baseline_NT=wide(rollouts.baseline_NT),
    )


def _placed(values_M: Tensor, mask_NT: Tensor) -> Tensor:
    """Where the mask is set, in its order; 0 elsewhere."""
    return values_M.new_zeros(mask_NT.shape).masked_scatter(mask_NT, values_M)
