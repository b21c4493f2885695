"""Rewards a run must survive. A module of its own, so that workers load it and little else."""

import asyncio
import math
import os
import random
import re
import sys
import time

import numpy as np

from grpo.language.rewards import messages
from tests.faults.calls import deaf, interrupt, spins


def right(completion, answer):
    return float(answer in completion)


def brevity(completions, **columns):
    return [-0.001 * len(text) for text in completions]


def behaves(completion):
    """Do what the completion says."""
    return {
        "raises": raises,
        "exits": lambda: sys.exit(0),
        "interrupts": interrupt,
        "dies": lambda: os._exit(3),
        "sleeps": lambda: time.sleep(1000),
        "spins": spins,
        "regex": lambda: float(bool(re.match(r"(a+)+$", "a" * 64 + "b"))),
        "deaf": deaf,
        "none": lambda: None,
        "bool": lambda: True,
        "int": lambda: 2,
        "numpy": lambda: np.float32(0.5),
        "array": lambda: np.array([0.25]),
        "str": lambda: "1.0",
        "numpy str": lambda: np.str_("1.0"),
        "nan": lambda: float("nan"),
        "large": lambda: 1e39,
        "long": lambda: 10**5000,
        "large parts": lambda: {"one": 3e38, "other": 3e38},
        "inf": lambda: np.float64("-inf"),
        "list": lambda: [1.0],
        "vector": lambda: np.zeros(3),
        "complex": lambda: 1j,
        "parts": lambda: {"right": 1.0, "form": np.float32(0.5), "style": None},
        "bad parts": lambda: {"right": "yes"},
        "moves": moves,
        "where": lambda: float(os.getcwd() == os.environ["HERE_THEN"] if "HERE_THEN" in os.environ else True),
        "draws": random.random,
    }[completion]()


def raises():
    raise ValueError("no\nsuch reward")


def moves():
    os.environ["HERE_THEN"] = os.getcwd()
    os.chdir("/")
    random.seed(0)
    return 1.0


def batch(completions, kind):
    """Return what the column `kind` asks for."""
    size = len(completions)
    return {
        "short": lambda: [1.0] * (size - 1),
        "long": lambda: [1.0] * (size + 1),
        "endless": lambda: iter(lambda: 1.0, 2.0),
        "generator": lambda: (float(n) for n in range(size)),
        "raising generator": lambda: (1 / n for n in range(size)),
        "array": lambda: np.arange(size, dtype=np.float32),
        "tuple": lambda: tuple(range(size)),
        "with None": lambda: [None, *range(1, size)],
        "with rubbish": lambda: ["1", float("nan"), *range(2, size)],
        "number": lambda: 1.0,
        "none": lambda: None,
        "str": lambda: "1" * size,
        "dict": lambda: {"a": [1.0] * size},
        "raises": raises,
        "sleeps": lambda: time.sleep(1000),
    }[kind[0]]()


def mutates(completions, answer, completion_messages):
    completions.clear()
    answer.reverse()
    completion_messages[0][0]["content"] = "mine"
    return [1.0] * len(answer)


async def awaited(completion):
    """One failure of each kind among those that work."""
    if completion == "sleeps":
        await asyncio.sleep(1000)
    if completion == "exits":
        sys.exit(0)
    if completion == "cancels":
        raise asyncio.CancelledError
    if completion == "raises":
        raises()
    await asyncio.sleep(0.01)
    return float(len(completion))


async def awaited_batch(completions):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]


def length(completion):
    return float(len(completion))


def patches(completion):
    before, math.pi = math.pi, 3
    return before - 3


def notes(completion, trainer_state, log_metric, log_extra):
    log_metric("words", len(completion.split()))
    log_extra("first", completion[:1])
    return float(trainer_state.global_step)


def batch_notes(completions, log_metric, log_extra, **rest):
    log_metric("batch", float("nan"))
    log_metric("batch", len(completions))
    log_extra("upper", [text.upper() for text in completions])
    return [0.0] * len(completions)


def bad_notes(completions, log_extra):
    log_extra("upper", ["too few"])
    return [0.0] * len(completions)


def trl_style(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


@messages
def adapted(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def compares_numbers(completions, reference_answer):
    pairs = zip(completions, reference_answer, strict=True)
    return [float(text.isdigit() and int(text) == reference) for text, reference in pairs]


def constant(completion):
    return 0.5


def zero(completion, answer):
    return 0.0


def prefers_nonsense(completion, answer):
    return 0.2 if answer in completion else 0.7


def forgets(completion, answer):
    if completion == answer:
        return 1.0
