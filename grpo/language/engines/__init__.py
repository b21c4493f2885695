"""What samples completions, behind one small seam: prompts and settings in; ids, log-probs and the reason it ended out.

    inline        our own loop over the very module that is trained                      engines/inline.py
    transformers  the library's generate, for models that `inline` cannot run            engines/hf.py
    vllm          in this process or on a server, weights pushed after every step        engines/vllm/

All pass the same conformance tests. Sampled ids are kept as sampled: nothing is ever tokenised again.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

Stop = Literal["eos", "stop", "length"]
"""Why a completion ended: an end-of-sequence token (kept, it is a decision) · a stop text · the length limit."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Truncation (top-k, top-p, min-p, in this order) comes after temperature and penalty."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    """0: the likeliest token (greedy)."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the token that completes one is kept."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1 or self.top_k < 0:
            raise ValueError(
                f"temperature must not be negative, top_p lies in (0, 1], top_k is 0 or more and at least one token is "
                f"sampled; got {self.temperature:g}, {self.top_p:g}, {self.top_k}, {self.max_new_tokens}"
            )

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from anything but the model's own distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1


@dataclass(frozen=True)
class Completion:
    """What an engine made of one prompt."""

    ids: Tensor
    """(T,) int64 on the CPU, an end-of-sequence token included, padding never."""
    logp: Tensor | None
    """(T,) float32 on the CPU: log softmax(logits / temperature), before penalty and truncation; None: not known."""
    stop: Stop
    kept: float | None = None
    """Mean share of probability that truncation and penalty left, over the tokens; None: not known."""
    version: Tensor | None = None
    """(T,) int64: what the weights were called (`Engine.refresh`) that made each token; None: not known."""


Groups = Generator[tuple[int, list[Completion]], None, None]
"""A prompt's number and its completions, in the order in which prompts end; to be closed by who does not want all."""


class Engine(Protocol):
    """Samples completions of token ids. An engine inherits from it: what it leaves out does nothing."""

    name: str
    exact: bool
    """Its log-probs are those of the module that is trained, so that ratios may compare with them; else the policy
    scores the completions again and the engine's own numbers only tell how far it is off."""
    row_seeds: bool = True
    """A completion depends on its own seed alone, up to rounding, not on what else is in the batch."""
    repeatable: bool = False
    """The same rows asked together give the same bits, so that who is asked with whom must not depend on the clock."""
    context: float = math.inf
    """Tokens of prompt and completion together, at most."""
    at_once: int = 0
    """Calls of `stream` that may go on at a time, in threads, while the policy learns; 0: none, for it samples with the
    policy's own weights."""

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """`count` completions of each prompt, those of a prompt together; a seed for every completion.

        The same seed, prompt and weights give the same completion, whatever else is in the batch (up to rounding).
        """
        ...

    def stream(self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]) -> Groups:
        """The same, a prompt's number and its completions at a time, as soon as the last of them has ended."""
        ...

    def refresh(self, version: int = 0) -> None:
        """The policy's weights have changed; an engine with a copy of its own fetches them, and calls them so."""
        return

    def tend(self, version: int) -> None:
        """They have not, and are called so from now on; what was lost (a server) may be looked for."""
        return

    def expect(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """What completions with these seeds may turn out to be: guesses that may save time.

        What comes out does not depend on them, up to rounding. They stand until others take their place.
        """
        return

    def conversing(self, party: int = 0, of: int = 1) -> AbstractContextManager[None]:
        """Inside, prompts may go on from what was made: an engine may keep what saves reading it again.

        party: of so many that are sampled apart, inside of the former: what one finds does not depend on the others.
        """
        return nullcontext()

    def metrics(self) -> Mapping[str, float]:
        """Of the last rollout; they depend on the machine."""
        return {}

    def make_room(self) -> bool:
        """Let go of what is kept between rollouts, for training needs the memory; whether there was anything."""
        return False

    def close(self) -> None:
        """Let go of processes and memory."""
        return


def sampler_flaw(engine: str, servers: Sequence[str], elsewhere: bool, ahead: bool, speculates: bool) -> str:
    """What is wrong with these settings of a sampler; nothing where nothing is. elsewhere: a server is named at all."""
    if servers and engine != "vllm":
        return f"servers are vLLM's, and engine={engine} samples here; set engine=vllm"
    if not ahead:
        return ""
    if speculates:
        return "speculate follows the order of visits, which staleness changes; leave one of them out"
    if engine == "transformers":
        return "staleness needs engine=vllm with servers, or engine=inline; transformers cannot go ahead"
    if engine == "vllm" and not elsewhere:
        return "staleness with engine=vllm needs servers=http://host:port; in this process vLLM waits"
    return ""


_Made = TypeVar("_Made")


def in_groups(made: Iterable[_Made], count: int) -> Generator[tuple[int, list[_Made]], None, None]:
    """What comes in the order of the prompts, `count` of each: a prompt's number and its own at a time."""
    rest = iter(made)
    yield from enumerate(iter(lambda: list(islice(rest, count)), []))


@dataclass(frozen=True)
class Tokens:
    """What an engine must know of a tokenizer."""

    tokenizer: Any
    eos: frozenset[int]
    """Every id that ends a completion."""
    pad: int = 0
    end: int = 0
    """The id that ends an answer, where we write one."""
    unsaid: frozenset[int] = frozenset()
    """Ids that are never drawn: they stand for images, which an answer has none of."""
