"""The world model learns what it is shown, each loss moves what it should, and it can be asked what comes next."""

import pytest
import torch

from grpo.config import ConfigError
from grpo.worldmodel.model.distributions import Latents
from grpo.worldmodel.model.optimizer import LaProp
from grpo.worldmodel.model.rssm import Size
from grpo.worldmodel.model.world_model import WorldModel, balanced_kl

TINY = Size(deter=32, hidden=16, classes=4, depth=2, units=16, stoch=4)
SHAPES = {"place": (3,), "image": (16, 16, 1)}


def batch(rows=2, length=8, shapes=SHAPES, seed=0):
    random = torch.Generator().manual_seed(seed)
    first = torch.zeros(rows, length, dtype=torch.bool)
    first[:, 0] = True
    last = torch.zeros_like(first)
    last[:, -1] = True
    made = {
        key: torch.randint(0, 256, (rows, length, *shape), dtype=torch.uint8, generator=random)
        if len(shape) == 3
        else torch.randn(rows, length, *shape, generator=random)
        for key, shape in shapes.items()
    }
    return made | {
        "action": torch.randn(rows, length, 2, generator=random) * ~first[..., None],
        "reward": torch.randn(rows, length, generator=random),
        "is_first": first,
        "is_last": last,
        "is_terminal": last,
    }


def keyed(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_loss_is_the_sum_of_its_named_parts():
    model, data = WorldModel(SHAPES, 2, TINY), batch()
    loss, metrics, posterior, last = model.loss(data, random=keyed())
    named = ("reconstruction/image", "reconstruction/place", "reward", "continue", "dynamics", "representation")
    assert {name for name in metrics if name.startswith("loss/")} == {f"loss/{name}" for name in named}
    assert loss.item() == pytest.approx(sum(metrics[f"loss/{name}"].item() for name in named), rel=1e-5)
    assert all(x.ndim == 0 and x.isfinite() and not x.requires_grad for x in metrics.values())
    assert posterior.deter.shape == (2, 8, 32) and posterior.stoch.shape == (2, 8, 4, 4)
    assert torch.equal(last.flat, posterior.flat[:, -1]) and not last.flat.requires_grad
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_fresh_model_expects_no_reward():
    model = WorldModel({"place": (3,)}, 2, TINY)
    assert torch.equal(model.reward(torch.randn(5, model.flat_width)).mean, torch.zeros(5))


def test_the_prior_learns_from_the_posterior_and_the_posterior_a_little_from_the_prior():
    posterior, prior = ((3 * torch.randn(2, 4, 4, generator=keyed(seed))).requires_grad_() for seed in (1, 2))
    dynamics, representation = balanced_kl(Latents.of(posterior), Latents.of(prior))
    assert torch.equal(dynamics, representation) and (dynamics > 1).all()

    def moved(loss):
        return [x is not None for x in torch.autograd.grad(loss.sum(), [posterior, prior], allow_unused=True)]

    assert moved(dynamics) == [False, True] and moved(representation) == [True, False]


def test_the_kl_losses_move_their_own_heads_with_their_own_weights():
    model, data = WorldModel({"place": (3,)}, 2, TINY), batch(length=1, shapes={"place": (3,)})
    torch.nn.init.normal_(model.rssm.posterior_logits.weight)  # more than one nat apart
    seen = model.observe(data, random=keyed())
    dynamics, representation = balanced_kl(Latents.of(seen.posterior_BTSC), Latents.of(seen.prior_BTSC))
    assert (dynamics > 1).all()
    heads = [model.rssm.posterior_logits.bias, model.rssm.prior_layers[-1].bias]
    for loss, still in ((dynamics, 0), (representation, 1)):
        grads = torch.autograd.grad(loss.sum(), heads, allow_unused=True, retain_graph=True)
        assert (grads[still] is None or not grads[still].any()) and grads[1 - still].any()
    _, metrics, *_ = model.loss(data, random=keyed())
    assert metrics["loss/dynamics"].item() == pytest.approx(metrics["kl"].item())
    assert metrics["loss/representation"].item() == pytest.approx(0.1 * metrics["kl"].item())


def test_less_than_a_free_nat_is_left_alone():
    posterior = 0.01 * torch.randn(2, 4, 4, generator=keyed())
    prior = torch.zeros(2, 4, 4, requires_grad=True)
    dynamics, representation = balanced_kl(Latents.of(posterior), Latents.of(prior))
    assert torch.equal(dynamics, torch.ones(2)) and torch.equal(representation, torch.ones(2))
    dynamics.sum().backward()
    assert not prior.grad.any()


def test_what_is_left_alone_may_be_less():
    model, data = WorldModel({"place": (3,)}, 2, TINY, free_nats=0.1), batch(shapes={"place": (3,)})
    usual = WorldModel({"place": (3,)}, 2, TINY)
    assert weights(model) == weights(usual)  # neither changes what a model begins with
    found, before = (one.loss(data, random=keyed())[1] for one in (model, usual))
    assert 0.1 < found["loss/dynamics"] < 1 <= before["loss/dynamics"] and found["kl"] == before["kl"]


def test_errors_of_observations_count_as_much_as_they_are_said_to():
    model, data = WorldModel({"place": (3,)}, 2, TINY, reconstruction=10.0), batch(shapes={"place": (3,)})
    found, before = (one.loss(data, random=keyed())[1] for one in (model, WorldModel({"place": (3,)}, 2, TINY)))
    more = found["loss"] - before["loss"]
    assert float(more) == pytest.approx(9 * float(before["loss/reconstruction/place"]), rel=1e-4)


def weights(model):
    return {name: x.tolist() for name, x in model.state_dict().items()}


def test_it_learns_a_small_batch_by_heart():
    shapes = {"place": (3,)}
    model, data = WorldModel(shapes, 2, TINY), batch(shapes=shapes)
    optimizer, random = LaProp(model.parameters(), lr=1e-2, warmup=10), keyed()
    history = []
    for _ in range(300):
        optimizer.zero_grad()
        loss, metrics, *_ = model.loss(data, random=random)
        loss.backward()
        optimizer.step()
        history.append({name: x.item() for name, x in metrics.items()})
    first, last = history[0], {name: sum(x[name] for x in history[-20:]) / 20 for name in history[0]}
    free = 1.1  # of the KL, which no learning takes away
    assert last["loss"] - free < (first["loss"] - free) / 10
    assert last["loss/reconstruction/place"] < first["loss/reconstruction/place"] / 50
    assert last["reward_error"] < 0.05 < 0.5 < first["reward_error"]
    by_heart = model.open_loop(data, context=8, random=random)
    assert by_heart["continue"].error.abs().max() < 0.1 and by_heart["place"].error.abs().mean() < 0.25


@pytest.mark.slow
def test_it_learns_to_paint():
    shapes = {"image": (16, 16, 1)}
    model, data = WorldModel(shapes, 2, TINY), batch(rows=1, length=4, shapes=shapes)
    large = (data["image"][:, :, ::8, ::8] > 127).to(torch.uint8) * 255
    data["image"] = large.repeat_interleave(8, 2).repeat_interleave(8, 3)
    optimizer, random = LaProp(model.parameters(), lr=1e-2, warmup=10), keyed()
    found = []
    for _ in range(150):
        optimizer.zero_grad()
        loss, metrics, *_ = model.loss(data, random=random)
        loss.backward()
        optimizer.step()
        found.append(metrics["loss/reconstruction/image"].item())
    assert sum(found[-10:]) / 10 < found[0] / 50


def test_a_forecast_sees_only_its_context_and_the_actions():
    model, data = WorldModel(SHAPES, 2, TINY, seed=4), batch()
    found = model.open_loop(data, context=3, random=keyed(5))
    assert set(found) == {*SHAPES, "reward", "continue"}
    for key, forecast in found.items():
        truth = {"continue": (~data["is_terminal"]).float()}.get(key, data.get(key))
        assert torch.equal(forecast.truth, truth) and forecast.prediction.shape == truth.shape
        assert forecast.prediction.dtype == forecast.error.dtype == truth.dtype
    image, place = found["image"], found["place"]
    assert torch.equal(place.error, place.prediction - place.truth)
    expected = (image.prediction.double() - image.truth.double()) / 2 + 127.5
    assert (image.error.double() - expected).abs().max() <= 0.5

    later = {key: x.clone() for key, x in data.items()}
    later["place"][:, 3:] += 1
    later["image"][:, 3:] = 0
    assert torch.equal(model.open_loop(later, 3, random=keyed(5))["place"].prediction, place.prediction)
    later["place"][:, 2] += 1
    assert not torch.equal(model.open_loop(later, 3, random=keyed(5))["place"].prediction, place.prediction)
    steered = data | {"action": data["action"].clone()}
    steered["action"][:, 5] += 0.7
    moved = model.open_loop(steered, 3, random=keyed(5))["place"].prediction != place.prediction
    assert not moved[:, :5].any() and moved[:, 5:].any()
    with pytest.raises(ValueError, match="context=9 does not lie in a batch of 8 steps"):
        model.open_loop(data, 9)


def test_one_key_gives_one_loss_and_the_state_before_the_batch_counts():
    model, data = WorldModel(SHAPES, 2, TINY), batch()
    data["is_first"] = torch.zeros_like(data["is_first"])
    start = model.rssm.initial(2).each(torch.ones_like)
    losses = [model.loss(data, latent, keyed(seed))[0].item() for latent, seed in ((None, 0), (None, 0), (start, 0))]
    assert losses[0] == losses[1] != losses[2]


def test_the_same_seed_gives_the_same_model_and_moves_no_other_numbers():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, two, other = (WorldModel(SHAPES, 2, TINY, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    same = [torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(one.rssm.gru.weight, other.rssm.gru.weight)
    two.load_state_dict(other.state_dict())
    assert torch.equal(two.rssm.gru.weight, other.rssm.gru.weight)


def test_an_observation_may_not_take_a_name_of_the_batch():
    with pytest.raises(ConfigError, match="cannot be called 'reward'"):
        WorldModel({"reward": (1,)}, 2, TINY)


UNITS, ZERO = torch.tensor([1000.0, 0.01, -1.0]), torch.tensor([5.0, 300.0, 0.0])


def test_scaled_numbers_teach_the_same_in_any_units():
    """What a model makes of metres it makes of millimetres; one that takes them as they come does not."""
    plain = batch(shapes={"place": (3,)})
    other = plain | {"place": plain["place"] * UNITS + ZERO}
    flip = torch.tensor([1.0, 1.0, -1.0])  # a unit below 0 is another axis
    plain = plain | {"place": plain["place"] * flip}
    found = {}
    for scaled in (True, False):
        one, two = (WorldModel({"place": (3,)}, 2, TINY, scaled=scaled) for _ in range(2))
        for model, data in ((one, plain), (two, other)):
            if scaled:
                model.measure(data)
        found[scaled] = [model.loss(data, random=keyed())[0] for model, data in ((one, plain), (two, other))]
    torch.testing.assert_close(*found[True], rtol=1e-3, atol=1e-3)
    assert abs(found[False][0] - found[False][1]) > 10


def test_scaled_numbers_are_foretold_in_the_environment_s_units():
    model = WorldModel({"place": (3,)}, 2, TINY, scaled=True)
    data = batch(shapes={"place": (3,)})
    data["place"] = data["place"] * UNITS.abs() + ZERO
    data["place"][..., 2] = 7.0  # it never moves
    model.measure(data)
    reading = model.decoder.readings[0]
    seen_MD = data["place"].flatten(0, 1)
    torch.testing.assert_close(reading.mean_D, seen_MD.mean(0))
    torch.testing.assert_close(reading.std_D, torch.tensor([*seen_MD.std(0)[:2], 1.0]))
    torch.testing.assert_close(reading.inverse(reading(seen_MD)), seen_MD, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.encoder.readings[0].std_D, reading.std_D)


def test_a_model_saved_without_a_scale_sees_as_it_did():
    before, now = WorldModel(SHAPES, 2, TINY, seed=1), WorldModel(SHAPES, 2, TINY, seed=2, scaled=True)
    now.measure(batch())
    now.load_state_dict(before.state_dict())
    losses = [model.loss(batch(), random=keyed())[0] for model in (before, now)]
    assert torch.equal(*losses)
    measured = WorldModel(SHAPES, 2, TINY, scaled=True)
    measured.measure(batch(seed=3))
    now.load_state_dict(measured.state_dict())
    assert torch.equal(now.encoder.readings[0].std_D, measured.encoder.readings[0].std_D)
