"""Which mode a module is in: one for a while, and never one with dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def without_dropout(model: nn.Module) -> None:
    """Dropout 0 everywhere: a policy that is scored with other units than it sampled with is another policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_dropout", "activation_dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@contextmanager
def mode_of(model: nn.Module, training: bool) -> Iterator[None]:
    """The module in one mode, then in the one it was in."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
