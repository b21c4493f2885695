"""TRL: a whole training step, with transformers' `generate` or with vLLM in the same process.

It runs under TRL's own interpreter, or with its folder on the path, and needs nothing of ours.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from itertools import pairwise
from typing import Any

from cells import job, measure, peak
from reward import variety
from vllm_rollout import OFFLINE

ROWS_AT_A_TIME = 64
"""Of a forward and backward pass on a GPU; about what ours takes at once."""


def step(asked: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each training step: from the end of one to the end of the next."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    settings, cuda, with_vllm = cell["settings"], asked["device"] == "cuda", asked["peer"] == "trl_vllm"
    rows = len(cell["texts"]) * settings["group"]
    at_once = min(rows, ROWS_AT_A_TIME)
    further: dict[str, Any] = {}
    if with_vllm:
        further = {"vllm_mode": "colocate", "vllm_max_model_length": 1024}
    ended: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            ended.append(time.perf_counter())
            if len(ended) == 1 and cuda:
                torch.cuda.reset_peak_memory_stats()

    with tempfile.TemporaryDirectory() as place:
        args = GRPOConfig(
            output_dir=place,
            use_cpu=not cuda,
            bf16=asked["dtype"] == "bfloat16",
            model_init_kwargs={"dtype": asked["dtype"]},
            gradient_checkpointing=False,
            use_vllm=with_vllm,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=rows // at_once,
            num_generations=settings["group"],
            max_completion_length=settings["tokens"],
            max_steps=1 + settings["repeats"],
            loss_type="grpo",
            beta=0.0,
            learning_rate=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **further,
        )
        tokenizer = AutoTokenizer.from_pretrained(asked["folder"])
        trainer = GRPOTrainer(
            model=asked["folder"],
            processing_class=tokenizer,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": text} for text in cell["texts"]]),
            reward_funcs=variety,
            callbacks=[Clock()],
        )
        start = time.perf_counter()
        trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "completions/mean_length" in log]
    return {
        "seconds": [after - before for before, after in pairwise(ended)],
        "first_seconds": ended[0] - start,
        "mean_length": lengths[1:],
        "prompt_tokens": [len(tokenizer.encode(text, add_special_tokens=False)) for text in cell["texts"]],
        "peak": peak(asked["device"]),
        "rows_at_a_time": at_once,
        "weights_in": str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
    }


def main() -> None:
    asked = job()
    settings = {**OFFLINE, "HF_DATASETS_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    for name, wanted in (("trl", True), ("vllm", asked["peer"] == "trl_vllm")):
        if wanted and importlib.util.find_spec(name) is None:
            version = {"trl": "1.16.0", "vllm": "0.24.0"}[name]
            raise SystemExit(f"{name} is not installed: pip install {name}=={version}, or give --{name}-path")
    measure(asked, lambda cell: step(asked, cell))


if __name__ == "__main__":
    main()
