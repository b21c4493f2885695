"""Reward functions that tell what they were called with; loaded by worker processes, so nothing heavy here."""

import json
import os
import random
import time
from pathlib import Path


def leaves_a_mark(completion, folder):
    (Path(folder) / "called").touch()
    return float(len(completion))


def draws(completion):
    return random.random()


def draws_for_all(completions):
    return [random.random() for _ in completions]


def notes(completion, log_metric, log_extra):
    log_metric("chars", len(completion))
    log_extra("first", completion[:1])
    return {"length": float(len(completion)), "one": 1.0}


def remembers_its_batches(completions, name, folder):
    with (Path(folder[0]) / f"{time.monotonic_ns()}-{os.getpid()}.json").open("w") as file:
        json.dump([*zip(name, completions, strict=True)], file)
    return [float(len(text)) for text in completions]


async def awaits_its_batch(completions, name, folder):
    return remembers_its_batches(completions, name, folder)


def refuses_sevens(completion):
    if completion.startswith("7"):
        raise ValueError("a seven")
    return 1.0


def refuses_batches_of_seven(completions, name):
    if "7" in name:
        raise ValueError("a seven")
    return [1.0] * len(completions)


def never_returns(completion, folder):
    (Path(folder) / f"pid-{os.getpid()}").touch()
    while True:
        time.sleep(1000)


def levels(completion, level):
    return 0.0 if level is None else float(level)


def hangs_at_zero(completion, folder):
    if completion.startswith("0"):
        never_returns(completion, folder)
    (Path(folder) / completion[0]).touch()
    return 0.0
