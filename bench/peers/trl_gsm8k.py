"""TRL with transformers' `generate` on GSM8K: how many steps it makes in so many seconds."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from cells import job, measure, peak
from vllm_rollout import OFFLINE

ROWS_AT_A_TIME = 16
"""Of a forward and backward pass: more do not fit with logits of 152,000 words."""
SYSTEM = "Reason step by step inside <think> and </think>, then give the final number inside <answer> and </answer>."


def correct(completions: Any, answer: Any, **_: Any) -> list[float]:
    """1 where the answer is the last thing said."""
    said = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [float(a.split("####")[-1].strip() in text[-40:]) for text, a in zip(said, answer, strict=True)]


def steps(asked: dict[str, Any]) -> dict[str, Any]:
    """The moments at which steps ended, from the moment training began."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    flags = asked["flags"]
    rows = [json.loads(line) for line in Path(asked["data"]).read_text(encoding="utf-8").splitlines()]
    told = [
        {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}],
         "answer": row["answer"]}
        for row in rows
    ]  # fmt: skip
    ended: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ended.append(time.perf_counter())
            next_end = 2 * ended[-1] - ended[-2]
            control.should_training_stop = next_end - ended[0] > asked["seconds"]

    count = int(flags["groups_per_step"]) * int(flags["group_size"])
    with tempfile.TemporaryDirectory() as place:
        trainer = GRPOTrainer(
            model=asked["folder"],
            processing_class=AutoTokenizer.from_pretrained(asked["folder"]),
            args=GRPOConfig(
                output_dir=place,
                bf16=True,
                model_init_kwargs={"dtype": "bfloat16"},
                gradient_checkpointing=False,
                per_device_train_batch_size=ROWS_AT_A_TIME,
                gradient_accumulation_steps=count // ROWS_AT_A_TIME,
                num_generations=int(flags["group_size"]),
                max_completion_length=int(flags["max_completion_length"]),
                learning_rate=float(flags["learning_rate"]),
                temperature=float(flags["temperature"]),
                beta=0.0,
                max_steps=10_000,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(told),
            reward_funcs=correct,
            callbacks=[Clock()],
        )
        trainer.train()
    moments = [moment - ended[0] for moment in ended[1:]]
    within = [moment for moment in moments if moment <= asked["seconds"]]
    return {"moments": moments, "steps": len(within), "within": asked["seconds"], "peak": peak("cuda")}


def main() -> None:
    asked = job()
    for name, value in {**OFFLINE, "HF_DATASETS_OFFLINE": "1"}.items():
        os.environ.setdefault(name, value)
    measure(asked, lambda cell: steps(asked))


if __name__ == "__main__":
    main()
