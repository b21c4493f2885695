"""The recurrent model: the fast scan is the plain loop, resets forget, futures can be had again."""

import dataclasses
import warnings
import weakref

import pytest
import torch

from grpo.config import ConfigError
from grpo.worldmodel.model.networks import TwoHotHead, head
from grpo.worldmodel.model.pieces import PLAIN, WHOLE, fused
from grpo.worldmodel.model.rssm import RSSM, SIZES, Latent, Size, size_of
from grpo.worldmodel.model.world_model import WorldModel

TINY = Size(deter=32, hidden=12, classes=5, depth=2, units=16, stoch=6)
B, T, EMBED, ACTION = 3, 7, 9, 2


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def model():
    made = RSSM(EMBED, ACTION, TINY).double()
    with torch.no_grad():
        for parameter in made.parameters():  # biases and gains that are not 0 and 1
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


@pytest.fixture
def given():
    random = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    first_BT = torch.zeros(B, T, dtype=torch.bool)
    first_BT[0, 0] = first_BT[1, 3] = first_BT[2, 6] = True
    return {
        "embed": normal(B, T, EMBED).requires_grad_(),
        "action": normal(B, T, ACTION),
        "first": first_BT,
        "start": Latent(normal(B, 32).requires_grad_(), normal(B, 6, 5).softmax(-1).requires_grad_()),
        "random": torch.rand(B, T, 6, generator=random, dtype=torch.float64),
    }


def scanned(model, given, part=slice(None), start=None):
    embed, action, first, random = (given[key][:, part] for key in ("embed", "action", "first", "random"))
    return model.observe(embed, action, first, start or given["start"], random)


def step_by_step(model, given):
    latent, latents, logits = given["start"], [], []
    for t in range(T):
        embed, action, first, random = (given[key][:, t] for key in ("embed", "action", "first", "random"))
        latent, logit = model.observe_step(embed, action, first, latent, random)
        latents.append(latent)
        logits.append(logit)
    deter = torch.stack([latent.deter for latent in latents], 1)
    return deter, torch.stack([latent.stoch for latent in latents], 1), torch.stack(logits, 1), model.prior(deter)


FUSED = pytest.param(fused(), marks=pytest.mark.slow)


@pytest.mark.parametrize("pieces", [PLAIN, WHOLE, FUSED], ids=["plain", "whole", "fused"])
def test_observing_at_once_is_observing_step_by_step_with_the_same_gradients(model, given, pieces):
    model.pieces = pieces
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "goes on without torch.compile")
        seen = scanned(model, given)
    fast = (seen.latent.deter, seen.latent.stoch, seen.posterior_BTSC, seen.prior_BTSC)
    slow = step_by_step(model, given)
    weights = [torch.randn_like(x) for x in slow]
    named = dict(model.named_parameters())
    named |= {"embed": given["embed"], "deter": given["start"].deter, "stoch": given["start"].stoch}
    grads = []
    for outputs in (fast, slow):
        loss = sum((weight * (x + x**2)).sum() for weight, x in zip(weights, outputs, strict=True))
        grads.append(torch.autograd.grad(loss, list(named.values())))
    for x, y in zip(fast, slow, strict=True):
        torch.testing.assert_close(x, y)
    for name, x, y in zip(named, *grads, strict=True):
        assert y.abs().max() > 0, name
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11, msg=name)


def test_an_episode_that_begins_in_the_middle_knows_nothing_of_the_one_before(model, given):
    whole = given | {"first": torch.zeros(B, T, dtype=torch.bool)}
    whole["first"][:, 4] = True
    seen = scanned(model, whole)
    before = scanned(model, whole, slice(None, 4))
    after = scanned(model, whole, slice(4, None), start=model.initial(B))
    for name in ("deter", "stoch"):
        parts = [getattr(x.latent, name) for x in (before, after)]
        torch.testing.assert_close(getattr(seen.latent, name), torch.cat(parts, 1))
    torch.testing.assert_close(seen.posterior_BTSC[:, 4:], after.posterior_BTSC)
    to_embed, to_start = torch.autograd.grad(
        seen.posterior_BTSC[:, 4:].square().sum(), [given["embed"], given["start"].deter]
    )
    assert not to_embed[:, :4].any() and to_embed[:, 4:].any() and not to_start.any()


def test_the_action_into_a_first_step_does_not_count(model, given):
    other = given | {"action": given["action"].clone()}
    other["action"][given["first"]] = 9.0
    assert torch.equal(scanned(model, given).latent.deter, scanned(model, other).latent.deter)
    other["action"][0, 2] += 0.5
    assert not torch.equal(scanned(model, given).latent.deter, scanned(model, other).latent.deter)


def test_a_batch_can_be_cut_and_gone_on_with(model, given):
    seen = scanned(model, given)
    head_, tail = slice(None, 3), slice(3, None)
    last = scanned(model, given, head_).latent[:, -1].detach()
    torch.testing.assert_close(scanned(model, given, tail, last).latent.deter, seen.latent.deter[:, tail])


def test_coarse_imagination_keeps_its_memory_fine(model, given):
    model, start = model.float(), given["start"].detach().each(lambda x: x.float())
    action, random = given["action"][:, 1].float(), given["random"][:, 1].float()
    exact = model.imagine_step(start, action, random)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        as_it_was, coarse = (model.imagine_step(start, action, random, coarse=how) for how in (False, True))
    torch.testing.assert_close(as_it_was.deter, exact.deter, rtol=0.02, atol=0.02)
    torch.testing.assert_close(coarse.deter, exact.deter, rtol=0.1, atol=0.1)
    assert coarse.deter.dtype == coarse.stoch.dtype == torch.float32 and not torch.equal(coarse.deter, as_it_was.deter)


def test_imagination_is_the_same_memory_with_the_priors_latents(model, given):
    start = given["start"].detach()
    action, random = given["action"][:, 1], given["random"][:, 1]
    imagined = model.imagine_step(start, action, random)
    seen, _ = model.observe_step(given["embed"][:, 1], action, torch.zeros(B, dtype=torch.bool), start, random)
    torch.testing.assert_close(imagined.deter, seen.deter)
    probs = model.prior(imagined.deter).softmax(-1) * 0.99 + 0.01 / 5
    below = (probs.cumsum(-1) <= random[..., None]).sum(-1)
    assert torch.equal(imagined.stoch.argmax(-1), below)
    assert imagined.flat.shape == (B, 32 + 30)


def test_the_same_key_gives_the_same_future(model, given):
    def futures(seed):
        random, latent, found = torch.Generator().manual_seed(seed), given["start"].detach(), []
        for t in range(T):
            latent = model.imagine_step(latent, given["action"][:, t], random)
            found.append(latent.stoch)
        return torch.stack(found)

    assert torch.equal(futures(3), futures(3)) and not torch.equal(futures(3), futures(4))


def test_states_are_zeros_first_and_one_hot_later():
    model = RSSM(EMBED, ACTION, TINY)
    zero = model.initial(2, 4)
    assert zero.deter.shape == (2, 4, 32) and zero.stoch.shape == (2, 4, 6, 5) and not zero.flat.any()
    with torch.no_grad():
        seen = model.observe(torch.randn(2, 4, EMBED), torch.zeros(2, 4, ACTION), torch.zeros(2, 4, dtype=torch.bool))
    assert seen.latent.deter.dtype == seen.posterior_BTSC.dtype == torch.float32
    assert seen.latent.deter.abs().max() < 1
    assert (seen.latent.stoch.sum(-1) == 1).all() and set(seen.latent.stoch.unique().tolist()) == {0.0, 1.0}
    assert seen.latent[:, -1].flat.shape == (2, 62)


def test_actions_beyond_one_count_as_one(model, given):
    start = given["start"].detach()
    far, near = (model.imagine_step(start, torch.full((B, ACTION), x), given["random"][:, 0]) for x in (70.0, 1.0))
    assert torch.equal(far.deter, near.deter)


def test_the_recurrence_keeps_its_precision_under_autocast():
    model, zeros = RSSM(EMBED, ACTION, TINY), torch.zeros(2, 3, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = model.observe(torch.randn(2, 3, EMBED), torch.randn(2, 3, ACTION), zeros)
        imagined = model.imagine_step(seen.latent[:, -1], torch.randn(2, ACTION))
        acted, _ = model.observe_step(torch.randn(2, EMBED), torch.randn(2, ACTION), zeros[:, 0], imagined)
    assert all(x.deter.dtype == x.stoch.dtype == torch.float32 for x in (seen.latent, imagined, acted))
    seen.latent.flat.square().mean().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_named_after_the_weights_of_an_agent_that_sees_pictures(name):
    size = SIZES[name]
    with torch.device("meta"):  # counted without being made
        model = WorldModel({"image": (64, 64, 3)}, 6, name)
        actor = head(model.flat_width, size.units, 6, layers=3)
        critic = TwoHotHead(model.flat_width, size.units, layers=3)
    parts = [model, actor, critic, critic]  # the critic has a slow copy
    millions = sum(p.numel() for part in parts for p in part.parameters()) / 1e6
    assert 0.7 <= millions / float(name.rstrip("m")) <= 1.3


def test_sizes_grow_and_an_unknown_one_is_refused():
    for wide, narrow in zip(list(SIZES.values())[1:], SIZES.values(), strict=False):
        pairs = zip(dataclasses.astuple(wide), dataclasses.astuple(narrow), strict=True)
        assert all(a >= b for a, b in pairs) and wide.deter > narrow.deter
    assert size_of(TINY) is TINY and size_of("1m").deter == 512
    with pytest.raises(ConfigError, match=r"size='2m' is not one of 0\.5m, 1m, 4m, 12m, 25m, 50m"):
        size_of("2m")


def test_the_number_of_threads_is_left_as_it_was(model, given):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        scanned(model, given).latent.flat.sum().backward()
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError):
            scanned(model, given, start=Latent(torch.zeros(B, 31), torch.zeros(B, 6, 5)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_graph_that_is_dropped_leaves_nothing_behind(model, given):
    seen = scanned(model, given)
    tape = weakref.ref(seen.latent.deter.grad_fn.next_functions[0][0].tape)
    assert tape() is not None
    del seen
    assert tape() is None


def test_a_graph_can_be_gone_back_through_twice(model, given):
    seen = scanned(model, given)
    loss = seen.latent.deter.sum() + seen.posterior_BTSC.square().sum()
    one, two = (torch.autograd.grad(loss, list(model.gru.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
