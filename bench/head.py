"""Log-probs of hidden states over a large vocabulary, forward and backward: our kernels against the plain path.

    python bench/head.py [--repeats 10] [--tile-mib 512]

One GPU, bfloat16. The plain path is the scorer's own where there are no kernels: logits tile by tile, softmax in
PyTorch, each tile computed again on the way back. Both in one process, in turns, on the same tensors, with the
gradients of hidden states and weight; both must come to the same numbers. Memory is the peak less what was held before,
gradients included. `matmul_share`: the time that the four products (8 · tokens · vocabulary · width operations) take
alone, at the rate of one of them measured in the same run, over ours. Writes bench/results/head.json and prints the
table made from it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.language.scoring import head
from grpo.language.scoring.scorer import Scorer, ScoringPlan

RESULTS = Path(__file__).parent / "results" / "head.json"
SHAPES = [(49_152, 576, 65_536), (151_936, 2048, 16_384)]
"""Vocabulary, width, tokens."""


def seconds_of(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(vocabulary: int, width: int, tokens: int, repeats: int, entropy: bool) -> dict[str, object]:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=width // 64,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(shape).bfloat16()
    weight = model.lm_head.weight
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target, w = torch.randint(vocabulary, (tokens,), device="cuda"), torch.randn(tokens, device="cuda")

    def one_pass(fused: bool) -> list[Tensor]:
        scorer = Scorer(model, 1.0, ScoringPlan(fused_head=fused))
        logp_M, entropy_M = scorer.of_hidden(hidden, target, entropy)
        loss = (logp_M * w).sum()
        if entropy:
            loss = loss + (entropy_M * w).sum()
        return [logp_M.detach(), *torch.autograd.grad(loss, [hidden, weight])]

    ways: dict[str, bool] = {"ours": True, "plain": False}
    found = {way: one_pass(fused) for way, fused in ways.items()}  # what is compiled or loaded first is not timed
    gaps = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(*found.values(), strict=True)]
    if max(gaps) > 5e-2:  # the plain path rounds logits, and sums the weight's gradient in bfloat16
        raise RuntimeError(f"the two ways disagree: {gaps}")
    del found
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peak = dict.fromkeys(ways, 0)
    for _ in range(repeats):
        for way, fused in ways.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            seconds[way].append(seconds_of(lambda fused=fused: one_pass(fused)))
            peak[way] = max(peak[way], torch.cuda.max_memory_allocated() - before)
    some, by = hidden.detach()[:4096], weight.detach().t()
    room = torch.empty(4096, vocabulary, device="cuda", dtype=torch.bfloat16)
    product = min(seconds_of(lambda: torch.mm(some, by, out=room)) for _ in range(10))
    middle = {way: statistics.median(times) for way, times in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
    return {
        "vocabulary": vocabulary,
        "width": width,
        "tokens": tokens,
        "entropy": entropy,
        "time_ratio": statistics.median(ratios),
        "time_ratio_low": min(ratios),
        "time_ratio_high": max(ratios),
        "memory_ratio": peak["ours"] / peak["plain"],
        "matmul_share": 4 * product * tokens / 4096 / middle["ours"],
        "seconds": seconds,
        "bytes": peak,
        "gaps": dict(zip(("logp", "d_hidden", "d_weight"), gaps, strict=True)),
    }


def table(results: dict) -> str:
    """Markdown made from the results file."""
    lines = [
        "| vocabulary × width | tokens | time, ours / plain (range) | memory, ours / plain | products' share of ours |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        size = f"{row['vocabulary']:,} × {row['width']:,}{', entropy' if row['entropy'] else ''}"
        spread = f"{row['time_ratio']:.2f} ({row['time_ratio_low']:.2f} – {row['time_ratio_high']:.2f})"
        shares = f"{row['memory_ratio']:.2f} | {row['matmul_share']:.2f}"
        lines.append(f"| {size} | {row['tokens']:,} | {spread} | {shares} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="log-probs of hidden states, our kernels against the plain path")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tile-mib", type=int, default=head.TILE_BYTES >> 20, help="of our float32 logits")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    head.TILE_BYTES = options.tile_mib << 20
    rows = [measure(*shape, options.repeats, entropy) for shape in SHAPES for entropy in (False, True)]
    device = torch.device("cuda", torch.cuda.current_device())
    results = {
        "measures": "log-probs of bfloat16 hidden states, forward and backward: our kernels against the plain path",
        "rows": rows,
        "tile_mib": options.tile_mib,
        "wide_products": {name: head.wide(name, torch.bfloat16, device) for name in ("mm", "addmm")},
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
