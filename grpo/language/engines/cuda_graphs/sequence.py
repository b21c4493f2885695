"""What the scheduler moves about: the completions that are asked for, and the prompts they share."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from grpo.language.engines.cuda_graphs.blocks import blocks_for
from grpo.language.engines.cuda_graphs.kept import KeptBlocks, PromptBlocks


@dataclass(eq=False)
class Sequence:
    """One completion that is asked for."""

    number: int
    group: SequenceGroup
    limit: int
    """Tokens at most."""
    draft: abc.Sequence[int] = ()
    """What it is expected to say, until that has been looked at."""
    blocks: list[int] = field(default_factory=list)
    steps: int = 0
    """That were computed, whether or not it ended among them."""
    finished: bool = False

    @property
    def blocks_needed(self) -> int:
        """For its own tokens at most; the last token of the prompt is written with them, the last of all is not."""
        return blocks_for(self.limit)

    def blocks_for(self, steps: int) -> int:
        """For so many steps more."""
        return min(blocks_for(max(self.steps, len(self.draft)) + steps), self.blocks_needed)


@dataclass(eq=False)
class SequenceGroup:
    """The completions of one prompt, and the blocks that they share: all of the prompt but its last token."""

    number: int
    prompt_ids: abc.Sequence[int]
    unfinished: int
    """Completions that have not ended."""
    seated: int = 0
    """Completions that have a slot."""
    prompt: PromptBlocks | None = None
    prefilled: bool = False
    kept: tuple[int, KeptBlocks] | None = None
    """Of the conversation that it goes on: how many tokens of it there are, and where."""

    @property
    def blocks(self) -> list[int] | None:
        """Of what is shared; None: it has none at present."""
        return None if self.prompt is None else self.prompt.blocks

    @property
    def shared_tokens(self) -> int:
        """Of the prompt, in shared blocks."""
        return len(self.prompt_ids) - 1

    @property
    def blocks_needed(self) -> int:
        """For what is shared."""
        return blocks_for(self.shared_tokens)
