"""Samples as flat arrays and plain values, to travel between ranks; prompts stay where they are, every rank has them.

A token takes 9 bytes: its id, whether the policy made it, its log-prob.

Letters: L tokens of all samples, end to end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo.errors import RanksDiffer
from grpo.language.samples import Prompt, Sample
from grpo.protocols import State

PLAIN = (str, int, float, bool, type(None))
ARRAYS = ("prompt", "ids", "made", "logp", "version", "environment")
"""Fields of a sample that do not travel as plain values; versions travel in the rollouts."""


def pack(samples: Sequence[Sample]) -> State:
    """The samples without their prompts."""
    empty_L = torch.zeros(0)
    arrays = {
        "length": torch.tensor([sample.length for sample in samples], dtype=torch.int64),
        "known": torch.tensor([sample.logp is not None for sample in samples], dtype=torch.bool),
        "ids": torch.cat([empty_L.int(), *(sample.ids.cpu().to(torch.int32) for sample in samples)]),
        "made": torch.cat([empty_L.bool(), *(sample.made.cpu() for sample in samples)]),
        "logp": torch.cat([empty_L, *(sample.logp.cpu() for sample in samples if sample.logp is not None)]),
    }
    return State({"samples": [_plain(sample) for sample in samples]}, arrays)


def unpack(parts: Sequence[State], prompts: Sequence[Prompt], count: int) -> list[Sample]:
    """The way back: everybody's samples, `count` of each prompt."""
    each = iter([prompt for prompt in prompts for _ in range(count)])
    return [sample for packed in parts for sample in _unpacked(packed, each)]


def digest(prompts: Sequence[Prompt]) -> str:
    """A fingerprint of what is asked, and of what rewards know of it that has one way to be written."""
    found = hashlib.sha256()
    for prompt in prompts:
        plain = {name: value for name, value in prompt.columns.items() if isinstance(value, PLAIN)}
        found.update(repr((list(map(int, prompt.ids)), sorted(plain.items()))).encode())
    return found.hexdigest()[:16]


def expect_same_prompts(parts: Sequence[State]) -> None:
    """Raise where a rank asks something else than the others: its answers would be put behind their prompts."""
    known = [told.values for told in parts if "prompts" in told.values]  # not of what another version left waiting
    for told in known:
        if told["prompts"] != known[0]["prompts"]:
            raise RanksDiffer(
                f"rank {told['rank']} has other prompts or answers than rank {known[0]['rank']}: the same rows must be "
                "on every rank, in the same order; see docs/scaling.md"
            )


def _unpacked(packed: State, prompts: Iterator[Prompt]) -> Iterator[Sample]:
    lengths, known = packed.arrays["length"].tolist(), packed.arrays["known"].tolist()
    ids, made = torch.split(packed.arrays["ids"], lengths), torch.split(packed.arrays["made"], lengths)
    recorded = iter(torch.split(packed.arrays["logp"], [n for n, has in zip(lengths, known, strict=True) if has]))
    for i, m, has, plain in zip(ids, made, known, packed.values["samples"], strict=True):
        logp = next(recorded) if has else None
        yield Sample(prompt=next(prompts), ids=i.to(torch.int64), made=m, logp=logp, **_told(plain))


def _plain(sample: Sample) -> dict[str, Any]:
    """What JSON keeps of it; the messages of one answer are its text."""
    told = {name: value for name, value in vars(sample).items() if name not in ARRAYS}
    if list(sample.messages) == _one(sample.text):
        told["messages"] = None
    plain: dict[str, Any] = json.loads(json.dumps(told, default=str))  # a reward may want anything shown
    return plain


def _told(plain: dict[str, Any]) -> dict[str, Any]:
    messages = plain["messages"]
    return {**plain, "messages": tuple(_one(plain["text"]) if messages is None else messages)}


def _one(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]
