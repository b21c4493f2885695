"""Completions that follow from the prompt and from how often it was asked before, not from a model: what two trainers
make of the same samples can be compared, and tools are called that a random model never would."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from grpo.language.engines import Completion, Engine, Sampling, Tokens, in_groups

CALLS = {
    "multiply": {"name": "multiply", "arguments": {"a": 3, "b": 4}},
    "increment": {"name": "increment", "arguments": {"step": 2}},
}
LETTERS = "abcdefgh "


def said(prompts: Sequence[Sequence[int]], tokenizer: Any, limit: int) -> list[list[int]]:
    """A completion of each prompt, which stands there as often as it is to be answered."""
    asked: Counter[tuple[int, ...]] = Counter()
    made = []
    for prompt in prompts:
        text = _text(tokenizer.decode(list(prompt)), asked[tuple(prompt)])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        made.append([*ids, tokenizer.eos_token_id][:limit])
        asked[tuple(prompt)] += 1
    return made


def _text(prompt: str, number: int) -> str:
    """One of four calls the tool that is offered; a call that was answered is told of."""
    offered = next((name for name in CALLS if name in prompt), None)
    if offered is None:
        drawn = random.Random(f"{prompt} {number}")
        boxed = "\\boxed{3}" if number % 4 == 3 else ""
        return "".join(drawn.choices(LETTERS, k=drawn.choice((2, 5, 20)))) + boxed
    if "tool_response" in prompt.rpartition("assistant")[0].rpartition("assistant")[2] or "<|im_start|>tool" in prompt:
        return f"It is {12 if offered == 'multiply' else 2}."
    if number % 4 == 1:
        return f"<tool_call>\n{json.dumps(CALLS[offered])}\n</tool_call>"
    return ("I know none.", "", "It is 12.", "No idea")[number % 4]


class Forced(Engine):
    """Says these."""

    name, exact, repeatable, context = "forced", False, True, 4096

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        each = [prompt for prompt in prompts for _ in range(count)]
        end = self._tokens.tokenizer.eos_token_id
        return [
            Completion(torch.tensor(ids), None, "eos" if ids[-1] == end else "length")
            for ids in said(each, self._tokens.tokenizer, sampling.max_new_tokens)
        ]

    def stream(self, prompts: Any, count: int, sampling: Any, seeds: Any) -> Any:
        return in_groups(self.generate(prompts, count, sampling, seeds), count)
