"""Regret of every recipe on the bandit whose payoffs change while it is played.

    python bench/recipes.py                      # the bandit, on the CPU
    python bench/recipes.py --gsm8k --seeds 0,1  # minutes to the same accuracy for eight recipes; needs a GPU

The bandit (`grpo train bandit`) with its own settings and another recipe: the payoff that was missed, summed over 100
steps, mean and standard error of the seeds. Rows that need a teacher or conversations have none. Writes
bench/results/recipes.json; docs/make_pages.py makes the table of docs/recipes.md from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from grpo import bandit
from grpo.core.advantages import decision_energy
from grpo.protocols import Collected, CollectRequest
from grpo.recipes import RECIPES

RESULTS = Path(__file__).parent / "results" / "recipes.json"
STEPS = 100
EIGHT = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++_baseline", "scalerl")
GSM8K = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "max_completion_length": 300, "beta": 0.0}
ACCURACY = 0.45


class TellingSource(bandit.BanditSource):
    """The bandit's, with what some recipes ask a room for: a greedy pull's payoff, the energy of each pull."""

    def collect(self, request: CollectRequest) -> Collected:
        """The same pulls."""
        made = super().collect(request)
        logp_V = self._policy.logits_V.detach().log_softmax(0)
        payoff_V = torch.tensor(self._config.payoffs[self._config.phase(request.step)]).to(logp_V)
        old_NT = made.rollouts.old_logp_NT
        told = made.rollouts.but(
            baseline_NT=torch.full_like(old_NT, float(payoff_V[logp_V.argmax()])),
            energy_NT=decision_energy(old_NT, logp_V.exp().square().sum().expand_as(old_NT)),
        )
        return Collected(told, made.starts)


def regret(name: str, seed: int) -> float:
    """Of one run."""
    config = bandit.BanditConfig(loss_type=name, seed=seed)
    trainer = bandit.make_trainer(config)
    if RECIPES[name].baseline in ("greedy", "optimal_token"):
        trainer.source = TellingSource(trainer.policy, config)
    for _ in range(STEPS):
        report = trainer.step()
    return float(report["regret_total"])


def on_the_bandit(seeds: list[int]) -> dict[str, Any]:
    """Every row that can play it."""
    found: dict[str, Any] = {}
    for name, row in RECIPES.items():
        if (row.teacher_coef and not row.outcome_coef) or row.turn_coef:
            continue
        runs = [regret(name, seed) for seed in seeds]
        error = statistics.stdev(runs) / len(runs) ** 0.5
        found[name] = {"mean": round(statistics.mean(runs), 3), "error": round(error, 3)}
        print(name, found[name], flush=True)
    return {"steps": STEPS, "seeds": len(seeds), "regret": found}


def on_gsm8k(seeds: list[int]) -> dict[str, Any]:
    """Minutes of training until so many held-out questions are answered right; None: not within 200 steps."""
    from grpo.language import GRPOConfig, GRPOTrainer

    found: dict[str, Any] = {}
    for name in EIGHT:
        for seed in seeds:
            trainer = GRPOTrainer(args=GRPOConfig(dataset="gsm8k", loss_type=name, seed=seed, **GSM8K))
            spent, curve = 0.0, []
            for step in range(1, 201):
                began = time.monotonic()
                trainer.step()
                spent += time.monotonic() - began
                if step % 10 == 0:
                    right = float(trainer.evaluate(limit=500).metrics()["accuracy"] or 0.0)
                    curve.append((step, round(spent / 60, 3), right))
                    print(name, seed, curve[-1], flush=True)
                    if right >= ACCURACY:
                        break
            reached = curve[-1][1] if curve[-1][2] >= ACCURACY else None
            found.setdefault(name, {})[str(seed)] = {"minutes": reached, "curve": curve}
    gpu = torch.cuda.get_device_name()
    return {"model": GSM8K["model"], "accuracy": ACCURACY, "gpu": gpu, "recipes": found}


def main() -> None:
    """What is asked for, beside what is known."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, range(10))))
    parser.add_argument("--gsm8k", action="store_true")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.gsm8k:
        known["gsm8k"] = on_gsm8k(seeds)
    else:
        known["bandit"] = on_the_bandit(seeds)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
