"""What log-probs over a large vocabulary cost: our scoring pass, tile by tile, against logits that are made whole.

    python bench/scoring_memory.py [--rows 8] [--tokens 2048] [--device cuda] [--dtype bfloat16]

Forward and backward of the sum of all log-probs, 150,000 tokens in the vocabulary, a small body (width 256, two
layers). Whole: `model(ids).logits`, log_softmax in float32, gather. Each way runs in a process of its own. Its memory
is the peak (resident on the CPU, allocated on a GPU) less what the process held before the pass: weights are not in it,
gradients are. Time is CPU time of one thread, or the GPU's. Both must come to the same log-probs and gradients. Writes
bench/results/scoring_memory.json, where a measurement replaces the one of its device and size, and prints the table
made from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.language.samples import Prompt, Sample
from grpo.language.scoring.probe import make_scorer

RESULTS = Path(__file__).parent / "results" / "scoring_memory.json"
VOCABULARY, WIDTH, LAYERS = 150_000, 256, 2
BAR = 0.25


def make_model(device: str, dtype: str, tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(shape).to(device, getattr(torch, dtype))


def whole(model: LlamaForCausalLM, ids_NL: Tensor) -> Tensor:
    """As one would write it by hand; nothing is kept that is not needed."""
    all_NTV = model(ids_NL, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return all_NTV.gather(-1, ids_NL[:, 1:, None])[..., 0].sum()


def tiled(model: LlamaForCausalLM, ids_NL: Tensor) -> Tensor:
    """Ours; the first token of a row stands for its prompt."""
    made = torch.ones(ids_NL.shape[1] - 1, dtype=torch.bool)
    samples = [
        Sample(Prompt(0, row[:1], "", None), torch.tensor(row[1:]), made, None, "length", "") for row in ids_NL.tolist()
    ]
    return make_scorer(model, 1.0, "padded")(samples, len(made)).logp_NT.sum()


WAYS = {"tiled": tiled, "whole": whole}


def resident() -> int:
    """Bytes that this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(way: str, device: str, dtype: str, rows: int, tokens: int, repeats: int) -> dict[str, object]:
    """In a process of its own: peak memory over the passes, and the time of each."""
    model = make_model(device, dtype, tokens)
    ids_NL = torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    gpu, seconds = device.startswith("cuda"), []
    clock = time.perf_counter if gpu else time.process_time  # a machine that others use too slows the wall clock

    def one_pass(some_NL: Tensor) -> Tensor:
        model.zero_grad(set_to_none=True)
        total = WAYS[way](model, some_NL)
        total.backward()
        return total.detach()

    one_pass(ids_NL[:1, :16])  # what is loaded at first use is not the pass's
    model.zero_grad(set_to_none=True)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else resident()
    for _ in range(repeats):
        start = clock()
        total = one_pass(ids_NL)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(clock() - start)
    peak = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    norm = torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters() if p.grad is not None])
    return {"bytes": peak - before, "seconds": seconds, "logp": float(total), "gradient": float(norm)}


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Both ways, each in its own process, and the ratios."""
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        found[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ours, theirs = found["tiled"], found["whole"]
    tolerance = 1e-4 if options.dtype == "float32" else 2e-2
    for name in ("logp", "gradient"):
        if abs(ours[name] - theirs[name]) > tolerance * abs(theirs[name]):
            raise RuntimeError(f"the two ways disagree on {name}: {ours[name]} and {theirs[name]}")
    times = [a / b for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]
    return {
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device,
        "dtype": options.dtype,
        "rows": options.rows,
        "tokens": options.tokens,
        "memory_ratio": ours["bytes"] / theirs["bytes"],
        "time_ratio": statistics.median(times),
        "time_ratio_low": min(times),
        "time_ratio_high": max(times),
        "tiled": ours,
        "whole": theirs,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def kept(new: dict[str, object]) -> dict[str, object]:
    """The results file with this measurement in it."""
    key = ("device", "dtype", "rows", "tokens")
    old = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    others = [row for row in old if any(row[name] != new[name] for name in key)]
    return {
        "measures": f"log-probs forward + backward, vocabulary {VOCABULARY:,}, width {WIDTH}, {LAYERS} layers: our "
        "scoring pass against logits made whole; memory is the peak less what was held before",
        "bar": BAR,
        "rows": [*others, new],
    }


def table(results: dict) -> str:
    """Markdown made from the results file."""
    lines = ["| device | rows × tokens | memory, ours / whole | time, ours / whole (range) |", "|---|---|---|---|"]
    for row in results["rows"]:
        spread = f"{row['time_ratio']:.2f} ({row['time_ratio_low']:.2f} – {row['time_ratio_high']:.2f})"
        where, size = f"{row['device']}, {row['dtype']}", f"{row['rows']} × {row['tokens']:,}"
        lines.append(f"| {where} | {size} | {row['memory_ratio']:.3f} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="memory of the scoring pass")
    parser.add_argument("--rows", type=int, default=8, help="whole logits of 8 need some 30 GB, of 2 a fourth")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way:
        sizes = (options.device, options.dtype, options.rows, options.tokens, options.repeats)
        print(json.dumps(measure(options.way, *sizes)))
        sys.exit()
    results = kept(compare(options))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    if any(row["memory_ratio"] > BAR for row in results["rows"]):
        sys.exit(f"the scoring pass takes more than {BAR:g} of the memory of whole logits")
