"""Tokens until a small student does as well as its teacher on sums: by the teacher, and by the reward alone.

    python bench/teacher.py --seeds 0,1,2 --jobs 2

A seed makes one small transformer from scratch; supervised steps on right answers make the teacher and, with fewer of
them, the student. The student then learns from its own answers, 64 a step: from what the teacher says of them (`opd`,
of the sampled tokens; and the same KL over the whole vocabulary), or from the reward alone (`dr_grpo`, groups of 8).
Adam, a learning rate that falls to 0, until 1,000 held-out sums are right as often as the teacher has them, less 0.01,
or the steps are over. At a rate of 3e-4 the reward alone unlearns (0.30, 0.32 and 0.65 of three seeds after 300 steps)
and `opd` of sampled tokens hardly learns (0.63, 0.69, 0.87), so these two have 1e-4. Tokens are those of prompts and
completions; looks at held-out sums are not counted. Writes bench/results/teacher.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "teacher.json"
SHARED = {
    "dataset": "addition", "rewards": ("correctness",), "preflight": False, "device": "cpu", "max_completion_length": 4,
    "reward_workers": 1, "group_size": 2, "groups_per_step": 32, "lr_schedule": "linear", "warmup_steps": 10,
}  # fmt: skip
WHOLE = {"teacher_in": "loss", "teacher_over": "top_k", "teacher_top_k": 4096}
WAYS: dict[str, dict[str, Any]] = {
    "opd, all tokens": {"loss_type": "opd", "learning_rate": 3e-4, **WHOLE},
    "opd": {"loss_type": "opd", "learning_rate": 1e-4},
    "reward": {"loss_type": "dr_grpo", "learning_rate": 1e-4, "group_size": 8, "groups_per_step": 8},
}
TEACHER, STUDENT, STEPS, EVERY, SHORT = 1500, 800, 2500, 50, 0.01


def made(settings: dict[str, Any]) -> Any:
    """A trainer. Imported here: processes that reward import this file, and need none."""
    from grpo.language import GRPOConfig, GRPOTrainer

    return GRPOTrainer(args=GRPOConfig(**settings))


def supervised(seed: int, steps: int, folder: Path) -> float:
    """A model of so many supervised steps, saved; how often it is right."""
    if (folder / "config.json").is_file():
        return right(made(SHARED | {"model": str(folder)}))
    how = SHARED | {"model": "tiny", "warm_start_steps": steps, "seed": seed, "learning_rate": 1e-12}
    trainer = made(how | {"lr_schedule": "constant", "warmup_steps": 0})
    trainer.step()  # the warm start; a step of this size changes nothing
    trainer.save_model(folder)
    found = right(trainer)
    trainer.source.close()
    return found


def right(trainer: Any) -> float:
    """Share of held-out sums that are answered right."""
    return float(trainer.evaluate().metrics()["accuracy"] or 0.0)


def learned(seed: int, way: str, folder: Path, enough: float, steps: int) -> dict[str, Any]:
    """Accuracy by tokens, and how many it took to be good enough."""
    started, curve = time.process_time(), []
    more = {"model": str(folder / "student"), "seed": seed}
    more |= {} if way == "reward" else {"teacher": str(folder / "teacher")}
    trainer = made(SHARED | WAYS[way] | more)

    trainer.schedule(steps)
    while trainer.steps_done < steps and not (curve and curve[-1][1] >= enough):
        trainer.step().forget()
        if trainer.steps_done % EVERY == 0:
            curve.append((trainer.source.num_tokens, round(right(trainer), 4)))
            print(f"seed {seed} {way} step {trainer.steps_done}: {curve[-1]}", flush=True)
    trainer.source.close()
    reached = curve[-1][1] >= enough
    seconds = round(time.process_time() - started, 1)
    return {"tokens": curve[-1][0] if reached else None, "seen": curve[-1][0], "curve": curve, "cpu_seconds": seconds}


def prepare() -> None:
    """Every process: one core, no warnings."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    """Teachers and students first, then every way; a file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, a core each")
    parser.add_argument("--models", type=Path, help="folder for teachers and students, to use again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    with (
        tempfile.TemporaryDirectory() as place,
        ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn"), prepare) as pool,
    ):
        folder = given.models or Path(place)
        found = {
            "shared": SHARED, "ways": WAYS, "steps": given.steps, "supervised": [TEACHER, STUDENT], "seeds": {}
        }  # fmt: skip
        models = {pool.submit(supervised, seed, steps, folder / str(seed) / name): (seed, name)
                  for seed in seeds for name, steps in (("teacher", TEACHER), ("student", STUDENT))}  # fmt: skip
        for done in as_completed(models):
            seed, name = models[done]
            found["seeds"].setdefault(str(seed), {})[name] = done.result()
            print(f"seed {seed} {name}: {done.result():.3f}", flush=True)
        runs = {}
        for way in given.ways.split(";"):
            for seed in seeds:
                enough = found["seeds"][str(seed)]["enough"] = round(found["seeds"][str(seed)]["teacher"] - SHORT, 4)
                runs[pool.submit(learned, seed, way, folder / str(seed), enough, given.steps)] = (seed, way)
        for work in as_completed(runs):
            seed, way = runs[work]
            found["seeds"][str(seed)][way] = work.result()
            given.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
