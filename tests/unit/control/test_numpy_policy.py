"""A NumPy policy gives the module's numbers, follows its weights, and refuses what it cannot follow."""

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import nn

from grpo.control.networks import make_network
from grpo.control.numpy_policy import numpy_policy


def loud(network):
    """The same with outputs that are large enough to compare."""
    nn.init.orthogonal_(network.layers[-1].weight, generator=torch.Generator().manual_seed(0))
    return network


def agree(found, module, count=16, size=4):
    x = (3 * np.random.default_rng(count).standard_normal((count, size))).astype(np.float32)
    with torch.no_grad():
        np.testing.assert_allclose(found(x), module(torch.from_numpy(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
def test_our_networks_are_followed_for_any_number_of_rows(activation):
    network = loud(make_network(gs.Box(-1, 1, (4,)), 3, activation=activation))
    found = numpy_policy(network)
    for count in (16, 3, 0, 40, 1):
        agree(found, network, count)
    assert found(np.zeros((2, 4))).dtype == np.float32  # float64 observations too


def test_an_answer_is_not_overwritten_by_the_next():
    found = numpy_policy(loud(make_network(gs.Box(-1, 1, (4,)), 2)))
    first = found(np.ones((2, 4), np.float32))
    kept = first.copy()
    found(-np.ones((2, 4), np.float32))
    assert (first == kept).all()


def test_what_an_optimizer_or_a_checkpoint_changes_is_seen_at_once():
    network = loud(make_network(gs.Box(-1, 1, (4,)), 2))
    found = numpy_policy(network)
    before = found(np.ones((1, 4), np.float32))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    network(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    agree(found, network)
    assert np.abs(found(np.ones((1, 4), np.float32)) - before).max() > 0.1
    network.load_state_dict(loud(make_network(gs.Box(-1, 1, (4,)), 2, seed=5)).state_dict())
    agree(found, network)


def test_refresh_follows_parameters_that_were_replaced():
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))
    found = numpy_policy(module)
    module[0].weight = nn.Parameter(torch.ones(8, 4))
    found.refresh()
    agree(found, module)


class Wrapped(nn.Module):
    def __init__(self, change=lambda x: x, **held):
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Identity(), nn.Linear(8, 2))
        self.change = change
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.change(self.net(x.flatten(1)))


def test_a_users_chain_is_followed_also_inside_a_module_of_theirs():
    for module in (Wrapped(), Wrapped().net, nn.Linear(4, 2)):
        agree(numpy_policy(module), module)
    module = Wrapped()
    x = np.random.default_rng(0).standard_normal((5, 2, 2)).astype(np.float32)
    with torch.no_grad():
        np.testing.assert_allclose(numpy_policy(module)(x), module(torch.from_numpy(x)), atol=1e-5)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return self.net(self.net(x))


class Noisy(Wrapped):
    def forward(self, x):
        return nn.functional.dropout(self.net(x), 0.5, self.training)


class Extra(Wrapped):
    """Agrees today; not once `scale` has learnt."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.net(x) * self.scale


@pytest.mark.parametrize(
    "module",
    [
        Wrapped(change=lambda x: 2 * x),
        Wrapped(change=lambda x: x.clamp(-5, 5)),
        Twice(),
        Noisy(),
        Noisy().eval(),
        Extra(),
        nn.Sequential(nn.Linear(4, 8), nn.ELU(alpha=0.5), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 2)).double(),
        nn.Sequential(nn.Tanh()),
        nn.Identity(),
        make_network(gs.Box(-1, 1, (4,)), 2, activation="gelu"),
        make_network(gs.Box(-1, 1, (4,)), 2, memory=4),
        make_network(gs.Box(0, 255, (7, 7, 3), np.uint8), 2),
    ],
)
def test_anything_else_is_left_to_torch_in_the_mode_it_was(module):
    training = module.training
    assert numpy_policy(module) is None and module.training == training


def test_a_dict_of_vectors_is_followed_in_its_flat_form():
    space = gs.Dict({"goal": gs.Box(-1, 1, (1,)), "turn": gs.Discrete(3)})
    network = loud(make_network(space, 2))
    agree(numpy_policy(network), network)
