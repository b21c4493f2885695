"""torch's optimizers without the import of torch's own compiler: the same numbers, states that go either way."""

import subprocess
import sys
from copy import deepcopy

import pytest
import torch

from grpo import optimizers

KINDS = [("Adam", {"fused": True}), ("Adam", {}), ("AdamW", {}), ("SGD", {"momentum": 0.9})]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def learn(network, optimizer, steps=3):
    torch.manual_seed(1)
    for x in torch.randn(steps, 8, 5):
        optimizer.zero_grad()
        network(x).square().sum().backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_numbers_are_those_of_torch_and_states_go_either_way(name, settings):
    how = {"lr": 0.1, "weight_decay": 0.01, **settings}
    ours, theirs = model(), model()
    mine = getattr(optimizers, name)(ours.parameters(), **how)
    its = getattr(torch.optim, name)(theirs.parameters(), **how)
    before = torch.nn.utils.parameters_to_vector(ours.parameters()).detach().clone()
    assert torch.equal(learn(ours, mine), learn(theirs, its))
    assert not torch.equal(learn(ours, mine), before)
    learn(theirs, its)
    mine.load_state_dict(deepcopy(its.state_dict()))
    its.load_state_dict(deepcopy(mine.state_dict()))
    assert torch.equal(learn(ours, mine), learn(theirs, its))
    assert type(mine).__name__ == type(its).__name__  # what a checkpoint calls it


def test_hooks_of_a_step_are_called_and_no_step_has_a_gradient():
    network, called = model(), []
    optimizer = optimizers.Adam(network.parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append(torch.is_grad_enabled()))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    learn(network, optimizer, steps=1)
    assert called == [True, "after"]
    assert all(p.grad_fn is None for p in network.parameters())


PROGRAM = """
import sys
from copy import deepcopy
import grpo.bandit
from grpo.control import GRPOTrainer
GRPOTrainer(env="CartPole-v1", group_size=2, groups_per_step=1, max_episode_steps=5).train(steps=1, progress=None)
grpo.bandit.make_trainer(grpo.bandit.BanditConfig()).step()
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_a_run_starts_without_the_compiler_of_torch():
    """It would take as long as everything else until the first step."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
