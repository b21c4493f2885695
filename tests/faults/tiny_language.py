"""A language run small enough to be killed: a model of a few thousand numbers, a reward of this process's own."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.language import GRPOConfig, GRPOTrainer
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{i} and {i + 1} make", "answer": str(2 * i + 1)} for i in range(7)]


def save_model(path: Path) -> None:
    """What the runs start from."""
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def train(path: Path, steps: int, at: Callable[[str], None], model: str, **settings: Any) -> int:
    """Start a run in `path`, or go on with the one that is there; `at` is told inside each step and after it."""
    warnings.simplefilter("ignore")  # a function that is made here runs here

    def digits(completions: list[str], **_: Any) -> list[float]:
        at("reward")
        return [float(len(re.findall(r"\d", completion))) for completion in completions]

    config = GRPOConfig(
        output_dir=str(path), max_steps=steps, save_steps=1, num_generations=4, prompts_per_step=2, beta=0.04,
        max_completion_length=6, preflight=False, learning_rate=1e-3, seed=3, **settings,
    )  # fmt: skip
    trainer = GRPOTrainer(model=model, reward_funcs=digits, args=config, train_dataset=ROWS)
    there = (path / "run.json").exists()
    trainer.train(progress=None, callbacks=[lambda report: at("told")], resume_from_checkpoint=there or None)
    return 0
