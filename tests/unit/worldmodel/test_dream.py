"""The formulas of a step of imagination that are compiled: what they compute is what the model computes."""

import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from grpo.envs.heads import make_head
from grpo.worldmodel.imagine import Imagination
from grpo.worldmodel.model.distributions import mixed, one_hot
from grpo.worldmodel.model.dream import NARROW, DreamWeights, drawn, dream_start, dream_step
from grpo.worldmodel.model.rssm import RSSM, Latent, Size
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy, make_network
from tests.unit.worldmodel.worlds import generator

SMALL = Size(deter=64, hidden=8, classes=5, depth=4, units=12, stoch=6)
N = 7


def moved(module, seed=0):
    """Weights that are nowhere zero or one, as fresh biases and gains are."""
    random = generator(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=random))
    return module


def somewhere(size, seed=1):
    random = generator(seed)
    hot = torch.eye(size.classes)[torch.randint(size.classes, (N, size.stoch), generator=random)]
    return Latent(torch.rand(N, size.deter, generator=random) * 2 - 1, hot)


@pytest.mark.parametrize("width", [1, NARROW, NARROW + 1])
@torch.no_grad()
def test_steps_are_those_of_the_model(width):
    rssm, latent = moved(RSSM(9, width, SMALL)), somewhere(SMALL)
    weights = DreamWeights.of(rssm, torch.float32)
    here = dream_start(weights, latent)
    for step in range(6):
        action, points = 2 * torch.randn(N, width, generator=generator(step)), torch.rand(N, SMALL.stoch)
        latent, here = rssm.imagine_step(latent, action, points), dream_step(weights, here, action, points)
        torch.testing.assert_close(here.flat_NF[:, : SMALL.deter], latent.deter, rtol=1e-4, atol=1e-5)
        assert torch.equal(here.flat_NF[:, SMALL.deter :], latent.stoch.flatten(1))
        latent = Latent(here.flat_NF[:, : SMALL.deter], latent.stoch)  # differences do not add up


@torch.no_grad()
def test_coarse_products_keep_a_fine_memory_near():
    rssm, latent = moved(RSSM(9, 2, SMALL)), somewhere(SMALL)
    action, points = torch.randn(N, 2, generator=generator(2)), torch.rand(N, SMALL.stoch, generator=generator(3))
    fine, coarse = (DreamWeights.of(rssm, kind) for kind in (torch.float32, torch.bfloat16))
    one, other = (dream_step(w, dream_start(w, latent), action, points) for w in (fine, coarse))
    assert other.flat_NF.dtype == torch.float32 and other.deter_ND.dtype == other.stoch_NS.dtype == torch.bfloat16
    near, far = one.flat_NF[:, : SMALL.deter], other.flat_NF[:, : SMALL.deter]
    torch.testing.assert_close(near, far, rtol=0.1, atol=0.05)
    assert not torch.equal(near, far) and torch.equal(far.to(torch.bfloat16), other.deter_ND)
    assert torch.equal(other.flat_NF[:, SMALL.deter :], other.stoch_NS.float())


def test_draws_are_those_of_the_distribution_function():
    logits = 3 * torch.randn(200, 32, 16, generator=generator(0))
    points = torch.rand(200, 32, generator=generator(1))
    assert torch.equal(drawn(logits, points), one_hot(mixed(logits), points))


def test_every_draw_has_one_class_also_at_the_ends():
    sure = torch.tensor([[[80.0, 0.0, 0.0], [0.0, 80.0, 0.0], [0.0, 0.0, 80.0], [0.0, 0.0, 0.0]]])
    for point, last in ((0.0, 0), (1 - 2**-24, 2), (1.0, 2)):
        found = drawn(sure, torch.full((1, 4), point))
        assert found.sum(-1).eq(1).all() and found[..., last].all()


SPACES = {
    "a choice": Discrete(3),
    "choices": MultiDiscrete([2, 3]),
    "switches": MultiBinary(3),
    "numbers": Box(-1.0, 1.0, (2,)),
}


@pytest.mark.parametrize("space", SPACES)
def test_futures_are_those_of_a_step_at_a_time(space, monkeypatch):
    """As torch computes the formulas; that compiling changes nothing is tested where it is tested for all."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    head = make_head(SPACES[space], "auto", -0.5)
    policy = ActorPolicy(torch.nn.Identity(), head)
    model = moved(WorldModel({"vector": (3,)}, policy.actions.width, SMALL))
    network = moved(make_network(model.flat_width, SMALL.units, head, 2, 0))
    policy = ActorPolicy(network, head)
    start = somewhere(SMALL)
    plain, formulas = (Imagination(model, policy, how)(start, 2, 4, generator(5)) for how in (False, True))
    for name in ("flat", "action_NH", "out_NHF", "logp_NH", "reward_NH", "continue_NH"):
        one, other = getattr(plain, name), getattr(formulas, name)
        assert one.shape == other.shape and one.dtype == other.dtype and not other.requires_grad
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
