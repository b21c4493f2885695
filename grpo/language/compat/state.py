"""transformers' record of a run, which callbacks and scripts read as `trainer.state`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerState

from grpo.protocols import State


class RunState(TrainerState):
    """`global_step`, `epoch`, `log_history` and so on; called, the trainer's own state, which checkpoints keep."""

    def __init__(self, kept: Callable[[], State], **fields: Any) -> None:
        super().__init__(**fields)
        self._kept = kept

    def __call__(self) -> State:
        """Everything the next step depends on; see `grpo.trainer.Trainer.state`."""
        return self._kept()
