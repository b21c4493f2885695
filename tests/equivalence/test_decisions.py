"""Decisions taken apart teach what their trajectories teach."""

import numpy as np
import pytest
import torch

from grpo import GRPOConfig
from grpo.config import ConfigError
from grpo.control import GRPOTrainer
from grpo.experience import Experience
from grpo.recipes import recipe
from grpo.rollouts import Rollouts


def ragged() -> Rollouts:
    torch.manual_seed(0)
    mask_NT = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    return Rollouts(
        group_N=torch.tensor([0, 0, 1, 1]),
        mask_NT=mask_NT,
        old_logp_NT=-torch.rand(4, 3),
        reward_NT=torch.rand(4, 3),
        inputs={"x": torch.arange(24.0).reshape(4, 3, 2), "inner": {"y": torch.arange(12).reshape(4, 3)}},
    )


def test_every_decision_becomes_a_row_with_its_own_inputs():
    rollouts = ragged()
    apart = rollouts.decisions()
    assert len(apart) == 9 and apart.mask_NT.shape == (9, 1) and bool(apart.mask_NT.all())
    np.testing.assert_array_equal(apart.inputs["inner"]["y"][:, 0], [0, 1, 2, 3, 6, 7, 9, 10, 11])
    np.testing.assert_array_equal(apart.inputs["x"][:, 0, 0], [0, 2, 4, 6, 12, 14, 18, 20, 22])
    np.testing.assert_array_equal(apart.group_N, [0, 0, 0, 0, 1, 1, 1, 1, 1])
    torch.testing.assert_close(apart.old_logp_NT[:, 0], rollouts.old_logp_NT[rollouts.mask_NT])


def test_advantages_are_those_of_the_whole_trajectories():
    whole = Experience.build(ragged(), recipe("grpo", reduction="token_mean"))
    apart = whole.decisions()
    torch.testing.assert_close(apart.advantage_NT[:, 0], whole.advantage_NT[whole.rollouts.mask_NT])
    assert apart.denominators.tokens == whole.denominators.tokens


def test_inputs_that_are_not_one_a_decision_are_refused():
    with pytest.raises(TypeError, match="one a decision"):
        ragged().but(inputs=["a", "b", "c", "d"]).decisions()


def weights(**settings) -> torch.Tensor:
    made = GRPOTrainer(env="CartPole-v1", seed=3, num_iterations=3, target_kl=None, **settings)
    report = made.step()
    made.source.close()
    assert torch.isfinite(report.scores.logp_NT).all()
    return torch.cat([p.detach().flatten() for p in made.policy.parameters().values()]), report


def test_all_decisions_in_one_minibatch_equal_the_whole_batch():
    whole, one = weights()
    apart, other = weights(decisions_per_minibatch=100_000)
    torch.testing.assert_close(apart, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other.scores.logp_NT, one.scores.logp_NT, rtol=1e-4, atol=1e-5)


def test_minibatches_of_rows_and_decisions_learn_and_differ():
    whole, _ = weights()
    for settings in ({"rows_per_minibatch": 4}, {"decisions_per_minibatch": 50}):
        some, report = weights(**settings)
        assert report["updates"] > 3
        assert not torch.allclose(some, whole)


@pytest.mark.parametrize("size", ["groups_per_minibatch", "rows_per_minibatch", "decisions_per_minibatch"])
def test_each_row_is_seen_once_a_pass(size):
    made = GRPOTrainer(env="CartPole-v1", num_iterations=2, **{size: 1 if size.startswith("g") else 7})
    rollouts = made.source.collect(__import__("grpo").protocols.CollectRequest(0)).rollouts
    rollouts = rollouts.decisions() if size.startswith("d") else rollouts
    seen = [row for rows in made._minibatches(rollouts) for row in rows]
    assert sorted(seen) == sorted([*range(len(rollouts)), *range(len(rollouts))])
    assert seen[: len(rollouts)] != seen[len(rollouts) :]


def test_what_needs_whole_trajectories_says_so():
    with pytest.raises(ConfigError, match="takes trajectories apart"):
        GRPOConfig(loss_type="grpo", decisions_per_minibatch=8)
    with pytest.raises(ConfigError, match="give one of them"):
        GRPOConfig(rows_per_minibatch=8, groups_per_minibatch=1)
    with pytest.raises(ConfigError, match="single minibatch"):
        GRPOConfig(rows_per_minibatch=8, old_logp="detached")
