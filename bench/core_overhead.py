"""What the generality costs: `grpo.objective` against the same clipped GRPO loss written inline in plain PyTorch.

Both run in this process on the same inputs, forward and backward, in turns; the figure is the ratio of their median
times. Writes bench/results/core_overhead.json and prints the table made from it.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path

import torch

from grpo import Experience, Rollouts, recipe
from grpo.objective import objective
from grpo.rollouts import Scores

RESULTS = Path(__file__).parent / "results" / "core_overhead.json"
STEPS, GROUP, REPEATS = 128, 8, 15


def inline(logp, old, ref, advantage, mask, epsilon=0.2, beta=0.04):
    """GRPO as one would write it by hand."""
    ratio = (logp - old).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clip(1 - epsilon, 1 + epsilon) * advantage)
    kl = (ref - logp).exp() - (ref - logp) - 1
    return (((policy + beta * kl) * mask).sum(1) / mask.sum(1).clip(min=1)).mean()


def measure(rows: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, STEPS, generator=generator) * 3
    ref = old + 0.1 * torch.randn(rows, STEPS, generator=generator)
    logp = (old + 0.1 * torch.randn(rows, STEPS, generator=generator)).requires_grad_()
    mask = torch.rand(rows, STEPS, generator=generator) < 0.9
    variant = recipe("grpo", beta=0.04)
    rollouts = Rollouts(
        group_N=torch.arange(rows) // GROUP,
        mask_NT=mask,
        old_logp_NT=old,
        reward_N=torch.rand(rows, generator=generator),
    )
    batch = Experience.build(rollouts, variant, ref)
    mask_float = mask.float()

    def ours():
        return objective(Scores(logp), batch, variant).loss

    def theirs():
        return inline(logp, old, ref, batch.advantage_NT, mask_float)

    torch.testing.assert_close(ours(), theirs())
    times: dict[str, list[float]] = {"ours": [], "inline": []}
    for _ in range(REPEATS):
        for name, loss in (("ours", ours), ("inline", theirs)):
            logp.grad = None
            start = time.perf_counter()
            loss().backward()
            times[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(times["ours"], times["inline"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "rows": rows,
        "ours_ms": 1e3 * statistics.median(times["ours"]),
        "inline_ms": 1e3 * statistics.median(times["inline"]),
        "ratio": statistics.median(ratios),
        "ratio_low": quartiles[0],
        "ratio_high": quartiles[2],
    }


def table(results: dict) -> str:
    """Markdown made from the results file."""
    lines = ["| rows × 128 decisions | ours / inline (median) | quartiles |", "|---|---|---|"]
    for row in results["rows"]:
        lines.append(f"| {row['rows']} | {row['ratio']:.2f} | {row['ratio_low']:.2f} – {row['ratio_high']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {
        "measures": "grpo.objective forward + backward against the same loss inline, one thread, CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "repeats": REPEATS,
        "rows": [measure(rows) for rows in (64, 1024, 4096)],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
