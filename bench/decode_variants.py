"""What each part of the CUDA engine gives: one rollout with and without it, on random weights of a shape.

Every variant changes one thing. Writes bench/results/decode_variants.json, from which docs/decisions.md quotes.

    python bench/decode_variants.py                 # needs a GPU; about two minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "peers")]
from models import random_model  # noqa: E402
from shapes import SHAPES  # noqa: E402

from grpo.language.engines import Sampling, Tokens  # noqa: E402
from grpo.language.engines.cuda_graphs import (  # noqa: E402
    blocks,
    decoder,
    fused_decoder,
    kernels,
    model_runner,
    module_decoder,
    scheduler,
    sequence,
)
from grpo.language.engines.inline import InlineEngine  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SMOLLM = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def module_only(model, positions):
    """The module's own forward inside the graph, only attention and sampling ours."""
    return module_decoder.ModuleDecoder(model)


def attend_with(**settings):
    """The attention kernel with other settings."""
    plain = kernels.attend
    return mock.patch.object(fused_decoder, "attend", lambda *args, **named: plain(*args, **{**named, **settings}))


def blocks_of(size):
    """Blocks of another size."""
    made, of = blocks.BlockManager, blocks.block_bytes
    return [
        mock.patch.object(model_runner, "BlockManager", lambda *args: made(*args, block_size=size)),
        mock.patch.object(decoder, "BlockManager", lambda *args: made(*args, block_size=size)),
        mock.patch.object(model_runner, "block_bytes", lambda *args: of(*args, block_size=size)),
        *(
            mock.patch.object(module, "blocks_for", lambda tokens: -(-tokens // size))
            for module in (scheduler, sequence)
        ),
    ]


VARIANTS = {
    "as it is": [],
    "every row reads its prompt by itself": [mock.patch.object(scheduler, "SHARED_BY", 10**9)],
    "prompts always read together": [mock.patch.object(scheduler, "SHARED_BYTES", 0)],
    "the module's own forward": [mock.patch.object(model_runner, "make_decoder", module_only)],
    "4 steps a chunk": [mock.patch.object(scheduler, "CHUNK", 4)],
    "16 steps a chunk": [mock.patch.object(scheduler, "CHUNK", 16)],
    "blocks of 16 tokens": blocks_of(16),
    "blocks of 64 tokens": blocks_of(64),
    "4 warps": [attend_with(warps=4, stages=3)],
    "tiles of 32": [attend_with(tile=32)],
    "tiles of 128": [attend_with(tile=128)],
}
FEW = ("as it is", "every row reads its prompt by itself", "prompts always read together", "the module's own forward")


def measured(model, prompts, group, tokens, repeats, parts):
    """Seconds of rollouts, the first ones left out."""
    for part in parts:
        part.start()
    try:
        engine = InlineEngine(model, Tokens(None, frozenset({model.config.vocab_size}), 0))
        seconds = []
        for _ in range(repeats + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.generate(prompts, group, Sampling(max_new_tokens=tokens), range(len(prompts) * group))
            seconds.append(time.perf_counter() - began)
        return seconds[2:]
    finally:
        for part in parts:
            part.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    args = parser.parse_args()
    told = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__} | vars(args)
    cells: list[dict[str, Any]] = []

    def keep(**cell: Any) -> None:  # at once: whoever ends this has what was measured
        cells.append(cell)
        (RESULTS / "decode_variants.json").write_text(json.dumps(told | {"cells": cells}, indent=1) + "\n")

    RESULTS.mkdir(exist_ok=True)
    for name, variants in (("smollm", VARIANTS), ("qwen17", FEW)):
        model = random_model({**SHAPES, "smollm": SMOLLM}[name], "bfloat16", "cuda")
        random = torch.Generator().manual_seed(0)
        for count in (32, 128):
            prompts = torch.randint(0, 40_000, (count, args.prompt), generator=random).tolist()
            for variant in variants:
                repeats = args.repeats if variant != "the module's own forward" else 1
                seconds = measured(model, prompts, 8, args.tokens, repeats, VARIANTS[variant])
                rate = count * 8 * args.tokens / statistics.median(seconds)
                keep(shape=name, rows=count * 8, variant=variant, seconds=seconds, rate=rate)
                print(f"{name:8} {count * 8:5} rows  {variant:40} {rate:10.0f} tokens/s", flush=True)
            seconds = measured(model, prompts, 8, 1, args.repeats, [])
            keep(shape=name, rows=count * 8, variant="one token only", seconds=seconds)
            print(f"{name:8} {count * 8:5} rows  one token only: {1e3 * statistics.median(seconds):.1f} ms", flush=True)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
