"""Which of transformers' attention functions a model attends with: the one place that sets their private field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def switch_attention(model: Any, name: str) -> None:
    """From now on this one."""
    for config in _configs(model):
        config._attn_implementation_internal = name


@contextmanager
def attention_switched(model: Any, name: str) -> Iterator[None]:
    """Inside this one, then the one before."""
    former = [(config, config._attn_implementation_internal) for config in _configs(model)]
    switch_attention(model, name)
    try:
        yield
    finally:
        for config, before in former:
            config._attn_implementation_internal = before


def _configs(model: Any) -> list[Any]:
    """The model's, and that of its text part where it has its own."""
    config = model.config
    return [config] if config.get_text_config() is config else [config, config.get_text_config()]
