"""Between two turns: sequences that have ended leave their blocks to who may go on; prompts that do take them over."""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch

from grpo.language.engines.cuda_graphs.blocks import BlockManager, blocks_for
from grpo.language.engines.cuda_graphs.kept import KeptBlocks, KeptConversations, copied
from grpo.language.engines.cuda_graphs.reading import Going
from grpo.language.engines.cuda_graphs.sequence import Sequence, SequenceGroup


def keep(
    sequences: Several[Sequence], ids_N: Several[list[int]], kept: KeptConversations, blocks: BlockManager
) -> None:
    """Those that have ended, with what they said; their blocks are theirs no longer."""
    for one, ids in zip(sequences, ids_N, strict=True):
        if one.group.prompt is not None and ids:
            needed = blocks_for(len(ids), blocks.block_size)
            blocks.free(one.blocks[needed:])
            found = KeptBlocks(one.group.prompt, one.group.shared_tokens, one.blocks[:needed])
            one.blocks = []
            kept.put([*one.group.prompt_ids, *ids[:-1]], found, blocks)


def go_on(
    groups: Several[SequenceGroup], kept: KeptConversations, blocks: BlockManager, device: torch.device
) -> list[Going]:
    """What is kept for these prompts is copied into their blocks, where they have any, and given up; what is new."""
    pairs, found, size = [], [], blocks.block_size
    for group in groups:
        if group.kept is None:
            continue
        (past, one), group.kept = group.kept, None
        if group.blocks is not None:
            to = [(group.blocks[at // size], at % size) for at in range(past)]
            pairs += list(zip(one.places(past, size), to, strict=True))
            if past < group.shared_tokens:
                found.append(Going(group.prompt_ids[past:-1], group.blocks, past))
        kept.let_go(one, blocks)
    if pairs:
        copied(blocks, pairs, device)
    return found
