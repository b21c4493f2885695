"""Regret of every recipe on the bandit whose payoffs change while it is played; minutes of eight with a real model.

    python bench/recipes.py                                    # the bandit, on the CPU
    python bench/recipes.py --sums --model MODEL --seeds 0,1   # SmolLM2-135M-Instruct: a folder or a .gguf; a GPU
    python bench/recipes.py --sums --model MODEL --seeds 1 --recipes gspo,cispo

The bandit (`grpo train bandit`) with its own settings and another recipe: the payoff that was missed, summed over 100
steps, mean and standard error of the seeds. Rows that need a teacher, conversations or answers before the first step
have none. The sums (`grpo train smollm-arithmetic`) with 16 prompts a step in two minibatches and another recipe:
wall time of the steps, looks at the 300 held-out sums not counted, until so many are right, one run after the other
(two processes, one a seed, may share the GPU: --results then names a file each). A run's first step, in which kernels
are compiled and graphs captured, has its time beside and not in it. Writes bench/results/recipes.json after every
run; runs that are there with the same settings stay. docs/make_pages.py makes the tables of docs/recipes.md from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
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
SUMS = {"groups_per_minibatch": 8}
ACCURACY, MOST, EVERY = 0.7, 60, 3


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
        if (row.teacher_coef and not row.outcome_coef) or row.turn_coef or row.baseline == "optimal_value":
            continue
        runs = [regret(name, seed) for seed in seeds]
        error = statistics.stdev(runs) / len(runs) ** 0.5
        found[name] = {"mean": round(statistics.mean(runs), 3), "error": round(error, 3)}
        print(name, found[name], flush=True)
    return {"steps": STEPS, "seeds": len(seeds), "regret": found}


def on_sums(name: str, model: str, seed: int) -> dict[str, Any]:
    """Minutes of training until so many held-out sums are answered right; None: not within the steps there are."""
    import smollm

    trainer = smollm.trainer_of(model, seed, MOST, SUMS | {"recipe": name})
    spent, first, curve = 0.0, 0.0, [(0, 0.0, round(float(smollm.right(trainer).mean()), 4))]
    while trainer.steps_done < MOST and curve[-1][2] < ACCURACY:
        began = time.perf_counter()
        trainer.step().forget()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        first, spent = (took, spent) if trainer.steps_done == 1 else (first, spent + took)
        if trainer.steps_done % EVERY == 0:
            right = round(float(smollm.right(trainer).mean()), 4)
            curve.append((trainer.steps_done, round(spent / 60, 4), right))
    print(name, seed, curve, flush=True)
    trainer.source.close()
    reached = curve[-1][2] >= ACCURACY
    return {"minutes": curve[-1][1] if reached else None, "first_step_s": round(first, 2), "curve": curve}


def all_on_sums(known: dict[str, Any], given: argparse.Namespace, seeds: list[int]) -> None:
    """Eight recipes, one after the other; the file is written after each."""
    import cells
    import gsm8k

    model = gsm8k.as_folder(given.model, Path(tempfile.gettempdir()) / "anygrpo-smollm")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = {"accuracy": ACCURACY, "most": MOST, "flags": SUMS, "model": Path(given.model).name}
    before = known.get("sums", {})
    if any(before.get(name) != value for name, value in about.items()):
        before = {"processes": 1, "recipes": {}}
    about |= {"machine": cells.machine(device), "versions": cells.versions()}
    found = known["sums"] = before | about
    for seed in seeds:
        for name in given.recipes.split(","):
            found["recipes"].setdefault(name, {})[str(seed)] = on_sums(name, model, seed)
            cells.write(given.results, known)


def main() -> None:
    """What is asked for, beside what is known."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, range(10))))
    parser.add_argument("--sums", action="store_true")
    parser.add_argument("--model", help="for --sums")
    parser.add_argument("--recipes", default=",".join(EIGHT), help="of --sums")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    known = json.loads(given.results.read_text()) if given.results.exists() else {}
    if given.sums:
        all_on_sums(known, given, seeds)
    else:
        known["bandit"] = on_the_bandit(seeds)
        given.results.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
