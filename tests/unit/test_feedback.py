"""Preferences as rewards."""

from __future__ import annotations

import pytest
import torch

from grpo import PairwiseReward, RankedReward
from tests.toys import trainer


def test_win_rates_by_hand():
    reward = PairwiseReward(lambda state, a, b: float(a > b) if a != b else 0.5, group_size=3)
    got = reward.compute_rewards(["s"] * 6, [1, 2, 3, 5, 5, 0])
    torch.testing.assert_close(got, torch.tensor([0.0, 0.5, 1.0, 0.75, 0.75, 0.0]))


def test_each_pair_is_asked_once():
    asked = []
    PairwiseReward(lambda s, a, b: asked.append((a, b)) or 0.5, 4).compute_rewards([0] * 4, list("abcd"))
    assert len(asked) == len(set(asked)) == 6


def test_ranks_by_hand():
    reward = RankedReward(lambda state, actions: [2, 1, 3, 3], group_size=4)
    got = reward.compute_rewards([0] * 4, list("abcd"))
    torch.testing.assert_close(got, torch.tensor([2 / 3, 1.0, 0.5 / 3, 0.5 / 3]))


def test_bad_feedback_is_named():
    with pytest.raises(ValueError, match=r"must be in \[0, 1\], got 2.0 for actions 0 and 1"):
        PairwiseReward(lambda s, a, b: 2.0, 2).compute_rewards([0, 0], [0, 1])
    with pytest.raises(ValueError, match="returned 1 places for 2 actions"):
        RankedReward(lambda s, a: [1], 2).compute_rewards([0, 0], [0, 1])
    with pytest.raises(ValueError, match="5 actions are not whole groups of 4"):
        RankedReward(lambda s, a: [1], 4).compute_rewards([0] * 5, [0] * 5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learning_from_preferences_alone(seed):
    """Nobody says how good an action is, only which of two is closer to the state's number."""
    closer = PairwiseReward(lambda s, a, b: 0.5 if abs(a - s) == abs(b - s) else float(abs(a - s) < abs(b - s)), 8)
    made = trainer(seed, reward=closer, beta=0.0, num_iterations=2)
    made.train([0, 1, 2, 3] for _ in range(60))
    probability = made.policy.parameters()["logits"].softmax(-1)
    assert (probability[range(4), range(4)] > 0.7).all()
