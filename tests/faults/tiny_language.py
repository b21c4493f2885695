"""A language run small enough to be killed: a model of a few thousand numbers, a reward of this process's own."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.engines.vllm.server import VLLMServer
from grpo.run import checkpoint
from grpo.trainer import StepReport
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{i} and {i + 1} make", "answer": str(2 * i + 1)} for i in range(7)]


def save_model(path: Path) -> None:
    """What the runs start from."""
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def train(path: Path, steps: int, at: Callable[[str], None], model: str, **settings: Any) -> int:
    """Start a run in `path`, or go on with the one that is there; `at` is told inside each step and after it.

    Which rows each step learned from, and how many tokens those were, is written beside it.
    """
    warnings.simplefilter("ignore")  # a function that is made here runs here
    _watch(at)

    def digits(completions: list[str], **_: Any) -> list[float]:
        at("reward")
        return [float(len(re.findall(r"\d", completion))) for completion in completions]

    config = GRPOConfig(
        output_dir=str(path), max_steps=steps, save_steps=1, num_generations=4, prompts_per_step=2, beta=0.04,
        max_completion_length=6, preflight=False, learning_rate=1e-3, seed=3, **settings,
    )  # fmt: skip
    trainer = GRPOTrainer(model=model, reward_funcs=digits, args=config, train_dataset=ROWS)
    there, update = (path / "run.json").exists(), trainer._update

    def told(report: StepReport) -> None:
        samples = report.experience.rollouts.inputs
        tokens = sum(len(sample.prompt.ids) + sample.length for sample in samples)
        with path.with_suffix(".learned").open("a") as file:
            print(json.dumps([report.step, [sample.prompt.row for sample in samples], tokens]), file=file, flush=True)
        at("told")

    def updated(*given: Any) -> Any:
        at("update")
        return update(*given)

    trainer._update = updated
    trainer.train(progress=None, callbacks=[told], resume_from_checkpoint=there or None)
    return 0


def _watch(at: Callable[[str], None]) -> None:
    """Tell of every point of a save, and of every question to a server before it is asked and once it is answered.

    For a process that ends with its run: nothing is put back.
    """
    publish, once = checkpoint.publish, VLLMServer._once

    def published(*given: Any, **named: Any) -> Any:
        return publish(*given, **named | {"at": at})

    def asked(server: VLLMServer, method: str, path: str, *given: Any, **named: Any) -> Any:
        point = path.partition("?")[0]
        at(f"before {point}")
        answer = once(server, method, path, *given, **named)
        at(f"after {point}")
        return answer

    checkpoint.publish, VLLMServer._once = published, asked
