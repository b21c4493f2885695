"""RLinf's words for language models: how completions are sampled, in the `algorithm:` block of its configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.dialects.spelling import Settings, Spelling, absent, truth, whole
from grpo.errors import nearest

ALL_TOKENS = 1_000_000
"""What it writes for no limit; -1 and 0 too."""


def _top_k(value: Any) -> int:
    many = whole(value)
    return 0 if many < 0 or many >= ALL_TOKENS else many


_NAMES = {
    "temperature": "temperature",
    "temperature_train": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "stop": "stop",
}
_OTHERS = ("do_sample", "min_new_tokens", "temperature_eval", "stop_token_ids")


def _sampling_params(value: Any) -> Settings:
    """Its block by our names."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a block of `key: value`, got {value!r}")
    found: Settings = {}
    for key, item in value.items():
        if isinstance(item, str) and "${" in item:
            raise ValueError(f"{key}={item!r} is computed by OmegaConf there; write the number that it comes to")
        if key in _OTHERS:
            _expect_done(key, item)
        elif key not in _NAMES:
            known = [*_NAMES, *_OTHERS]
            raise ValueError(f"{key} is not one of {', '.join(known)}{nearest(key, known)}")
        elif not absent(item):
            found[_NAMES[key]] = _top_k(item) if key == "top_k" else tuple(item) if isinstance(item, list) else item
    return found


def _expect_done(key: str, item: Any) -> None:
    """Make sure that a key we have no word for asks for what is done anyway."""
    if key == "do_sample" and not truth(item):
        raise ValueError("do_sample=false gives a group of equal answers, which teach nothing; leave it out")
    if key == "min_new_tokens" and not absent(item) and whole(item) > 1:
        raise ValueError(f"min_new_tokens={item} is not done here: an answer may end when the model ends it")
    if key == "stop_token_ids" and item:
        raise ValueError("stop_token_ids is not done here: name the texts in stop; the model's own end is known")


RLINF = (
    Spelling(
        "sampling_params",
        "temperature, top_k, top_p, repetition_penalty, max_completion_length, stop",
        "a block; top_k 1000000 and -1 are all tokens, temperature_eval is not read: evaluation is greedy",
        _sampling_params,
    ),
)
"""Of the `algorithm:` block of its configurations for reasoning and agents."""
