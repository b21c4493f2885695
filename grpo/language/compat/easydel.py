"""EasyDeL's way of saying how completions are sampled, for `GRPOTrainer(vinference=…)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig

NAMES = {
    "max_new_tokens": "max_completion_length",
    "num_return_sequences": "group_size",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""Its words and ours."""


@dataclass(frozen=True)
class vInference:  # the name its users know
    """A model, its tokenizer and sampling settings."""

    model: Any = None
    tokenizer: Any = None
    max_new_tokens: int | None = None
    num_return_sequences: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool = True

    def applied(self, config: LanguageConfig) -> LanguageConfig:
        """The settings with these; where both were given they must agree."""
        if not self.do_sample:
            raise ConfigError("do_sample=False gives a group of equal answers, which teach nothing; leave it out")
        mine, theirs = vars(self), config.model_dump()
        given = {ours: mine[word] for word, ours in NAMES.items() if mine[word] is not None}
        for word, ours in NAMES.items():
            if ours in given and ours in config.model_fields_set and theirs[ours] != given[ours]:
                said = f"{word}={given[ours]!r} in vinference and {ours}={theirs[ours]!r} in the settings"
                raise ConfigError(f"{said} contradict each other; give one of them")
        return config.but(**given) if given else config
