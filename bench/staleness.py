"""What sampling ahead with a copy of the model brings: seconds a step at staleness 0 and 1, in turns.

    python bench/staleness.py --output bench/results/staleness_cpu.json
    python bench/staleness.py --device cuda --output bench/results/staleness_gpu.json

On a CPU small Llamas, 8 prompts × 8 completions of 64 tokens; on a GPU the shapes of SmolLM2-135M and Qwen3-0.6B,
32 × 8 × 256, bfloat16, one trainer after the other. A reward that takes time is what a learner need not wait for.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

import cells
import models
from shapes import SHAPES

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.tasks import built_in

LLAMA = {"model_type": "llama", "max_position_embeddings": 512}
SMALL = {
    "2 layers × 64": LLAMA | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "6 layers × 384": LLAMA | {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6},
}
LARGE = {
    "SmolLM2-135M shape": LLAMA
    | {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "Qwen3-0.6B shape": SHAPES["qwen06"],
}  # fmt: skip


def trainer(shape: dict[str, Any], staleness: float, sleep: float, device: str) -> GRPOTrainer:
    """A model of that shape on sums, with a reward that takes `sleep` seconds a call."""
    warnings.simplefilter("ignore")
    given, tokenizer = dict(shape), built_in("addition").tiny(0)[1]
    if device == "cpu":
        given |= {"vocab_size": len(tokenizer), "intermediate_size": 4 * shape["hidden_size"]}
        sizes = {"num_generations": 8, "prompts_per_step": 8, "max_completion_length": 64, "dtype": "float32"}
    else:
        tokenizer = models.words(shape["vocab_size"])
        sizes = {"num_generations": 8, "prompts_per_step": 32, "max_completion_length": 256, "dtype": "bfloat16"}

    def digits(completions: list[str], **_: object) -> list[float]:
        time.sleep(sleep)
        return [float(len(re.findall(r"\d", text))) for text in completions]

    settings = GRPOConfig(
        **sizes, device=device, preflight=False, learning_rate=1e-6, engine="inline", staleness=staleness, beta=0.0,
        overlap_rewards=False, skip_apply_chat_template=True,
    )  # fmt: skip
    rows = [{"prompt": f"{i} + {i + 1} =", "answer": str(2 * i + 1)} for i in range(512)]
    model = models.random_model(given, "float32", device)
    return GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=digits, args=settings, train_dataset=rows)


def timed(one: GRPOTrainer, staleness: float) -> float:
    """Seconds of a step, and of what it has begun: the next one must not get it for nothing."""
    began = time.perf_counter()
    one.step().forget()
    if staleness:
        for asked in one.pace._asked:
            asked.part.result()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def compared(shape: dict[str, Any], sleep: float, steps: int, device: str) -> dict[float, list[float]]:
    """In turns on a CPU, so that whatever else the machine does meets both; on a GPU both would share its memory."""
    seconds: dict[float, list[float]] = {0.0: [], 1.0: []}
    if device == "cpu":
        pair = {staleness: trainer(shape, staleness, sleep, device) for staleness in seconds}
        for _ in range(steps):
            for staleness, one in pair.items():
                seconds[staleness].append(timed(one, staleness))
        for one in pair.values():
            one.source.close()
        return seconds
    for staleness, found in seconds.items():
        one = trainer(shape, staleness, sleep, device)
        found += [timed(one, staleness) for _ in range(steps)]
        one.source.close()
        del one
        gc.collect()
        torch.cuda.empty_cache()
    return seconds


def main() -> None:
    """Measure in turns, so that whatever else the machine does meets both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=6, help="the first two are not counted")
    args = parser.parse_args()
    found = []
    for name, shape in (SMALL if args.device == "cpu" else LARGE).items():
        for sleep in (0.0, 0.5):
            seconds = compared(shape, sleep, args.steps, args.device)
            plain, ahead = (statistics.median(each[2:]) for each in seconds.values())
            found.append({"model": name, "reward_seconds": sleep, "synchronous": plain, "ahead": ahead,
                          "ratio": plain / ahead, "seconds": list(seconds.values())})  # fmt: skip
            print(found[-1], flush=True)
    told = {"machine": cells.machine(args.device), "threads": torch.get_num_threads(), "versions": cells.versions(),
            "steps": args.steps, "rows": found}  # fmt: skip
    if args.output:
        args.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
