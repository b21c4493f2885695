"""A convolutional policy learns a game from its pictures."""

import pytest

from grpo.app.look import FRESH
from grpo.control import GRPOTrainer
from tests.unit.control.catch import Catch


@pytest.mark.slow
def test_falling_balls_are_caught():
    settings = {"vector": "serial", "hidden": (64,), "activation": "relu", "gamma": 0.95, "groups_per_step": 8}
    settings |= {"learning_rate": 1e-3, "num_iterations": 8, "decisions_per_minibatch": 256, "target_kl": 0.06}
    made = GRPOTrainer(env=Catch, seed=0, **settings)
    before = made.evaluate(50).return_E.mean()
    made.train(steps=24, progress=None)
    assert before < 0.2 and made.evaluate(50, seed=FRESH).return_E.mean() > 0.5
