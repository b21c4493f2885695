"""Words of transformers' generation settings that are not done here, for whoever meets them: TRL's or EasyDeL's."""

from __future__ import annotations

from typing import Any

_LIKELIEST = "completions are sampled one token at a time, by the probabilities that are trained"
NOT_SAMPLED = {
    "num_beams": _LIKELIEST,
    "length_penalty": _LIKELIEST,
    "presence_penalty": _LIKELIEST,
    "frequency_penalty": _LIKELIEST,
    "no_repeat_ngram_size": _LIKELIEST,
    "suppress_tokens": _LIKELIEST,
    "forced_bos_token_id": _LIKELIEST,
    "forced_eos_token_id": _LIKELIEST,
    "min_length": _LIKELIEST,
    "min_new_tokens": _LIKELIEST,
    "max_length": "it counts the prompt too; give max_new_tokens",
}
"""Each with why."""
NEUTRAL: dict[str, tuple[Any, ...]] = {"num_beams": (1,), "length_penalty": (1.0,), "max_length": (20,)}
"""Values that ask for nothing, besides None and 0; 20 is what a configuration holds where nobody set it."""
