"""Captured on a CUDA device: the same numbers as without, after weights moved too; what cannot be captured goes on."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from grpo.envs.heads import make_head
from grpo.graphs import MOST, PLAIN, GraphedCallable
from grpo.worldmodel.imagine import Imagination
from grpo.worldmodel.model.learner import Learner
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy, make_network
from grpo.worldmodel.replay.buffer import Sample
from tests.gpu.ways import same_way, weights

pytestmark = pytest.mark.gpu

SHAPES = {
    "vectors": {"vector": (3,)},
    "pictures": {"image": (32, 32, 3)},
    "both": {"vector": (3,), "image": (32, 32, 3)},
}
ENOUGH = PLAIN + 3


class Nowhere:
    def write_latents(self, *_):
        pass


def generator(seed):
    return torch.Generator().manual_seed(seed)


def made(shapes, seed=0):
    return WorldModel(shapes, 2, "0.5m", seed).cuda()


def sample(shapes, number, batch=4, length=6):
    random, lead = np.random.default_rng(number), (batch, length)
    seen = {
        key: random.normal(size=(*lead, *shape)).astype(np.float32)
        if len(shape) == 1
        else random.integers(0, 256, (*lead, *shape), np.uint8)
        for key, shape in shapes.items()
    }
    told = {
        "action": np.eye(2, dtype=np.float32)[random.integers(0, 2, lead)],
        "reward": random.normal(size=lead).astype(np.float32),
        "is_first": random.random(lead) < 0.1,
        "is_terminal": random.random(lead) < 0.1,
    }
    deter, stoch = np.zeros((batch, 256), np.float32), np.zeros((batch, 32, 4), np.float32)
    return Sample(seen | told, np.zeros(lead, np.int64), deter, stoch, online=0)


def learned(learner, shapes, updates, first=0):
    for number in range(first, first + updates):
        learner.update(sample(shapes, number), Nowhere(), generator(number))


def same(one, two, first):
    same_way(*(weights(model.parameters()) for model in (first, one, two)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_captured_updates_are_those_without(kind, compiled):
    shapes = SHAPES[kind]
    plain = Learner(made(shapes), 1e-3, 0, frozen=False, graphs=False)
    captured = Learner(made(shapes), 1e-3, 0, frozen=False, compiled=compiled)
    for learner in (plain, captured):
        learned(learner, shapes, 8)
    assert len(captured._gradients) == len(captured._step) == 1 and not len(plain._gradients)
    assert captured.metrics == pytest.approx(plain.metrics, rel=2e-2, abs=1e-3)
    same(plain.model, captured.model, made(shapes))
    assert plain.updates == captured.updates == 8


def test_a_state_is_taken_up_by_a_study_that_has_captured():
    shapes = SHAPES["vectors"]
    plain, captured = (Learner(made(shapes), 1e-3, 0, frozen=False, graphs=graphs) for graphs in (False, True))
    learned(captured, shapes, 8)
    learned(plain, shapes, 3)
    captured.load_state(plain.state())
    for learner in (plain, captured):
        learned(learner, shapes, 8, first=3)
    assert len(captured._gradients) == 1 and captured.updates == 11
    same(plain.model, captured.model, made(shapes))


def test_an_update_that_is_not_finite_changes_nothing_of_what_was_captured():
    shapes = SHAPES["vectors"]
    learner = Learner(made(shapes), 1e-3, 0, frozen=False)
    learned(learner, shapes, ENOUGH + 1)
    before = [p.clone() for p in learner.model.parameters()]
    bad = sample(shapes, 0)
    bad.batch["reward"][:] = np.nan
    learner.update(bad, Nowhere(), generator(0))
    assert learner.skipped == 1 and all(
        torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True)
    )
    learned(learner, shapes, 1)
    assert learner.skipped == 1 and len(learner._gradients) == 1


SPACES = {"a choice": Discrete(2), "numbers": Box(-1.0, 1.0, (2,), np.float32)}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_futures_are_those_without(space, compiled):
    model, head = made(SHAPES["vectors"]), make_head(SPACES[space], "auto", -0.5, state_std=True)
    policy = ActorPolicy(make_network(model.flat_width, 64, head, 2, 0), head)
    policy.module.cuda()
    plain, captured = Imagination(model, policy, graphs=False), Imagination(model, policy, compiled)
    start = model.rssm.initial(6)
    kept = [captured(start, 3, 5, generator(k)) for k in range(ENOUGH)]
    assert len(captured._futures) == 1
    for k, mine in enumerate(kept):
        other = plain(start, 3, 5, generator(k))
        for name in ("action_NH", "logp_NH", "reward_NH", "continue_NH", "flat"):
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), rtol=2e-3, atol=2e-4)
    with torch.no_grad():
        for p in policy.module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    mine, other = (i(start, 3, 5, generator(9)) for i in (captured, plain))
    torch.testing.assert_close(mine.logp_NH, other.logp_NH, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_coarse_futures_are_near_drawn_there_and_captured(compiled):
    model, head = made(SHAPES["vectors"]), make_head(SPACES["numbers"], "auto", -0.5, state_std=True)
    policy = ActorPolicy(make_network(model.flat_width, 64, head, 2, 0), head)
    policy.module.cuda()
    fine, coarse = Imagination(model, policy), Imagination(model, policy, compiled, coarse=True)
    start = model.rssm.initial(6)
    for k in range(ENOUGH):
        mine, other = (i(start, 3, 1, generator(k)) for i in (coarse, fine))
        torch.testing.assert_close(mine.latent.deter, other.latent.deter, rtol=0.1, atol=0.05)
        torch.testing.assert_close(mine.action_NH, other.action_NH, rtol=2e-3, atol=2e-4)
        assert mine.latent.deter.dtype == torch.float32
    assert len(coarse._futures) == 1
    again = coarse(start, 3, 1, generator(ENOUGH - 1))
    assert torch.equal(again.action_NH, mine.action_NH)


def test_work_that_waits_for_the_device_goes_on_uncaptured():
    weight = torch.ones(3, device="cuda")
    work = GraphedCallable(lambda given: {"y": given["x"] * float(weight.sum())}, lambda: [weight])
    x = torch.arange(3.0, device="cuda")
    for _ in range(PLAIN):
        work({"x": x})
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        found = work({"x": x})
    assert found["y"].tolist() == [0.0, 3.0, 6.0] and not len(work)
    assert work({"x": x + 1})["y"].tolist() == [3.0, 6.0, 9.0]


def test_shapes_have_graphs_of_their_own_and_not_too_many():
    weight = torch.full((1,), 2.0, device="cuda")
    work = GraphedCallable(lambda given: {"y": given["x"] * weight}, lambda: [weight])
    for _ in range(ENOUGH):
        for count in range(1, MOST + 3):
            x = torch.arange(float(count), device="cuda")
            assert work({"x": x})["y"].tolist() == (2 * x).tolist()
    assert len(work) == MOST
    weight.fill_(3.0)
    assert work({"x": torch.ones(1, device="cuda")})["y"].tolist() == [3.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no other device")
def test_work_on_another_device_than_the_current_one_is_captured_there():
    weight = torch.full((1,), 2.0, device="cuda:1")
    work = GraphedCallable(lambda given: {"y": given["x"] * weight}, lambda: [weight])
    for k in range(ENOUGH):
        assert work({"x": torch.full((1,), float(k), device="cuda:1")})["y"].tolist() == [2.0 * k]
    assert len(work) == 1 and torch.cuda.current_device() == 0
