"""Divergences to a teacher: values by hand, gradients in expectation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grpo.core import teachers
from tests.batches import MAKERS

P = np.array([0.5, 0.25, 0.125, 0.125])
T = np.array([0.125, 0.5, 0.125, 0.25])


def kl(p, q):
    return float((p * np.log(p / q)).sum())


def by_hand(kind, mix):
    mixed = mix * T + (1 - mix) * P
    return {"reverse": kl(P, T), "forward": kl(T, P), "js": mix * kl(T, mixed) + (1 - mix) * kl(P, mixed)}[kind]


@pytest.mark.parametrize("kind", teachers.KINDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_exact_values(maker, kind):
    make = MAKERS[maker]
    for mix in (0.5, 0.1, 0.9):
        got = teachers.divergence(make(np.log(P)[None, None]), make(np.log(T)[None, None]), kind, mix)
        np.testing.assert_allclose(np.asarray(got), [[by_hand(kind, mix)]], rtol=1e-6)


@pytest.mark.parametrize("kind", teachers.KINDS)
def test_a_sample_has_the_right_value_and_gradient_on_average(kind):
    """Summed over every choice with its probability: what a sampled decision says is what the exact divergence is."""
    logits, mix = torch.tensor(np.log(P) + 0.3, requires_grad=True), 0.3
    logp, teacher = logits.log_softmax(0), torch.tensor(np.log(T))
    exact = teachers.divergence(logp[None, None], teacher[None, None], kind, mix)
    each = teachers.sampled(logp[:, None], teacher[:, None], kind, mix)[:, 0]
    np.testing.assert_allclose(float((each * logp.exp()).sum().detach()), by_hand(kind, mix), rtol=1e-12)
    (wanted,) = torch.autograd.grad(exact.sum(), logits, retain_graph=True)
    (got,) = torch.autograd.grad((each * logp.detach().exp()).sum(), logits)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", teachers.KINDS)
def test_a_policy_that_is_its_teacher_has_nothing_to_learn(kind):
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)
    for made in (
        teachers.divergence(logp, logp, kind, 0.4),
        teachers.divergence(teachers.with_tail(logp[..., :3]), teachers.with_tail(logp[..., :3]), kind, 0.4),
        teachers.sampled(logp[..., 0], logp[..., 0], kind, 0.4),
    ):
        (gradient,) = torch.autograd.grad(made.sum(), logits, retain_graph=True)
        assert float(made.abs().max()) < 1e-12 and float(gradient.abs().max()) < 1e-12
    sampled = teachers.sampled(logp[..., 0], logp[..., 0], kind, 0.4)
    assert not sampled.any() and not torch.autograd.grad(sampled.sum(), logits)[0].any()  # exactly


@pytest.mark.parametrize("maker", MAKERS)
def test_the_tail_is_what_the_others_have_together(maker):
    make = MAKERS[maker]
    got = np.exp(np.asarray(teachers.with_tail(make(np.log(P[:2])[None, None]))))
    np.testing.assert_allclose(got, [[[0.5, 0.25, 0.25]]], rtol=1e-6)


def test_all_choices_are_the_whole_divergence_and_fewer_are_never_more():
    torch.manual_seed(0)
    mine, theirs = (torch.randn(4, 6, 9, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    order = theirs.argsort(-1, descending=True)
    for kind in teachers.KINDS:
        whole = teachers.divergence(mine, theirs, kind)
        for count in (1, 4, 9):
            some = [teachers.with_tail(x.gather(-1, order[..., :count])) for x in (mine, theirs)]
            part = teachers.divergence(*some, kind)
            assert bool((part <= whole + 1e-6).all())
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("maker", MAKERS)
def test_what_decisions_gain(maker):
    make = MAKERS[maker]
    mine, theirs = make(np.array([[-1.0, -2.0, -3.0, 9.0]])), make(np.array([[-2.0, -1.0, -1.0, np.nan]]))
    mask = make(np.array([[True, True, True, False]]))
    np.testing.assert_allclose(np.asarray(teachers.advantage(mine, theirs, mask)), [[-1, 1, 2, 0]])
    discounted = teachers.advantage(mine, theirs, mask, gamma=0.5)
    np.testing.assert_allclose(np.asarray(discounted), [[-1 + 0.5 + 0.5, 1 + 1, 2, 0]])
    trusted = teachers.advantage(mine, theirs, mask, drift=0.5)  # |gains| 1, 1, 2: before them 0, 1/4 and 2/4 of all
    np.testing.assert_allclose(np.asarray(trusted), [[-1 * 1.5, 1 * 1.375, 2 * 1.25, 0]])


def test_far_apart_stays_finite():
    mine, theirs = torch.tensor([[-0.1, -80.0]], requires_grad=True), torch.tensor([[-300.0, -0.1]])
    for kind in teachers.KINDS:
        found = teachers.sampled(mine, theirs, kind)
        assert bool(torch.isfinite(found).all())
        assert bool(torch.isfinite(torch.autograd.grad(found.sum(), mine)[0]).all())
