"""What `--generate 64 --select 16` saves of an update, and what it costs of learning: sorting, on the CPU.

    python bench/selection.py --seeds 0,1,2 --jobs 2     # accuracy against seconds: a process and a core a run
    python bench/selection.py --profile                  # seconds alone, and what of a step the operations take

`grpo train tiny-language` (four digits are sorted by a small transformer) with 8 prompts of 64 answers a step, which
learns from all of them, from 16 by `variance`, and from 16 at `random`. Seconds are CPU seconds of that process
(collect and update apart), and a run ends after so many of them; accuracy is of 1,000 held-out rows. Writes
bench/results/selection.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "selection.json"
SHARED = {
    "dataset": "sort-digits", "rewards": ("grpo.language.tasks:exact", "grpo.language.tasks:in_place"),
    "eval_by": "exact", "preflight": False, "device": "cpu", "reward_workers": 1, "max_completion_length": 6,
    "model": "tiny", "warm_start_steps": 25, "warm_start_batch": 64, "warm_start_learning_rate": 3e-3,
    "group_size": 64, "groups_per_step": 8, "groups_per_minibatch": 4, "num_iterations": 2,
    "learning_rate": 5e-4, "warmup_steps": 8, "adam_beta2": 0.99, "entropy_coef": 0.15,
}  # fmt: skip
"""As the preset, with larger groups and fewer of them, and without a fall of the learning rate."""
WAYS: dict[str, dict[str, Any]] = {
    "all 64": {},
    "16 by variance": {"select": 16, "select_by": "variance"},
    "16 at random": {"select": 16, "select_by": "random"},
}
SECONDS, EVERY = 100.0, 10
Spent = dict[str, float]


def made(settings: dict[str, Any]) -> Any:
    """A trainer. Imported here: processes that reward import this file, and need none."""
    from grpo.language import GRPOConfig, GRPOTrainer

    return GRPOTrainer(args=GRPOConfig(**settings))


def started(seed: int, way: str, **more: Any) -> tuple[Any, Spent]:
    """A trainer behind its warm start, and the CPU seconds of each phase from there on."""
    spent: Spent = defaultdict(float)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        spent[name] += time.process_time() - began

    trainer = made(SHARED | WAYS[way] | more | {"seed": seed})
    trainer.step().forget()  # with the warm start
    trainer.phase = timed
    return trainer, spent


def each(spent: Spent, steps: int) -> dict[str, float]:
    """Seconds of a step by phase."""
    return {name: round(seconds / steps, 4) for name, seconds in spent.items()}


def learned(seed: int, way: str) -> dict[str, Any]:
    """Seconds by phase and accuracy by seconds."""
    trainer, spent = started(seed, way)
    curve = [(0.0, right(trainer))]
    steps = 0
    while curve[-1][0] < SECONDS:
        trainer.step().forget()
        steps += 1
        if steps % EVERY == 0:
            curve.append((round(sum(spent.values()), 2), right(trainer)))
            print(f"seed {seed} {way} step {steps}: {curve[-1]}", flush=True)
    trainer.source.close()
    return {"steps": steps, "seconds_a_step": each(spent, steps), "curve": curve}


def right(trainer: Any) -> float:
    """Share of held-out rows that are answered right."""
    return round(float(trainer.evaluate().metrics()["accuracy"] or 0.0), 4)


def profiled(steps: int = 10) -> dict[str, Any]:
    """Seconds of a step, taking turns so that a busy machine slows all alike, and rows that go through the model."""
    runs = {way: started(0, way) for way in WAYS}
    for trainer, spent in runs.values():
        trainer.step().forget()  # warm
        spent.clear()
    rows: dict[str, list[int]] = {way: [] for way in runs}
    for way, (trainer, _) in runs.items():
        counted(trainer, rows[way])
    for _ in range(steps):
        for trainer, _ in runs.values():
            trainer.step().forget()
    found = {way: {"seconds_a_step": each(spent, steps), "rows_scored_a_step": sum(rows[way]) // steps}
             for way, (_, spent) in runs.items()}  # fmt: skip
    whole = found["all 64"]["seconds_a_step"]["update"]
    for way, cell in found.items():
        cell["update_ratio"] = round(cell["seconds_a_step"]["update"] / whole, 3)
        print(way, cell, flush=True)
    return found


def counted(trainer: Any, into: list[int]) -> None:
    """Note how many rows go through the policy, with gradient or without."""
    inner = trainer.policy.score

    def score(rows: Any, **more: Any) -> Any:
        into.append(len(rows))
        return inner(rows, **more)

    trainer.policy.score = score


def prepare() -> None:
    """Every process: one core, no warnings."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    """A file after every run."""
    prepare()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = json.loads(given.results.read_text()) if given.results.exists() else {}
    found["shared"] = SHARED
    if given.profile:
        found["profile"] = profiled()
        given.results.write_text(json.dumps(found, indent=1) + "\n")
        return
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn"), prepare) as pool:
        runs = {pool.submit(learned, int(seed), way): (seed, way) for seed in given.seeds.split(",") for way in WAYS}
        for work in as_completed(runs):
            seed, way = runs[work]
            found.setdefault("seeds", {}).setdefault(seed, {})[way] = work.result()
            given.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
