"""Which blocks a sequence has: some at first, more as it becomes longer, none while it waits for others to end."""

from __future__ import annotations

from collections.abc import Callable

from grpo.language.engines.cuda_graphs.blocks import BlockManager
from grpo.language.engines.cuda_graphs.kept import KeptConversations, PromptBlocks
from grpo.language.engines.cuda_graphs.sequence import Sequence, SequenceGroup

PAGE = 8
"""Blocks that a sequence gets at a time."""


class Pages:
    """Gives sequences their blocks and takes them back."""

    def __init__(self, blocks: BlockManager, more: Callable[[int], bool], kept: KeptConversations | None) -> None:
        """more: has the memory grow by so many blocks at least; whether it could. kept: who gives up theirs if not."""
        self.blocks, self._more, self._kept = blocks, more, kept

    def enter(self, sequence: Sequence, spare: int) -> bool:
        """Whether there were blocks for a sequence to begin with, or to go on; `spare` are left for the others."""
        group = sequence.group
        shared = 0 if group.blocks is not None else group.blocks_needed
        own = sequence.blocks_for(PAGE * self.blocks.block_size)
        if not self._found(own + shared + spare):
            return False
        if group.blocks is None:
            group.prompt = PromptBlocks(self.blocks.allocate(shared))
        sequence.blocks = self.blocks.allocate(own)
        return True

    def extend(self, sequence: Sequence, steps: int) -> list[int] | None:
        """The blocks it gets for so many steps more, none where it has enough; None: there are too few."""
        lacking = sequence.blocks_for(steps) - len(sequence.blocks)
        if lacking <= 0:
            return []
        page = max(lacking, min(PAGE, may_grow(sequence)))
        if not self._found(page):
            page = lacking
            if not self._found(page):
                return None
        added = self.blocks.allocate(page)
        sequence.blocks += added
        return added

    def leave(self, sequence: Sequence) -> None:
        """Its blocks are free again."""
        self.blocks.free(sequence.blocks)
        sequence.blocks = []

    def leave_prompt(self, group: SequenceGroup) -> None:
        """The prompt's blocks are free again; it is read anew where they are needed once more."""
        if group.prompt is not None:
            group.prompt.leave(self.blocks)
            group.prompt, group.prefilled = None, False

    def _found(self, count: int) -> bool:
        lacking = count - self.blocks.num_free
        if lacking <= 0 or (self._more(lacking) and count <= self.blocks.num_free):
            return True
        return self._kept is not None and self._kept.make_room(count, self.blocks)


def may_grow(sequence: Sequence) -> int:
    """Blocks that a sequence may still need."""
    return sequence.blocks_needed - len(sequence.blocks)
