"""Small verifiable tasks that need no download, and a model of our own, made from scratch, to learn them with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.config import ConfigError
from grpo.recipes import nearest

TINY = "tiny"
"""The model's name in the settings."""
HEAD = 8
"""Width of an attention head: many narrow ones compare characters sooner than a few wide ones."""
SPECIAL = ("<pad>", "<eos>", "<unk>")
HELD_OUT = 1000
"""Rows of the split `test`, the same for every seed; all others are trained on."""


@dataclass(frozen=True)
class Task:
    """Rows with `prompt` and `answer`, and the characters that these are written with."""

    name: str
    every: Callable[[], list[dict[str, Any]]]
    """All rows there are, in a fixed order."""
    characters: str = ""
    held_out: int = HELD_OUT

    def rows(self, split: str, seed: int = 0) -> list[dict[str, Any]]:
        """The rows of `train` or `test`, which have none in common."""
        if split not in ("train", "test"):
            raise ConfigError(f"the task {self.name} has the splits train and test, not {split!r}")
        rows = self.every()
        random.Random(0).shuffle(rows)
        return rows[: self.held_out] if split == "test" else rows[self.held_out :]

    def tiny(self, seed: int) -> tuple[Any, Any]:
        """A small transformer with random weights, and its tokenizer of one token a character."""
        if not self.characters:
            raise ConfigError(f"model={TINY} cannot learn {self.name} from scratch; name a pretrained model")
        return tiny_model(len(SPECIAL) + len(self.characters), seed), tiny_tokenizer(self.characters)


def tiny_tokenizer(characters: str) -> Any:
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate([*SPECIAL, *characters])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return make(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=512)


def tiny_model(vocabulary: int, seed: int, width: int = 64, layers: int = 2) -> Any:
    """A Llama of about a hundred thousand numbers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make: Any = LlamaForCausalLM

    torch.manual_seed(seed)
    return make(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // HEAD,
            num_key_value_heads=width // HEAD,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def exact(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """A reward: 1 for the answer and nothing else."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def in_place(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """A reward: the share of the answer's characters that stand where they should, less for a wrong length."""
    pairs = zip(completions, answer, strict=True)
    return [
        (sum(map(str.__eq__, completion, right)) - abs(len(completion) - len(right))) / len(right)
        for completion, right in pairs
    ]


def built_in(name: str) -> Task:
    """A task by name."""
    if name not in TASKS:
        known = ", ".join(TASKS)
        raise ConfigError(f"there is no built-in task {name!r}{nearest(name, list(TASKS))}; known: {known}")
    return TASKS[name]


def _sort_digits() -> list[dict[str, Any]]:
    """Four digits, to be sorted: 10,000 rows, no answer more than 24 times."""
    every = ("".join(digits) for digits in itertools.product("0123456789", repeat=4))
    return [{"prompt": f"{digits}>", "answer": "".join(sorted(digits))} for digits in every]


def _addition() -> list[dict[str, Any]]:
    """Two numbers of two digits: 8,100 rows."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 100) for b in range(10, 100)]


TASKS = {
    "sort-digits": Task("sort-digits", _sort_digits, "0123456789>"),
    "addition": Task("addition", _addition, "0123456789+="),
}
"""By name, for the setting `dataset`."""
