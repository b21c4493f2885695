"""Tokens until a small student does as well as its teacher on sums: by the teacher, and by the reward alone.

    python bench/teacher.py --seeds 0,1,2

A seed makes one small transformer from scratch. Supervised steps on right answers make the teacher (1,500 of them) and
the student (800). The student then learns from its own answers: from what the teacher says of them (`opd`, of the
sampled tokens; and the same KL over all of the vocabulary), and from the reward (`dr_grpo`). All else is the same: 256
answers a step, Adam, a learning rate that falls to 0, until 400 held-out sums are right 0.95 times as often as the
teacher has them or 240 steps are over. Tokens are prompts and completions. A way has the learning rate that did best of
1e-4 and 3e-4 on seed 0. Adds its seeds to bench/results/teacher.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from grpo.language import GRPOConfig, GRPOTrainer

RESULTS = Path(__file__).parent / "results" / "teacher.json"
SHARED = {
    "dataset": "addition", "rewards": ("correctness",), "preflight": False, "device": "cpu", "max_completion_length": 4,
    "group_size": 2, "groups_per_step": 128, "lr_schedule": "linear", "warmup_steps": 10,
}  # fmt: skip
WHOLE = {"teacher_in": "loss", "teacher_over": "top_k", "teacher_top_k": 4096}
WAYS: dict[str, dict[str, Any]] = {
    "opd, all tokens": {"loss_type": "opd", "learning_rate": 3e-4, **WHOLE},
    "reward": {"loss_type": "dr_grpo", "learning_rate": 1e-4},
    "opd": {"loss_type": "opd", "learning_rate": 3e-4},
}
TEACHER, STUDENT, STEPS, EVERY, LOOK, NEAR = 1500, 800, 240, 40, 400, 0.95


def supervised(seed: int, steps: int, folder: Path) -> None:
    """A model of so many supervised steps, saved."""
    how = SHARED | {"model": "tiny", "warm_start_steps": steps, "seed": seed, "learning_rate": 1e-12}
    trainer = GRPOTrainer(args=GRPOConfig(**how | {"lr_schedule": "constant", "warmup_steps": 0}))
    trainer.step()  # the warm start; a step of this size changes nothing
    trainer.save_model(folder)


def right(trainer: GRPOTrainer) -> float:
    """Share of held-out sums that are answered right."""
    return float(trainer.evaluate(limit=LOOK).metrics()["accuracy"] or 0.0)


def learned(seed: int, student: str, way: str, more: dict[str, Any], enough: float) -> dict[str, Any]:
    """Accuracy by tokens, and how many it took to be good enough."""
    started, curve = time.process_time(), []
    trainer = GRPOTrainer(args=GRPOConfig(**SHARED | WAYS[way] | more | {"model": student, "seed": seed}))

    def look(report: Any) -> bool:
        """False: good enough, which ends the training."""
        if trainer.steps_done % EVERY == 0:
            curve.append((trainer.source.num_tokens, round(right(trainer), 4)))
            print(f"seed {seed} {way} step {trainer.steps_done}: {curve[-1]}", flush=True)
        return not curve or curve[-1][1] < enough

    trainer.train(steps=STEPS, callbacks=[look], progress=None)
    reached = curve[-1][1] >= enough
    seconds = round(time.process_time() - started, 1)
    return {"tokens": curve[-1][0] if reached else None, "seen": curve[-1][0], "curve": curve, "cpu_seconds": seconds}


def main() -> None:
    """One seed after the other."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ways", default="", help="some of the ways, separated by semicolons")
    parser.add_argument("--models", help="folder for teachers and students, to use again")
    chosen = parser.parse_args()
    ways = chosen.ways.split(";") if chosen.ways else list(WAYS)
    for seed in map(int, chosen.seeds.split(",")):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(chosen.models or place) / str(seed)
            kept = (
                json.loads(RESULTS.read_text()) if RESULTS.exists() else {"shared": SHARED, "ways": WAYS, "seeds": {}}
            )
            found: dict[str, Any] = kept["seeds"].get(str(seed), {})
            for name, steps in (("teacher", TEACHER), ("student", STUDENT)):
                if not (folder / name / "config.json").is_file():
                    supervised(seed, steps, folder / name)
                found[name] = right(GRPOTrainer(args=GRPOConfig(**SHARED | {"model": str(folder / name)})))
            enough = found["enough"] = round(NEAR * found["teacher"], 4)
            print(f"seed {seed}: teacher {found['teacher']:.3f}, student {found['student']:.3f}", flush=True)
            for way in ways:
                more = {"teacher": str(folder / "teacher")} if way != "reward" else {}
                found[way] = learned(seed, str(folder / "student"), way, more, enough)
                kept["seeds"][str(seed)] = found
                RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
