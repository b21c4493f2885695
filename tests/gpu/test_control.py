"""The control room on a CUDA device: what was recorded is what is scored, and a run goes on exactly where it was."""

import numpy as np
import pytest

from grpo.control import GRPOTrainer
from grpo.protocols import CollectRequest
from tests.gpu.ways import same_way, weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "settings",
    [
        {"env": "CartPole-v1"},
        {"env": "CartPole-v1", "memory": 16},
        {"env": "Pendulum-v1", "action_head": "squashed"},
        {"env": "CartPole-v1", "beta": 0.01},
        {"env": "CartPole-v1", "advantage": "critic"},
        {"env": "tests.unit.control.catch:Catch", "vector": "serial"},
    ],
)
def test_recorded_log_probs_are_scored_again_on_the_device(settings):
    made = GRPOTrainer(device="cuda", group_size=4, groups_per_step=2, **settings)
    rollouts = made.source.collect(CollectRequest(0)).rollouts
    assert rollouts.old_logp_NT.is_cuda and rollouts.inputs["action"].is_cuda
    scored = made.policy.score(rollouts).logp_NT.detach()
    mask_NT = rollouts.mask_NT
    np.testing.assert_allclose(scored[mask_NT].cpu(), rollouts.old_logp_NT[mask_NT].cpu(), atol=1e-3)
    report = made.step()
    assert report["updates"] > 0 and all(p.is_cuda for p in made.policy.parameters().values())


def test_a_policy_learns_on_the_device():
    made = GRPOTrainer(env="CartPole-v1", device="cuda", gamma=0.98)
    reports = made.train(steps=8, progress=None)
    assert reports[-1]["return"] > 2 * reports[0]["return"]
    assert made.evaluate(5).return_E.mean() > 60


def test_a_state_is_taken_up_again():
    one, two = (GRPOTrainer(env="CartPole-v1", device="cuda", seed=3) for _ in range(2))
    one.step()
    two.load_state(one.state())
    before = weights(one.policy.parameters().values())
    one.step()
    two.step()
    same_way(before, *(weights(made.policy.parameters().values()) for made in (one, two)), most=0.05)
