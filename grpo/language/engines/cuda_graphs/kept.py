"""Blocks of conversations that may go on: a turn copies what is kept into its own, and reads what is new in it.

They are the block manager's: whoever needs blocks and finds none gets these, the oldest first. A prompt's blocks, which
its completions share, stay until the last that needs them is gone.

Letters: M tokens, P prompts, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo.language.engines.cuda_graphs.blocks import BlockManager
from grpo.language.engines.prefixes import Remembered


@dataclass(eq=False)
class PromptBlocks:
    """A prompt's blocks, and how many hold them: its sequences together, while they are sampled, and who is kept."""

    blocks: list[int]
    holders: int = 1

    def leave(self, manager: BlockManager) -> None:
        """One holder less; with the last they are free."""
        self.holders -= 1
        if not self.holders:
            manager.free(self.blocks)


@dataclass(frozen=True, eq=False)
class KeptBlocks:
    """Of one conversation: all of its prompt but the last token, then that and what was said."""

    prompt: PromptBlocks
    shared: int
    """Tokens in the prompt's blocks."""
    own: list[int]

    def places(self, tokens: int, block_size: int) -> list[tuple[int, int]]:
        """The block of each token, and its place there."""
        found = [(self.prompt.blocks[at // block_size], at % block_size) for at in range(min(tokens, self.shared))]
        rest = range(max(tokens - self.shared, 0))
        return found + [(self.own[at // block_size], at % block_size) for at in rest]


class KeptConversations:
    """Of a rollout, between its turns."""

    def __init__(self) -> None:
        self.book: Remembered[KeptBlocks] = Remembered()

    def put(self, ids: Sequence[int], kept: KeptBlocks, manager: BlockManager) -> None:
        """Blocks that nobody writes any more change hands; they are free where the same is kept already."""
        kept.prompt.holders += 1
        if not self.book.put(ids, kept):
            self.let_go(kept, manager)

    def let_go(self, kept: KeptBlocks, manager: BlockManager) -> None:
        """Its blocks are free, and the prompt's with the last that held them."""
        manager.free(kept.own)
        kept.prompt.leave(manager)

    def make_room(self, count: int, manager: BlockManager) -> bool:
        """Whether so many blocks are free, now that the oldest have been let go of."""
        while manager.num_free < count and len(self.book):
            self.let_go(self.book.oldest(), manager)
        return manager.num_free >= count

    def forget(self, manager: BlockManager | None) -> None:
        """All of them; None: the blocks are gone already."""
        while len(self.book):
            kept = self.book.oldest()
            if manager is not None:
                self.let_go(kept, manager)


def copied(
    manager: BlockManager, pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]], device: torch.device
) -> None:
    """Keys and values from places to places."""
    at_M4 = torch.tensor([(*source, *to) for source, to in pairs], device=device)
    from_block, from_place, to_block, to_place = at_M4.unbind(1)
    for pools in manager.kv_cache:
        for pool in pools:
            pool[to_block, :, to_place] = pool[from_block, :, from_place]
