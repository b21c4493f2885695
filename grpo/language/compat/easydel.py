"""EasyDeL's way of saying how completions are sampled, for `GRPOTrainer(vinference=…)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.config import ConfigError
from grpo.errors import nearest
from grpo.language.compat.generation import NEUTRAL, NOT_SAMPLED
from grpo.language.config import LanguageConfig

NAMES = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "num_return_sequences": "group_size",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
}
"""Its words and ours."""

_DEVICES = "a model is where its device says, in one process"
NOT_DONE = {
    "input_partition_spec": _DEVICES,
    "partition_axis": _DEVICES,
    "partition_rules": _DEVICES,
    "mesh": _DEVICES,
    **NOT_SAMPLED,
}
"""Its words that are not done here, each with why; a value that asks for nothing may stand there."""
NOT_READ = (
    "do_sample", "inference_name", "report_metrics", "streaming_chunks", "pad_token_id", "bos_token_id", "eos_token_id",
    "use_cache", "transformers_version",
)  # fmt: skip
"""Its words that change no number here: ids are the tokenizer's, nothing is compiled in chunks."""
BLOCKS = ("generation_config", "sampling_params")


class vInference:  # the name its users know
    """A model, its tokenizer (`processor_class`) and sampling settings, alone or as a `generation_config`."""

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        generation_config: Any = None,
        seed: int | None = None,
        *,
        processor_class: Any = None,
        do_sample: bool = True,
        **sampling: Any,
    ) -> None:
        if tokenizer is not None and processor_class is not None:
            raise ConfigError("tokenizer and processor_class are the same thing; give one of them")
        self.model, self.tokenizer = model, processor_class if tokenizer is None else tokenizer
        self.settings: dict[str, tuple[str, Any]] = {}
        """Our settings by name, each with the word it was given as."""
        self._take(_items(generation_config), "generation_config.")
        self._take(sampling | {"seed": seed, "do_sample": do_sample}, "")

    def _take(self, words: Mapping[str, Any], place: str) -> None:
        for word, value in words.items():
            if word in BLOCKS:
                self._take(_items(value), f"{place}{word}.")
            elif word == "do_sample" and value is False:
                raise ConfigError(
                    f"{place}do_sample=False gives a group of equal answers, which teach nothing; leave it out"
                )
            elif word in NOT_DONE:
                if value not in (None, 0, False, [], (), *NEUTRAL.get(word, ())):
                    raise ConfigError(f"{place}{word}={value!r} is not done here: {NOT_DONE[word]}")
            elif word in NAMES:
                if value is not None:
                    self._set(NAMES[word], f"{place}{word}", value)
            elif word not in NOT_READ and not (word.startswith("_") and place):
                known = [*NAMES, *NOT_DONE, *NOT_READ, *BLOCKS]
                raise ConfigError(f"vInference has no argument {place}{word}{nearest(word, known)}")

    def _set(self, name: str, word: str, value: Any) -> None:
        before = self.settings.get(name)
        if before is not None and before[1] != value:
            raise ConfigError(f"{before[0]}={before[1]!r} and {word}={value!r} contradict each other; give one of them")
        self.settings[name] = word, value

    def applied(self, config: LanguageConfig) -> LanguageConfig:
        """The settings with these; where both were given they must agree."""
        theirs = config.model_dump()
        for name, (word, value) in self.settings.items():
            if name in config.model_fields_set and theirs[name] != value:
                said = f"{word}={value!r} in vinference and {name}={theirs[name]!r} in the settings"
                raise ConfigError(f"{said} contradict each other; give one of them")
        given = {name: value for name, (_, value) in self.settings.items()}
        return config.but(**given) if given else config


def _items(given: Any) -> dict[str, Any]:
    """What a configuration says: a mapping, a `GenerationConfig` of transformers, or EasyDeL's own record."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if callable(told := getattr(given, "to_diff_dict", None)):
        return dict(told())
    try:
        return {name: value for name, value in vars(given).items() if value is not None}
    except TypeError:
        raise ConfigError(f"generation_config is a mapping or a record, got {given!r}") from None
