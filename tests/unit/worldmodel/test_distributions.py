"""The closed forms of the world model's heads."""

import math

import pytest
import torch

from grpo.worldmodel.model import distributions as d


def test_symexp_undoes_symlog():
    x = torch.tensor([-1e6, -3.0, -1e-3, 0.0, 0.5, 20.0, 1e5], dtype=torch.float64)
    torch.testing.assert_close(d.symexp(d.symlog(x)), x)
    assert d.symlog(torch.tensor(math.e - 1)).item() == pytest.approx(1.0)
    torch.testing.assert_close(d.symlog(-x), -d.symlog(x))


def test_there_are_255_mirrored_bins():
    bins = d.symexp_bins()
    assert len(bins) == 255 and bins[127] == 0
    assert (bins.diff() > 0).all()
    assert torch.equal(bins, -bins.flip(0))
    torch.testing.assert_close(d.symlog(bins.double()), torch.linspace(-20, 20, 255, dtype=torch.float64))


def test_even_logits_mean_exactly_zero():
    for value in (0.0, 3.7, -200.0):
        assert torch.equal(d.TwoHot(torch.full((2, 5, 255), value), d.symexp_bins()).mean, torch.zeros(2, 5))


def test_a_value_is_shared_by_the_two_bins_around_it():
    bins = torch.tensor([-4.0, -1.0, 0.0, 1.0, 4.0])
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0))
    logp = logits.log_softmax(-1)
    values = torch.tensor([1.0, 1.75, -0.5, 0.0, 9.0, -9.0])
    expected = torch.stack(
        [logp[3], 0.75 * logp[3] + 0.25 * logp[4], (logp[1] + logp[2]) / 2, logp[2], logp[4], logp[0]]
    )
    found = d.TwoHot(logits.expand(6, 5), bins).log_prob(values)
    torch.testing.assert_close(found, expected)


def test_the_cross_entropy_is_least_where_the_mean_is_the_value():
    logits, bins = torch.zeros(3, 255, requires_grad=True), d.symexp_bins()
    values = torch.tensor([-250.0, 0.03, 7.0])
    optimizer = torch.optim.Adam([logits], lr=0.3)
    for _ in range(400):
        optimizer.zero_grad()
        (-d.TwoHot(logits, bins).log_prob(values)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        logits[:] = torch.where(logits < logits.max(-1, keepdim=True).values - 8, -1e9, logits)  # the far tail is heavy
    torch.testing.assert_close(d.TwoHot(logits, bins).mean, values, rtol=0.02, atol=0.01)


def test_no_class_is_less_likely_than_its_share_of_the_mix():
    probs = d.mixed(torch.tensor([[1000.0, 0.0, 0.0, -1000.0]]))
    torch.testing.assert_close(probs, torch.tensor([[0.9925, 0.0025, 0.0025, 0.0025]]))
    one, other = (d.Latents.of(torch.tensor([[logits]])) for logits in ([1e4, 0.0], [0.0, 1e4]))
    assert one.kl(other).isfinite().all()


def test_kl_and_entropy_are_those_of_independent_categoricals():
    random = torch.Generator().manual_seed(1)
    a, b = (3 * torch.randn(4, 6, 5, generator=random, dtype=torch.float64) for _ in range(2))
    p, q = (torch.distributions.Categorical(probs=d.mixed(x)) for x in (a, b))
    one, other = d.Latents.of(a), d.Latents.of(b)
    torch.testing.assert_close(one.kl(other), torch.distributions.kl_divergence(p, q).sum(-1))
    torch.testing.assert_close(one.entropy(), p.entropy().sum(-1))
    assert torch.equal(one.kl(one), torch.zeros(4, dtype=torch.float64))


def test_probabilities_are_a_softmax_with_its_share_of_the_uniform_distribution():
    logits = 3 * torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(d.mixed(logits), 0.99 * logits.softmax(-1) + 0.01 / 5)


def test_samples_follow_the_probabilities_and_are_exactly_one_hot():
    logits = torch.tensor([2.0, 0.0, -1.0, 0.5])
    points = (torch.arange(10_000) + 0.5) / 10_000
    sample = d.straight_through(logits.expand(10_000, 4), points)
    assert set(sample.unique().tolist()) == {0.0, 1.0} and (sample.sum(-1) == 1).all()
    torch.testing.assert_close(sample.mean(0), d.mixed(logits[None])[0], atol=1e-4, rtol=0)
    ends = d.straight_through(logits.expand(2, 4), torch.tensor([0.0, 1.0]))
    assert ends.argmax(-1).tolist() == [0, 3]


def test_the_gradient_of_a_sample_is_that_of_its_probabilities():
    weight = torch.tensor([[1.0, -2.0, 0.5]])
    grads = []
    for sample in (lambda x: d.straight_through(x, torch.tensor([0.4])), d.mixed):
        logits = torch.tensor([[0.3, 0.1, -0.7]], requires_grad=True)
        (sample(logits) * weight).sum().backward()
        grads.append(logits.grad)
    assert torch.equal(*grads) and grads[0].abs().max() > 0


def test_uniform_numbers_are_those_given_or_those_of_the_key():
    like = torch.zeros(())
    given = torch.rand(6)
    assert torch.equal(d.uniform((2, 3), given, like), given.view(2, 3))
    one, two, other = (d.uniform((2, 3), torch.Generator().manual_seed(seed), like) for seed in (5, 5, 6))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_numbers_are_drawn_where_they_are_used():
    random = torch.Generator().manual_seed(5)
    assert d.there(random, torch.device("cpu")) is random  # seeded runs on a CPU keep their numbers


def test_whether_it_goes_on_is_a_bernoulli():
    logit, happened = torch.tensor([-2.0, 0.3, 40.0]), torch.tensor([True, False, True])
    found = d.Bernoulli(logit)
    expected = torch.distributions.Bernoulli(logits=logit)
    torch.testing.assert_close(found.log_prob(happened), expected.log_prob(happened.float()))
    torch.testing.assert_close(found.mean, expected.mean)
