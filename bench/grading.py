"""What hostile answers cost the maths grader: CPU seconds on one core, processes killed. Writes results/grading.json.

python bench/grading.py
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from grpo.language.rewards.maths import Correctness
from grpo.workers import Pool
from tests.faults.hostile_answers import everything


def grade(completion):
    """CPU seconds of one answer."""
    began = time.process_time()
    Correctness()(completion, "5")
    return time.process_time() - began


def main():
    """Grade them all, one after another."""
    completions = everything()
    with Pool(grade, workers=1, timeout=30) as pool:
        outcomes = pool.map(completions)
    seconds = [outcome.value for outcome in outcomes if outcome.ok]
    found = {
        "answers": len(completions),
        "killed": len(completions) - len(seconds),
        "cpu_seconds": round(sum(seconds), 1),
        "longest_cpu_seconds": round(max(seconds), 2),
    }
    print(found)
    path = Path(__file__).parent / "results" / "grading.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
