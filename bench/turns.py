"""Conversations with an environment that sleeps: how long a step lasts beside its longest conversation, and beside TRL.

    python bench/turns.py --conversations 256 --turns 4 --low 0.1 --high 2.0      ours
    python bench/turns.py … --scale 0.1 --trl-site FOLDER                         a tenth as long, and TRL's loop
    python bench/turns.py --kinds --kept                                          what keeping keys and values saves

Every conversation draws its own delays, from its number. `longest` is what the slowest of them needs by itself: the sum
of its delays and its own share of sampling. `scripted` says a word without a model, so that only the waiting is
measured; `tiny` samples every turn with a transformer made from scratch. Of TRL its own `_tool_call_loop` runs, with
an asynchronous tool that sleeps as long, and scripted completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo.language.data.chat import Chat, prepare_tokenizer
from grpo.language.engines import Completion, Engine, Sampling
from grpo.language.engines.inline import InlineEngine
from grpo.language.samples import Prompt
from grpo.language.tasks import TASKS
from grpo.language.turns.conversation import Conversation


def delays(given: argparse.Namespace, number: int) -> list[float]:
    """Of one conversation, a turn each."""
    draw = random.Random(number)
    return [given.scale * draw.uniform(given.low, given.high) for _ in range(given.turns)]


def sleeper(given: argparse.Namespace) -> type:
    """An environment that answers after its delays."""
    numbers = iter(range(10**9))

    class Sleeper:
        def reset(self, row: dict[str, Any]) -> None:
            self.number, self.turn = next(numbers), 0

        async def step(self, completion: str) -> tuple[str, float, bool]:
            await asyncio.sleep(delays(given, self.number)[self.turn])
            self.turn += 1
            return "1", 1.0, self.turn == given.turns

    return Sleeper


class Scripted(Engine):
    """Says one token, at once."""

    name, exact = "scripted", True

    def __init__(self, token: int, repeatable: bool) -> None:
        self._token, self.repeatable = token, repeatable

    def generate(self, prompts: Any, count: int, sampling: Sampling, seeds: Any) -> list[Completion]:
        return [Completion(torch.tensor([self._token]), torch.zeros(1), "eos") for _ in seeds]


class Short(InlineEngine):
    """Answers of so many tokens, whatever they are: a model that has learned nothing does not end."""

    tokens_each = 8

    def generate(self, prompts: Any, count: int, sampling: Sampling, seeds: Any) -> list[Completion]:
        made = super().generate(prompts, count, replace(sampling, max_new_tokens=self.tokens_each), seeds)
        return [replace(one, stop="eos") for one in made]


def ours(given: argparse.Namespace, kind: str) -> dict[str, float]:
    """Seconds of all conversations together."""
    model, tokenizer = TASKS["addition"].tiny(seed=0)
    tokens, chat = prepare_tokenizer(tokenizer), Chat(tokenizer)
    Short.tokens_each = given.tokens
    engine: Engine = Short(model, tokens) if kind == "tiny" else Scripted(tokens.end, kind == "scripted")
    ids, text, messages = chat.render("1+1=")
    count = given.group
    prompts = [Prompt(row, ids, text, messages, {}) for row in range(given.conversations // count)]
    player = Conversation(chat, tokens, environment=sleeper(given), max_turns=given.turns, timeout=60.0)
    sampling = Sampling(max_new_tokens=given.turns * (given.tokens + 8))
    alone = 0.0
    if kind == "tiny":  # what a conversation's own sampling takes, as it is batched
        began = time.perf_counter()
        for turn in range(given.turns):
            asked = [*ids, *[ids[0]] * (turn * (given.tokens + 4))]
            engine.generate([asked], count, Sampling(max_new_tokens=given.tokens), list(range(count)))
        alone = time.perf_counter() - began
    began = time.perf_counter()
    samples = [
        s for _, some in player(engine, prompts, count, sampling, list(range(given.conversations))) for s in some
    ]
    wall = time.perf_counter() - began
    player.close()
    assert all(sample.error is None for sample in samples), next(s.error for s in samples if s.error)
    every = [sum(delays(given, number)) for number in range(given.conversations)]
    longest = max(every) + alone
    return {"seconds": wall, "longest": longest, "sum": sum(every), "over_longest": wall / longest}


def kept(given: argparse.Namespace) -> dict[str, Any]:
    """Four turns with long answers, all at once, in turns with and without keys and values that are kept."""
    model, tokenizer = TASKS["addition"].tiny(seed=0)
    tokens, chat, large = prepare_tokenizer(tokenizer), Chat(tokenizer), given.device == "cuda"
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 8, "head_dim": 32}
    if large:
        shape = {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": given.layers,
            "num_attention_heads": 16,
        }
        shape |= {"num_key_value_heads": 8, "head_dim": 128}
    with torch.device(given.device):
        model = type(model)(replace_config(model.config, shape)).eval()
    model = model.bfloat16() if large else model
    answer, rows = "1+2=" * (250 if large else 38), given.rows or (128 if large else 16)

    class Tells:
        def reset(self, row: dict[str, Any]) -> None:
            self.turn = 0

        def step(self, completion: str) -> tuple[str, float, bool]:
            self.turn += 1
            return answer, 1.0, self.turn == given.turns

    ids, text, messages = chat.render("12+34=" * 30)
    prompts = [Prompt(row, ids, text, messages, {}) for row in range(rows // 4)]
    player = Conversation(chat, tokens, environment=Tells, max_turns=given.turns)
    told: dict[str, Any] = {"rows": rows, "turns": given.turns, "prompt": len(ids), "answer": len(answer)}
    Short.tokens_each = given.tokens
    engines = {"kept": Short(model, tokens, kept_bytes=2**30), "anew": Short(model, tokens, kept_bytes=0)}
    for number in range(4):  # the first compiles and captures
        for name, engine in engines.items():
            began = time.perf_counter()
            for _ in player(engine, prompts, 4, Sampling(max_new_tokens=8000), list(range(rows))):
                pass
            seconds = round(time.perf_counter() - began, 3)
            print(f"kept: rollout {number} {name} {seconds} s", flush=True)
            if number:
                told.setdefault(name, []).append(seconds)
    told["share"] = round(engines["kept"].metrics()["engine/prompt_kept"], 3)
    told["anew_over_kept"] = round(min(told["anew"]) / min(told["kept"]), 2)
    return told


def replace_config(config: Any, shape: dict[str, int]) -> Any:
    """Of another size."""
    return type(config)(**{**config.to_dict(), **shape, "max_position_embeddings": 8192})


def trl(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of TRL's own loop over as many conversations, with a tool that sleeps as long."""
    sys.path.insert(0, given.trl_site)
    import trl as library
    from trl.trainer import grpo_trainer

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    turn_of = dict.fromkeys(range(given.conversations), 0)

    def tool_of(number: int) -> Any:
        async def wait() -> str:
            await asyncio.sleep(delays(given, number)[turn_of[number]])
            turn_of[number] += 1
            return "1"

        return wait

    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "wait", "arguments": {}}}]}
    grpo_trainer.parse_response = lambda *_, **__: dict(call)  # type: ignore[attr-defined]
    size = given.conversations
    stub = SimpleNamespace(
        max_tool_calling_iterations=given.turns, _sync_tool_dicts=[{}] * size, async_loop=loop, use_vllm=False,
        _async_tool_dicts=[{"wait": tool_of(number)} for number in range(size)], _is_vlm=False, tools=[],
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)), max_completion_length=10**6,
        _get_tool_suffix_ids=lambda messages: [1], _tokenizer=None, environment_factories=None,
        _generate_single_turn=lambda ids, *_, **__: ([[1] for _ in ids], [[0.0] for _ in ids]),
    )  # fmt: skip
    began = time.perf_counter()
    grpo_trainer.GRPOTrainer._tool_call_loop(
        stub, [[{"role": "user", "content": "?"}] for _ in range(size)], [[1]] * size, [[1] for _ in range(size)],
        [[dict(call)] for _ in range(size)], [[0.0] for _ in range(size)], None, {},
    )  # fmt: skip
    assert set(turn_of.values()) == {given.turns}
    return {"seconds": round(time.perf_counter() - began, 3), "version": library.__version__}


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--group", type=int, default=8, help="conversations of one prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8, help="of one answer, for `tiny`")
    parser.add_argument("--low", type=float, default=0.1)
    parser.add_argument("--high", type=float, default=2.0)
    parser.add_argument("--scale", type=float, default=1.0, help="of all delays")
    parser.add_argument("--device", default="cpu", help="of --kept; cuda: a model of the 1.7B shape")
    parser.add_argument("--layers", type=int, default=28, help="of that model")
    parser.add_argument("--rows", type=int, help="of --kept (128 on a GPU, else 16)")
    parser.add_argument("--kept", action="store_true", help="what keeping keys and values between turns saves")
    parser.add_argument("--kinds", nargs="*", default=["scripted", "as_ready", "tiny"])
    parser.add_argument("--trl-site", help="a folder that TRL is installed in: its loop, too")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "load": round(os.getloadavg()[0], 1),
        "processors": os.cpu_count(),
        "settings": {k: v for k, v in vars(given).items() if k not in ("json", "trl_site")},
    }
    for kind in given.kinds:
        found[kind] = {name: round(value, 3) for name, value in ours(given, kind).items()}
        print(kind, found[kind], flush=True)
    if given.kept:
        found["kept"] = kept(given)
        print("kept", found["kept"], flush=True)
    if given.trl_site:
        found["trl"] = trl(given)
        found["trl_over_ours"] = round(found["trl"]["seconds"] / found["scripted"]["seconds"], 1)
        print("trl", found["trl"], "over ours:", found["trl_over_ours"], flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
