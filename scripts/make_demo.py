"""Train the runs that `grpo view --demo` shows and keep what the page reads of them: `make demo`, about a minute.

A tiny language model learns sums, CartPole is solved from two seeds, a bandit finds its best arm. Left out are
checkpoints, models and most kept groups; numbers of curves have six digits.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo.cli import main
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

HERE = Path(__file__).resolve().parent.parent
TARGET = HERE / "grpo" / "view" / "demo"
MOST = 500_000
"""Bytes of all of it: it is in every wheel."""
PAIRS = [(2, 3), (4, 5), (7, 1), (6, 6)]
KEPT = {"sums": (10, 20, 30, 40), "cartpole-0": (1, 4), "cartpole-1": (), "bandit": (30, 60)}
"""Steps whose groups stay; of cartpole-0 the last one, too."""


def train(*words: str) -> None:
    """One run below runs/."""
    if main(["train", *words, "--run.logdir", "runs/{name}"]) != 0:
        raise SystemExit(f"grpo train {' '.join(words)} failed")


def make() -> None:
    """All of them, in the working folder."""
    tiny_model().save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    rows = [
        {"prompt": f"What is {a} + {b}?", "answer": f"<think>{a} and {b}</think>\nIt is **{a + b}**", "total": a + b}
        for a, b in PAIRS
    ]
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shutil.copy(HERE / "tests" / "browser" / "rewards.py", "rewards.py")
    words = ["--model", "model", "--rewards", '["rewards.py:right", "rewards.py:thought"]', "--reward-workers", "1"]
    words += ["--run.steps", "40", "--run.sample_every", "10", "--groups-per-step", "4", "--group-size", "6"]
    words += ["--num-iterations", "3", "--beta", "0.02", "--learning-rate", "0.001", "--max-completion-length", "40"]
    words += ["--warm-start-steps", "60", "--warm-start-batch", "16", "--warm-start-learning-rate", "0.01"]
    train("sums.jsonl", *words, "--run.name", "sums")
    for seed in ("0", "1"):
        train("cartpole", "--run.sample_every", "1", "--seed", seed, "--run.name", f"cartpole-{seed}")
    train("bandit", "--run.steps", "60", "--run.name", "bandit")


def keep(run: Path, target: Path, place: str) -> None:
    """What the page reads of a run; `place`, where it was trained, is taken out of its texts."""
    target.mkdir(parents=True)
    for name in ("run.json", "config.json", "status.json", "events.jsonl"):
        if (run / name).exists():
            told = (run / name).read_text(encoding="utf-8").replace(f"{place}/", "")
            (target / name).write_text(told, encoding="utf-8")
    for name in ("metrics.jsonl", "timing.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        (target / name).write_text("".join(json.dumps(shortened(row)) + "\n" for row in rows))
    if (run / "video.mp4").exists():
        shutil.copy(run / "video.mp4", target)
    steps = [*KEPT[run.name]]
    if run.name == "cartpole-0":
        steps.append(max(int(path.stem[5:]) for path in (run / "samples").glob("step-*.jsonl")))
    (target / "samples").mkdir()
    for step in steps:
        for path in (run / "samples").glob(f"step-{step:08d}*"):
            shutil.copy(path, target / "samples")


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Six digits are more than a curve shows."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        sys.argv = ["grpo", "train"]  # what run.json keeps
        make()
        shutil.rmtree(TARGET, ignore_errors=True)
        for run in sorted(Path("runs").iterdir()):
            keep(run, TARGET / run.name, str(Path(place).resolve()))
    size = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{TARGET}: {size:,} bytes")
    if size > MOST:
        raise SystemExit(f"more than {MOST:,} bytes: keep fewer groups")
