"""What sampling ahead with a copy of the model brings on a CPU: seconds a step at staleness 0 and 1, in turns.

python bench/staleness_cpu.py --output bench/results/staleness_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
import warnings
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.tasks import built_in

SHAPES = {"2 layers × 64": (64, 2, 4), "6 layers × 384": (384, 6, 6)}


def trainer(shape: tuple[int, int, int], staleness: float, sleep: float) -> GRPOTrainer:
    """A small Llama on the built-in task of sums, with a reward that takes `sleep` seconds a call."""
    warnings.simplefilter("ignore")
    width, layers, heads = shape
    _, tokenizer = built_in("addition").tiny(0)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512,
    )  # fmt: skip

    def digits(completions: list[str], **_: object) -> list[float]:
        time.sleep(sleep)
        return [float(len(re.findall(r"\d", text))) for text in completions]

    settings = GRPOConfig(
        num_generations=8, prompts_per_step=8, max_completion_length=64, preflight=False, learning_rate=1e-5,
        engine="inline", staleness=staleness, beta=0.0, overlap_rewards=False,
    )  # fmt: skip
    rows = [{"prompt": f"{i} + {i + 1} =", "answer": str(2 * i + 1)} for i in range(512)]
    model = LlamaForCausalLM(config)
    return GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=digits, args=settings, train_dataset=rows)


def main() -> None:
    """Measure in turns, so that whatever else the machine does meets both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    found = []
    for name, shape in SHAPES.items():
        for sleep in (0.0, 0.5):
            pair = {staleness: trainer(shape, staleness, sleep) for staleness in (0.0, 1.0)}
            seconds: dict[float, list[float]] = {0.0: [], 1.0: []}
            for _ in range(args.steps):
                for staleness, one in pair.items():
                    began = time.perf_counter()
                    one.step()
                    if staleness:  # what it has begun is its own: the other one must not pay for it
                        for asked in one.pace._asked:
                            asked.part.result()
                    seconds[staleness].append(time.perf_counter() - began)
            plain, ahead = (statistics.median(seconds[staleness][1:]) for staleness in (0.0, 1.0))
            found.append({"model": name, "reward_seconds": sleep, "synchronous": plain, "ahead": ahead,
                          "ratio": plain / ahead})  # fmt: skip
            print(found[-1], flush=True)
            for one in pair.values():
                one.source.close()
    told = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "machine": platform.processor(),
            "torch": torch.__version__, "steps": args.steps, "rows": found}  # fmt: skip
    if args.output:
        args.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
