"""What is asked of vLLM and what it answers, the same in this process and on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A completion as vLLM gives it, in this process or as JSON."""

    ids: Sequence[int]
    logp: Sequence[float]
    finish: str
    version: Sequence[int] | None = None
    """Of the weights that made each token, where parts of it were made by different ones."""

    def then(self, part: Answer, version: int) -> Answer:
        """This one with what was made after it, by these weights."""
        versions = [*(self.version or ()), *[version] * len(part.ids)]
        return Answer([*self.ids, *part.ids], [*self.logp, *part.logp], part.finish, versions)

    def flaw(self) -> str:
        """Why it is no completion, in a few words; nothing where it is one."""
        if len(self.ids) and len(self.logp) == len(self.ids) and self.finish in ("stop", "length"):
            return ""
        return f"ended a completion with {self.finish!r}, {len(self.ids)} tokens and {len(self.logp)} log-probs"

    def ended(self, finish: str) -> Answer:
        """The same, ended for another reason."""
        return replace(self, finish=finish)


Request = tuple[list[int], dict[str, Any]]
"""A prompt and the parameters of its request: names that `vllm.SamplingParams` and the server's API share."""
