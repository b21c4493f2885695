"""The language room learns: from a weak warm start, GRPO teaches a transformer of our own to sort unseen digits."""

import itertools
import random

import pytest

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.tasks import SPECIAL, exact, in_place, tiny_model, tiny_tokenizer

CHARACTERS = "0123456789>"


def rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Three digits to be sorted: rows to train on, and others that are held out."""
    every = ["".join(digits) for digits in itertools.product("0123456789", repeat=3)]
    random.Random(0).shuffle(every)
    made = [{"prompt": f"{x}>", "answer": "".join(sorted(x)), "demonstration": "".join(sorted(x))} for x in every]
    return made[300:], made[:300]


def learned(seed: int, train: list[dict[str, str]], steps: int = 50) -> dict[str, float]:
    """Shares of right answers: drawn ones of the first and last step; the likeliest ones to held-out rows."""
    settings = {"learning_rate": 7e-4, "lr_schedule": "linear", "warmup_steps": 4, "adam_beta2": 0.99}
    settings |= {"groups_per_step": 16, "groups_per_minibatch": 8, "num_iterations": 2, "temperature": 0.7}
    settings |= {"warm_start_steps": 18, "warm_start_batch": 64, "warm_start_learning_rate": 3e-3}
    settings |= {"max_completion_length": 5, "eval_by": "exact", "preflight": False, "reward_workers": 1}
    trainer = GRPOTrainer(
        model=tiny_model(len(SPECIAL) + len(CHARACTERS), seed, heads=8),
        processing_class=tiny_tokenizer(CHARACTERS),
        reward_funcs=[exact, in_place],
        args=GRPOConfig(seed=seed, **settings),
        train_dataset=train,
        eval_dataset=rows()[1],
    )
    try:
        trainer.schedule(steps)
        first, *_, last = [trainer.step() for _ in range(steps)]
        after = trainer.evaluate().metrics()["accuracy"]
    finally:
        trainer.source.close()
    drawn = {"drawn first": first["rewards/exact/mean"], "drawn last": last["rewards/exact/mean"]}
    return drawn | {"before": first["warm_start/accuracy"], "after": after}


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_held_out_answers_become_right(seed):
    found = learned(seed, rows()[0])
    assert found["before"] < 0.7 and found["after"] > found["before"] + 0.15, found
    assert found["drawn last"] > found["drawn first"] + 0.3, found


@pytest.mark.slow
def test_rewards_for_the_answers_of_other_rows_teach_nothing():
    train, _ = rows()
    wrong = [row | {"answer": other["answer"]} for row, other in zip(train, train[1:] + train[:1], strict=True)]
    found = learned(3, wrong, steps=30)
    assert found["after"] < found["before"] + 0.05, found
