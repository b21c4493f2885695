"""A frozen policy."""

import pytest
import torch

from grpo.bandit import SoftmaxPolicy
from grpo.reference import FrozenReference


def test_a_copy_stays_and_a_policy_that_is_taken_over_is_frozen():
    policy = SoftmaxPolicy(torch.zeros(3))
    copied = FrozenReference.copy_of(policy)
    assert policy.logits_V.requires_grad and copied.parameters()["logits"] is not policy.logits_V
    taken = FrozenReference(policy)
    assert not policy.logits_V.requires_grad and taken.parameters()["logits"] is policy.logits_V


def test_it_follows_only_a_policy_of_its_own_kind():
    reference = FrozenReference.copy_of(SoftmaxPolicy(torch.zeros(3)))
    reference.sync({"logits": torch.ones(3)}, 0.25)
    assert reference.parameters()["logits"].tolist() == [0.25] * 3
    with pytest.raises(ValueError, match=r"different parameters \(logits, weights\)"):
        reference.sync({"weights": torch.ones(3)}, 1.0)
