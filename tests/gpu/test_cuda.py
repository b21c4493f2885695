"""On a CUDA device: the same numbers as on the CPU, and no tensor left behind on the wrong one. Run with -m gpu."""

from __future__ import annotations

import pytest
import torch

from grpo.experience import Experience, with_gates
from grpo.objective import objective
from grpo.recipes import RECIPES
from grpo.rollouts import Scores
from tests.batches import loaded, numbers, rollouts
from tests.toys import Softmax, trainer

pytestmark = pytest.mark.gpu


def cuda(x):
    return torch.as_tensor(x).cuda()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_gives_the_cpu_s_loss_and_gradient(name):
    variant, x = loaded(name), numbers(3)
    found = []
    for make in (torch.as_tensor, cuda):
        batch = Experience.build(rollouts(x, make, variant), variant, make(x["ref"]))
        scores = Scores(make(x["logp"]).clone().requires_grad_(), make(x["entropy"]))
        loss = objective(scores, with_gates(batch, scores, variant, make(x["priority"])), variant).loss
        found.append((loss.detach().cpu(), torch.autograd.grad(loss, scores.logp_NT)[0].cpu()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-10, atol=1e-12)


def test_the_objective_waits_for_nothing():
    """No synchronisation between the policy's forward pass and its backward pass."""
    variant, x = loaded("grpo"), numbers(3)
    batch = Experience.build(rollouts(x, cuda), variant, cuda(x["ref"]))
    scores = Scores(cuda(x["logp"]).requires_grad_(), cuda(x["entropy"]))
    batch = with_gates(batch, scores, variant)
    torch.cuda.set_sync_debug_mode("error")
    try:
        objective(scores, batch, variant).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class CudaSoftmax(Softmax):
    def get_log_probabilities(self, states, actions):
        index = [torch.tensor(values, device=self.logits.device) for values in (states, actions)]
        return self.logits.log_softmax(-1)[index[0], index[1]]


def test_a_policy_learns_on_the_device():
    made = trainer(0, policy=CudaSoftmax(), device="cuda", num_iterations=2, groups_per_minibatch=2, beta=0.01)
    assert made.policy.parameters()["logits"].is_cuda
    reports = made.train([0, 1, 2, 3] for _ in range(50))
    assert sum(report["reward"] for report in reports[-5:]) / 5 > 0.9
    again = trainer(1, policy=CudaSoftmax(), device="cuda", num_iterations=2, groups_per_minibatch=2, beta=0.01)
    again.load_state(made.state())
    torch.testing.assert_close(again.policy.parameters()["logits"], made.policy.parameters()["logits"])


def test_the_bandit_room_on_the_device():
    from grpo.bandit import BanditConfig, make_trainer

    reports = make_trainer(BanditConfig(device="cuda")).train(steps=100)
    assert sum(report["regret"] for report in reports) < 3.5
