"""What `grpo train tiny-language` learns and costs, run as a user would, once a seed, one after the other.

    python bench/language_tiny.py --seeds 0,1,2

A run is two commands in processes of their own: `grpo train tiny-language`, which is timed from its start to its end
(loading libraries, warm start, evaluations and checkpoints included), and `grpo eval`, which is not: all 1,000 held-out
rows, answered greedily by the last checkpoint, which no look at held-out rows has chosen, and by the best one. CPU
seconds hold those of worker processes. Writes bench/results/tiny_language.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "tiny_language.json"
PRESET = "tiny-language"
LEAST, GAIN, LIMIT = 0.95, 0.40, 120.0
"""Held-out share right, above the warm start, seconds: what every seed must reach."""


def grpo(*words: str) -> str:
    """What a command prints."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "grpo.cli", *words],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def trained(seed: int, folder: Path) -> dict[str, Any]:
    """One run: what it took, what the warm start knew, what was learned."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    grpo("train", PRESET, "--seed", str(seed), "--logdir", str(folder))
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = looked(folder, "last")
    row = {
        "seed": seed,
        "wall_s": wall,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "steps": rows[-1]["step"],
        "warm_start": rows[0]["warm_start/accuracy"],
        "last": last["accuracy"],
        "last_length": last["length"],
        "best": looked(folder, "best")["accuracy"],
        "curve": [[r["step"], r["eval/accuracy"]] for r in rows if r.get("eval/accuracy") is not None],
    }
    row["reached"] = row["last"] >= LEAST and row["last"] - row["warm_start"] >= GAIN and wall < LIMIT
    return row


def looked(folder: Path, checkpoint: str) -> dict[str, float]:
    """Means over all held-out rows, as a checkpoint answers them."""
    told = json.loads(grpo("eval", str(folder), "--checkpoint", checkpoint, "--json"))
    return {row["quantity"]: row["mean"] for row in told["results"]}


def main() -> None:
    """Run the seeds, print and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as aside:
        for seed in map(int, args.seeds.split(",")):
            row = trained(seed, Path(aside) / str(seed))
            runs.append(row)
            print(
                f"seed {seed}: {row['warm_start']:.1%} → {row['last']:.1%} (best checkpoint {row['best']:.1%}) in "
                f"{row['wall_s']:.0f} s, {row['cpu_s']:.0f} CPU-s: {'reached' if row['reached'] else 'missed'}",
                flush=True,
            )
    about = {
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "transformers")},
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
    }
    args.results.write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
