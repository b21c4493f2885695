"""What a run's folder needs so that commands can look at it later, where a script handed things over as objects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo.language.build import Given
from grpo.language.config import LanguageConfig
from grpo.language.data.chat import Chat
from grpo.language.model import architecture
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.source import LanguageSource
from grpo.run import trainer


class LookedAtLater(trainer.GRPOTrainer):
    """The part of the front door that keeps what was given, and knows what can be done with the folder."""

    source: LanguageSource
    policy: LanguagePolicy
    config: LanguageConfig
    given: Given
    chat: Chat
    commands = ("view", "eval", "chat", "export")

    def settle_in(self, folder: Path) -> None:
        """A model that was handed over: what makes it again is kept."""
        if not _is_said(self.given.model) and not self._obstacle:
            architecture.write(folder, self.policy.model, self.chat.processing)

    def looked_at_with(self) -> tuple[Sequence[str], str]:
        """Without `eval` where nothing says what was held out and who judges; nothing where the model is not kept."""
        if self._obstacle:
            ask = "in Python trainer.generate and trainer.evaluate, in transformers what is in model/"
            return ("view",), f"{ask} ({self._obstacle})"
        data = (self.given.train_dataset, self.given.eval_dataset)
        judged = self.source.held_out and self.config.rewards and all(_is_said(rows) for rows in data)
        return [command for command in self.commands if command != "eval" or judged], ""

    @cached_property
    def _obstacle(self) -> str:
        """Why the folder is not enough to have this model again."""
        if _is_said(self.given.model):
            return ""
        if self.given.optimizers[0] is not None or self.given.ref_model is not None:
            return "it was trained with an optimizer or a reference of your own"
        return architecture.obstacle(self.policy.model, self.chat.processing, self.policy.parameters())


def _is_said(given: Any) -> bool:
    """Whether the settings know it."""
    return given is None or isinstance(given, str)
