"""What is asked of vLLM and what it answers, the same in this process and on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A completion as vLLM gives it, in this process or as JSON."""

    ids: Sequence[int]
    logp: Sequence[float]
    finish: str


Request = tuple[list[int], dict[str, Any]]
"""A prompt and the parameters of its request: names that `vllm.SamplingParams` and the server's API share."""
