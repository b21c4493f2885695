"""SmolLM2-135M-Instruct on two-digit sums, as `grpo train smollm-arithmetic` has it, with other flags: for a GPU.

    python bench/smollm.py --model MODEL --seeds 0,1,2     # what a teacher teaches, before and after
    python bench/smollm.py --model MODEL --teacher TEACHER --results FILE     # another model is the teacher

MODEL is a folder, a hub id or a .gguf file, which is first written as a folder of plain weights. A seed trains a
teacher (the preset's GRPO with LoRA; its adapter merged), and then the untouched model by `opd` (that teacher judges
its answers, no reward), by `opsd` (its teacher is the model itself as it is in that step, shown the answer), and by
`opsd` with the untouched model as that teacher (teacher=MODEL). With --teacher there is one way, `opd` by that model,
which may have another tokenizer; how often it is right itself is told, too. The 300 held-out sums are answered greedily
before and after; gains are paired by sum, with 95 % intervals from 10,000 resamples. Writes
bench/results/teacher_smollm.json after every run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import cells
import gsm8k
import numpy as np

PRESET = "smollm-arithmetic"
RESULTS = Path(__file__).resolve().parent / "results" / "teacher_smollm.json"
FLAGS = {"groups_per_step": 16, "preflight": False, "eval_on_start": False, "reward_workers": 1}
"""Beside the preset's own settings."""
SHOWN = "This is right: {prompt} = {answer}"
WAYS: dict[str, dict[str, Any]] = {
    "opd": {"recipe": "opd", "teacher": "TRAINED"},
    "opsd": {"recipe": "opsd", "teacher_template": SHOWN},
    "opsd, held": {"recipe": "opsd", "teacher_template": SHOWN, "teacher": "UNTOUCHED"},
}


def trainer_of(model: str, seed: int, steps: int, flags: dict[str, Any]) -> Any:
    """What the command line would make of the preset and these flags."""
    from grpo.app.builders import TASKS, configs
    from grpo.app.settings import flag_layer, preset_layer, resolve

    given = FLAGS | flags | {"model": model, "seed": seed, "run.steps": steps}
    words = [(name, str(value)) for name, value in given.items()]
    config = resolve([preset_layer(PRESET), flag_layer(words)], configs()).config
    trainer = TASKS["language"].trainer(config)
    trainer.schedule(steps)
    return trainer


def right(trainer: Any) -> np.ndarray:
    """Of every held-out sum whether it is answered right."""
    found: np.ndarray = trainer.evaluate(limit=trainer.config.eval_prompts).right_PS[:, 0]
    return found


def learn(model: str, seed: int, steps: int, flags: dict[str, Any], save: Path | None = None) -> dict[str, Any]:
    """Look, train, look again; seconds are of the steps alone."""
    trainer = trainer_of(model, seed, steps, flags)
    before_P = right(trainer)
    spent, curve = 0.0, [(0, 0, round(float(before_P.mean()), 4))]
    for step in range(1, steps + 1):
        began = time.perf_counter()
        report = trainer.step()
        spent += time.perf_counter() - began
        kl = report.get("teacher_kl")
        report.forget()
        if step % 5 == 0:
            after_P = right(trainer)
            curve.append((step, trainer.source.num_tokens, round(float(after_P.mean()), 4)))
            told = "" if kl is None else f" teacher_kl {kl:.4f}"
            print(f"seed {seed} {flags.get('recipe', 'grpo')} {curve[-1]} {spent:.1f} s{told}", flush=True)
    if save is not None:
        trainer.save_model(save, merge=True)
    trainer.source.close()
    return {"seconds": round(spent, 2), "curve": curve, **gsm8k.paired(before_P, after_P)}


def by_another(given: argparse.Namespace, model: str, flags: dict[str, Any], found: dict[str, Any]) -> None:
    """What another model teaches by `opd` alone, without a reward; the file is written after every seed."""
    teacher = gsm8k.as_folder(given.teacher, given.place.with_name(f"{given.place.name}-teacher"))
    itself = trainer_of(teacher, 0, 1, flags)
    found |= {"teacher": Path(given.teacher).name, "teacher_right": float(right(itself).mean())}
    itself.source.close()
    del itself
    print(f"{found['teacher']}: {found['teacher_right']:.1%} right", flush=True)
    for seed in map(int, given.seeds.split(",")):
        taught = learn(model, seed, given.steps, flags | {"recipe": "opd", "teacher": teacher})
        found["seeds"][str(seed)] = {"opd": taught}
        cells.write(given.results, found)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--teacher", help="a folder, a hub id or a .gguf file: the one that teaches")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "anygrpo-smollm")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of every run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    model = gsm8k.as_folder(given.model, given.place)
    flags = dict(word.split("=", 1) for word in given.set)
    import torch

    found: dict[str, Any] = {"model": Path(given.model).name, "flags": FLAGS | flags, "steps": given.steps}
    found |= {"versions": cells.versions(), "machine": cells.machine("cuda" if torch.cuda.is_available() else "cpu")}
    found |= {"template": SHOWN, "seeds": {}}
    if given.teacher:
        by_another(given, model, flags, found)
        return
    for seed in map(int, given.seeds.split(",")):
        with tempfile.TemporaryDirectory() as place:
            runs = found["seeds"][str(seed)] = {"teacher": learn(model, seed, given.steps, flags, Path(place))}
            cells.write(given.results, found)
            for way, more in WAYS.items():
                who = {"TRAINED": place, "UNTOUCHED": model}
                more = {name: who.get(value, value) for name, value in more.items()}
                runs[way] = learn(model, seed, given.steps, flags | more)
                cells.write(given.results, found)


if __name__ == "__main__":
    main()
