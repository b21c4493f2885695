"""Action heads against torch.distributions, Monte Carlo and closed forms; what is played stays inside the space."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import distributions as td

from grpo.envs.fleet import EnvError
from grpo.envs.heads import make_head

WIDE = gs.Box(np.array([-2.0, 0.0, -1.0], np.float32), np.array([2.0, 10.0, 1.0], np.float32))
OPEN = gs.Box(-np.inf, np.inf, (3,), np.float32)
CASES = {
    "categorical": (gs.Discrete(4, start=-1), {}),
    "multi": (gs.MultiDiscrete([2, 5, 3]), {}),
    "table": (gs.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [2, 3]]), {}),
    "bernoulli": (gs.MultiBinary([2, 2]), {}),
    "gaussian": (WIDE, {"log_std": -0.3}),
    "open": (OPEN, {}),
    "state_std": (WIDE, {"state_std": True}),
    "squashed": (WIDE, {"kind": "squashed", "log_std": 0.2}),
    "squashed_state": (WIDE, {"kind": "squashed", "state_std": True}),
    "beta": (WIDE, {"kind": "beta"}),
}


def case(name, rows=64, spread=1.5):
    """A head, numbers for it, and a generator."""
    space, settings = CASES[name]
    head, random = make_head(space, **settings), np.random.default_rng(3)
    return head, (spread * random.standard_normal((rows, head.size))).astype(np.float32), random


def truth(name, out):
    """The same distribution of the record (after tanh, for squashed) by torch.distributions, one event a row."""
    settings = CASES[name][1]
    if name == "categorical":
        return td.Categorical(logits=out)
    if name == "bernoulli":
        return td.Independent(td.Bernoulli(logits=out), 1)
    if name == "beta":
        a, b = (1 + torch.nn.functional.softplus(out)).chunk(2, -1)
        return td.Independent(td.Beta(a, b), 1)
    mean, log_std = out.chunk(2, -1) if settings.get("state_std") else (out, torch.zeros_like(out))
    normal = td.Normal(mean, (log_std + settings.get("log_std", -0.5)).exp())
    if "squashed" in name:
        return td.TransformedDistribution(td.Independent(normal, 1), [td.TanhTransform(cache_size=1)])
    return td.Independent(normal, 1)


def by_choice(name, out):
    """A MultiDiscrete as one Categorical a choice."""
    return [td.Categorical(logits=part) for part in out.split([int(n) for n in np.ravel(CASES[name][0].nvec)], -1)]


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_those_of_the_distribution_in_numpy_and_in_torch(name):
    head, out, random = case(name)
    recorded, logp = head.sample(out, random)
    assert recorded.dtype == head.dtype and recorded.shape == (64, *head.shape) and logp.dtype == np.float32
    mine = head.logp(torch.from_numpy(out), torch.from_numpy(recorded))
    np.testing.assert_allclose(mine.detach(), logp, rtol=2e-6, atol=2e-6)
    wide, kept = torch.from_numpy(out).double(), torch.from_numpy(recorded).double()
    if name in ("multi", "table"):
        parts = [of.log_prob(kept[:, i]) for i, of in enumerate(by_choice(name, wide))]
        expected = torch.stack(parts, -1).sum(-1)
    elif "squashed" in name:
        x = torch.tanh(kept)
        of = truth(name, wide)
        expected = of.base_dist.log_prob(kept) - td.TanhTransform().log_abs_det_jacobian(kept, x).sum(-1)
        near = x.abs().amax(-1) < 0.99  # where tanh can be undone, the density of the action alone agrees
        assert near.sum() > 5
        np.testing.assert_allclose(mine.detach()[near], of.log_prob(x)[near], rtol=1e-5, atol=1e-5)
    else:
        expected = truth(name, wide).log_prob(kept)
    np.testing.assert_allclose(mine.detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_leading_dimensions_are_free(name):
    head, out, random = case(name, rows=6)
    recorded, logp = head.sample(out, random)
    shaped = torch.from_numpy(out).reshape(2, 3, -1)
    kept = torch.from_numpy(recorded).reshape(2, 3, *head.shape)
    np.testing.assert_allclose(head.logp(shaped, kept).detach().reshape(-1), logp, atol=1e-5)
    assert head.entropy(shaped).shape == (2, 3)
    assert head.kl(head.describe(shaped), shaped).shape == (2, 3)


@pytest.mark.parametrize("name", CASES)
def test_actions_are_the_spaces_own(name):
    head, out, random = case(name, spread=4.0)
    space = CASES[name][0]
    for recorded in (head.sample(out, random)[0], head.mode(out)):
        actions = head.to_env(recorded)
        assert actions.dtype == space.dtype
        assert all(space.contains(action) for action in actions)


@pytest.mark.parametrize("name", CASES)
def test_the_torch_form_of_the_greedy_action_is_the_numpy_form(name):
    head, out, _ = case(name, spread=4.0)
    greedy = head.greedy(torch.from_numpy(out))
    played = head.to_env(head.mode(out))
    assert greedy.numpy().dtype == played.dtype and tuple(greedy.shape) == played.shape
    np.testing.assert_allclose(greedy.detach(), played, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["categorical", "multi", "bernoulli"])
def test_choices_come_as_often_as_they_should(name):
    head, out, random = case(name, rows=1)
    recorded, _ = head.sample(np.repeat(out, 40_000, axis=0), random)
    wide = torch.from_numpy(out[0]).double()
    if name == "bernoulli":
        expected, found = [wide.sigmoid().numpy()], [recorded.mean(0)]
    else:
        parts = [td.Categorical(logits=wide)] if name == "categorical" else by_choice(name, wide)
        expected = [of.probs.numpy() for of in parts]
        columns = recorded.reshape(40_000, -1).T
        found = [np.bincount(c, minlength=len(p)) / 40_000 for c, p in zip(columns, expected, strict=True)]
    for p, q in zip(expected, found, strict=True):
        np.testing.assert_allclose(q, p, atol=4 * 0.5 / 200)


@pytest.mark.parametrize("name", ["gaussian", "state_std", "squashed", "beta"])
def test_numbers_have_the_mean_and_spread_they_should(name):
    head, out, random = case(name, rows=1, spread=0.7)
    recorded, _ = head.sample(np.repeat(out, 40_000, axis=0), random)
    of = truth(name, torch.from_numpy(out[0]).double())
    of = of.base_dist.base_dist if name == "squashed" else of.base_dist
    np.testing.assert_allclose(recorded.mean(0), of.mean, atol=4 * float(of.stddev.max()) / 200)
    np.testing.assert_allclose(recorded.std(0), of.stddev, rtol=0.02)


def test_an_impossible_choice_is_never_made():
    head = make_head(gs.Discrete(3))
    out = np.tile(np.array([[-np.inf, 0.0, -np.inf]], np.float32), (5000, 1))
    recorded, logp = head.sample(out, np.random.default_rng(0))
    assert (recorded == 1).all() and not logp.any()
    assert head.entropy(torch.from_numpy(out[:1])).item() == 0


@pytest.mark.parametrize("name", CASES)
def test_a_network_that_gives_nan_is_seen_in_its_log_probs(name):
    head, out, random = case(name, rows=3)
    out[1, 0] = np.nan
    assert np.isnan(head.sample(out, random)[1]).tolist() == [False, True, False]


@pytest.mark.parametrize("name", CASES)
def test_entropy_is_the_expectation_of_the_log_prob(name):
    head, out, random = case(name, rows=1)
    exact = head.entropy(torch.from_numpy(out)).item()
    _, logp = head.sample(np.repeat(out, 100_000, axis=0), random)
    assert exact == pytest.approx(-logp.mean(), abs=float(4 * logp.std() / math.sqrt(100_000)) + 1e-5)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "gaussian", "state_std", "beta"])
def test_entropy_and_kl_have_their_closed_forms(name):
    head, out, random = case(name)
    new = out + 0.5 * random.standard_normal(out.shape).astype(np.float32)
    old, now = torch.from_numpy(out), torch.from_numpy(new)
    np.testing.assert_allclose(head.entropy(old).detach(), truth(name, old.double()).entropy(), rtol=1e-5, atol=2e-5)
    expected = td.kl_divergence(truth(name, old.double()), truth(name, now.double()))
    np.testing.assert_allclose(head.kl(head.describe(old), now).detach(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_kl_is_the_expected_log_ratio_and_zero_to_itself(name):
    head, out, random = case(name, rows=1, spread=0.8)
    new = out + 0.3 * random.standard_normal(out.shape).astype(np.float32)
    recorded, logp = head.sample(np.repeat(out, 100_000, axis=0), random)
    with torch.no_grad():
        exact = head.kl(head.describe(torch.from_numpy(out)), torch.from_numpy(new)).item()
        ratio = logp - head.logp(torch.from_numpy(new).expand(100_000, -1), torch.from_numpy(recorded)).numpy()
        itself = head.kl(head.describe(torch.from_numpy(out)), torch.from_numpy(out)).item()
    assert exact == pytest.approx(ratio.mean(), abs=float(4 * ratio.std() / math.sqrt(100_000)) + 1e-5)
    assert itself == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_descriptions_are_the_same_in_numpy_and_torch(name):
    head, out, _ = case(name)
    np.testing.assert_allclose(head.describe(out), head.describe(torch.from_numpy(out)).detach(), atol=1e-6)


def test_a_description_outlives_a_change_of_the_heads_own_parameter():
    head, out, _ = case("gaussian")
    out = torch.from_numpy(out)
    old = head.describe(out).detach()
    with torch.no_grad():
        head.log_std_A += 0.5
    expected = td.kl_divergence(td.Normal(0.0, math.exp(-0.3)), td.Normal(0.0, math.exp(0.2))).item()
    np.testing.assert_allclose(head.kl(old, out).detach(), np.full(64, 3 * expected), rtol=1e-4)


@pytest.mark.parametrize("log_std", [-6.0, -2.0, 0.0, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0, 20.0])
def test_the_squashed_entropy_is_the_integral(mean, log_std):
    head = make_head(gs.Box(-1, 1, (1,)), "squashed", log_std=log_std)
    u = mean + math.exp(log_std) * torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    p = td.Normal(mean, math.exp(log_std)).log_prob(u).exp()
    slope = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))
    expected = log_std + 0.5 * math.log(2 * math.pi * math.e) + torch.trapezoid(p * slope, u).item()
    assert head.entropy(torch.full((1, 1), mean)).item() == pytest.approx(expected, rel=1e-5, abs=2e-5)


def test_the_squashed_entropy_has_the_gradient_of_the_integral():
    head = make_head(gs.Box(-1, 1, (1,)), "squashed", state_std=True, log_std=0.0).double()
    out = torch.tensor([[0.4, 0.3]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(head.entropy, out)
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weight = td.Normal(0.0, 1.0).log_prob(x).exp()

    def integral(out):
        u = out[0, 0] + out[0, 1].exp() * x
        slope = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))
        return out[0, 1] + torch.trapezoid(weight * slope, x)

    mine, theirs = (torch.autograd.grad(f(out).sum(), out)[0] for f in (head.entropy, integral))
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", [-50.0, 0.0, 50.0])
def test_values_and_gradients_stay_finite_at_extreme_numbers(name, value):
    head, _, random = case(name)
    signs = np.where(np.arange(head.size) % 2, 1.0, -1.0)
    for number in (np.full(head.size, value), value * signs):
        out = torch.tensor(number[None], dtype=torch.float32, requires_grad=True)
        for source in (np.zeros((1, head.size), np.float32), number[None].astype(np.float32)):
            recorded, logp = head.sample(source, random)
            old = torch.as_tensor(head.describe(source))
            new = head.logp(out, torch.from_numpy(recorded))
            total = new + head.entropy(out) + head.kl(old, out)
            grads = torch.autograd.grad(total.sum(), [out, *head.parameters()], allow_unused=True)
            assert np.isfinite(logp).all() and torch.isfinite(total).all()
            assert all(torch.isfinite(grad).all() for grad in grads if grad is not None)


@pytest.mark.parametrize("name", ["gaussian", "squashed", "beta"])
def test_the_network_works_in_units_of_the_bounds(name):
    head = make_head(WIDE, "beta" if name == "beta" else name)
    middle = head.to_env(head.mode(np.zeros((1, head.size), np.float32)))
    np.testing.assert_allclose(middle, [[0.0, 5.0, 0.0]], atol=1e-6)
    if name == "gaussian":
        np.testing.assert_allclose(head.to_env(np.array([[1.0, -1.0, 0.5]])), [[2.0, 0.0, 0.5]])
        np.testing.assert_allclose(head.to_env(np.array([[7.0, -9.0, -3.0]])), [[2.0, 0.0, -1.0]])


def test_an_open_side_is_left_as_it_is_and_a_closed_one_clips():
    box = gs.Box(
        np.array([0.0, -np.finfo(np.float32).max], np.float32), np.array([np.inf, np.finfo(np.float32).max], np.float32)
    )
    head = make_head(box)
    np.testing.assert_allclose(head.to_env(np.array([[3.0, 40.0], [-1.0, -40.0]])), [[3.0, 40.0], [0.0, -40.0]])


def test_a_box_that_counts_gets_whole_numbers_inside_its_bounds():
    head = make_head(gs.Box(0, 255, (2,), np.uint8))
    actions = head.to_env(np.array([[0.0, 5.0], [-1.0, -5.0]], np.float32))
    assert actions.dtype == np.uint8 and actions.tolist() == [[128, 255], [0, 0]]


def test_only_a_gaussian_with_one_spread_for_all_states_has_a_parameter():
    parameters = {name: [key for key, _ in case(name)[0].named_parameters()] for name in CASES}
    owners = {name for name, keys in parameters.items() if keys == ["log_std_A"]}
    assert owners == {"gaussian", "open", "squashed"} and not any(parameters[name] for name in set(CASES) - owners)
    assert list(case("gaussian")[0].state_dict()) == ["log_std_A"]


@pytest.mark.parametrize(
    ("space", "kind", "message"),
    [
        (OPEN, "beta", "beta head needs finite bounds"),
        (OPEN, "squashed", "squashed head needs finite bounds"),
        (gs.Discrete(2), "gaussian", r"no gaussian head for the action space Discrete\(2\)"),
        (WIDE, "banana", "no banana head"),
        (gs.Tuple((gs.Discrete(2),)), "auto", r"Tuple\(Discrete\(2\)\); wrap the environment"),
        (gs.Text(3), "auto", "Text"),
    ],
)
def test_what_no_head_fits_is_refused_in_one_line(space, kind, message):
    with pytest.raises(EnvError, match=message):
        make_head(space, kind)
