"""Small verifiable tasks that need no download, and a model of our own, made from scratch, to learn them with."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.errors import ConfigError, nearest
from grpo.language.pictures import shapes

TINY = "tiny"
"""The model's name in the settings."""
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
    pictured: bool = False
    """Whether prompts hold images: the model made from scratch then reads them."""

    def rows(self, split: str, seed: int = 0) -> list[dict[str, Any]]:
        """The rows of `train` or `test`, which have none in common."""
        if split not in ("train", "test"):
            raise ConfigError(f"the task {self.name} has the splits train and test, not {split!r}")
        rows = self.every()
        random.Random(0).shuffle(rows)
        return rows[: self.held_out] if split == "test" else rows[self.held_out :]

    def tiny(self, seed: int) -> tuple[Any, Any]:
        """A small transformer with random weights, and its tokenizer of one token a character (or its processor)."""
        if not self.characters:
            raise ConfigError(f"model={TINY} cannot learn {self.name} from scratch; name a pretrained model")
        if self.pictured:
            return shapes.tiny(tiny_tokenizer(self.characters), len(SPECIAL) + len(self.characters), seed)
        model = tiny_model(len(SPECIAL) + len(self.characters), seed, heads=8)  # narrow heads compare sooner
        return model, tiny_tokenizer(self.characters)


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


def tiny_model(vocabulary: int, seed: int, width: int = 64, layers: int = 2, heads: int = 4) -> Any:
    """A Llama of about 130,000 numbers at that width."""
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
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def exact(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], answer: Sequence[str]) -> list[float]:
    """A reward: 1 for the answer, ended, and nothing else; one token a character."""
    made = zip(completions, completion_ids, answer, strict=True)
    return [float(text == right and not _excess(ids, right)) for text, ids, right in made]


def in_place(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], answer: Sequence[str]) -> list[float]:
    """A reward: the share of the answer's characters that stand where they should, less for a wrong length."""
    made = zip(completions, completion_ids, answer, strict=True)
    return [
        (sum(map(str.__eq__, text, right)) - max(len(right) - len(text), 0) - _excess(ids, right)) / len(right)
        for text, ids, right in made
    ]


def _excess(ids: Sequence[int], right: str) -> int:
    """Tokens beyond the answer and its end. Counted in tokens: special ones leave no text, and would cost nothing."""
    return max(len(ids) - len(right) - 1, 0)


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


def _two_digit_sums() -> list[dict[str, Any]]:
    """Sums of two numbers from 10 to 49, for a chat model whose answer is begun: 1,600 rows."""
    return [
        {
            "prompt": [
                {"role": "system", "content": "You are a calculator."},
                {"role": "user", "content": f"{a} + {b}"},
                {"role": "assistant", "content": f"{a} + {b} ="},
            ],
            "answer": str(a + b),
        }
        for a in range(10, 50)
        for b in range(10, 50)
    ]


def result(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """A reward: 1 where the first line gives the answer: behind its last =, or as its first number. Format is free."""
    return [float(_result_of(completion) == right) for completion, right in zip(completions, answer, strict=True)]


def _result_of(text: str) -> str:
    line = text.strip().partition("\n")[0]
    found = re.search(r"\d+", line.rpartition("=")[2]) or re.search(r"\d+", line)
    return found.group() if found else ""


TASKS = {
    "sums": Task("sums", _two_digit_sums, held_out=300),
    "sort-digits": Task("sort-digits", _sort_digits, "0123456789>"),
    "addition": Task("addition", _addition, "0123456789+="),
    "shapes": Task("shapes", shapes.rows, shapes.CHARACTERS, held_out=300, pictured=True),
}
"""By name, for the setting `dataset`."""
