"""From a word to a reward: a built-in name, file.py:name, module:name, or the id or folder of a reward model."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any

from grpo.errors import ConfigError, nearest
from grpo.run.functions import function_of


class Unloaded:
    """A reward of which only the name is needed: whoever saves or talks to a model judges nothing."""

    runs_here = True
    """Nowhere, in fact: no worker is started for it."""

    def __init__(self, word: str) -> None:
        self.__name__ = os.path.basename(word.rpartition(":")[2].rstrip("/"))

    def __call__(self, completion: str) -> float:
        raise RuntimeError(f"{self.__name__}: this reward was not loaded")


def find(word: str, settings: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The function a word names; None: it can only be a model."""
    from grpo.language.rewards.builtin import BUILTIN, make

    if word.partition(":")[0] in BUILTIN:
        return make(word, settings)
    found = function_of(word)
    alike = found is None and difflib.get_close_matches(word, BUILTIN, cutoff=0.7)
    if alike and "/" not in word and not os.path.isdir(word):
        raise ConfigError(f"unknown reward {word!r}{nearest(word, list(BUILTIN))}")
    return found
