"""Single variants by hand: baselines (entropic, optimal token, roles, soft maximum), second moment, TOPR, turns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grpo.core import gates
from grpo.core.advantages import (
    decision_energy,
    entropic,
    optimal_token_baseline,
    role_means,
    soft_maximum,
    to_turns,
    turns,
)
from grpo.core.surrogates import topr
from tests.batches import MAKERS


@pytest.mark.parametrize("maker", MAKERS)
def test_entropic_weights_are_ln_2_away_from_equal_ones(maker):
    """One success among four: q of the best and of the others follow from the advantages."""
    make = MAKERS[maker]
    best, other = np.asarray(entropic(make(np.array([0.0, 0, 1, 0])), make(np.zeros(4, int))))[[2, 0]]
    e = 1 / (best + 1)
    q, p = 1 / (1 + 3 * e), e / (1 + 3 * e)
    assert q * math.log(4 * q) + 3 * p * math.log(4 * p) == pytest.approx(math.log(2), rel=1e-6)
    assert other == pytest.approx(3 * e / (1 + 2 * e) - 1, rel=1e-6)


def test_entropic_advantages_do_not_know_the_rewards_unit():
    value, group = np.random.default_rng(0).random(9), np.array([0] * 5 + [1] * 4)
    np.testing.assert_allclose(entropic(value, group), entropic(30 * value - 7, group), rtol=1e-6)


def test_entropic_ends():
    assert not entropic(np.full(4, 0.3), np.zeros(4, int)).any()  # nothing to tell apart
    assert entropic(np.array([2.0]), np.zeros(1, int)) == 0
    pair = entropic(np.array([0.0, 1.0]), np.zeros(2, int))
    assert pair[0] < 0 < pair[1] < 10
    failed = entropic(np.array([0.0, 1.0, np.nan, 0.5]), np.zeros(4, int), np.array([1.0, 1, 0, 1]))
    np.testing.assert_allclose(failed[[0, 1, 3]], entropic(np.array([0.0, 1, 0.5]), np.zeros(3, int)), rtol=1e-9)
    assert failed[2] == 0


@pytest.mark.parametrize("maker", MAKERS)
def test_the_farthest_decisions_go_until_the_second_moment_is_small(maker):
    make = MAKERS[maker]
    gap = make(np.array([[0.1, -0.2, 9.0], [0.0, 0.5, 0.3]]))
    mask = make(np.array([[True, True, False], [True, True, True]]))
    # squares 0, 0.01, 0.04, 0.09, 0.25: means of the smallest ones 0, 0.005, 0.0167, 0.035, 0.078
    kept = np.asarray(gates.second_moment(gap, mask, 0.036))
    assert kept.tolist() == [[True, True, False], [True, False, True]]
    assert np.asarray(gates.second_moment(gap, mask, 1.0)).sum() == 5
    assert np.asarray(gates.second_moment(gap + 1, mask, 1e-9)).sum() == 1  # one stays


def test_topr_by_hand():
    logp = torch.tensor([[-1.0, -2.0, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    ratio, advantage = torch.tensor([[3.0, 0.5, 3.0, 0.5]]).double(), torch.tensor([[2.0, 2.0, -2.0, -2.0]]).double()
    loss = topr(ratio, advantage, logp)
    assert loss.tolist() == [[2.0, 4.0, -2.0, -2.0]]
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [[-2.0, -2.0, 2.0, 1.0]]


@pytest.mark.parametrize("maker", MAKERS)
def test_optimal_token_baseline_by_hand(maker):
    """Σ G·W / Σ W at each decision of one's own; a hole is nobody's decision, and a tail of one has nothing."""
    make = MAKERS[maker]
    returns = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 9.0, 0.0, 9.0]])
    mask = np.array([[True, True, True, False], [True, False, True, False]])
    energy = np.array([[0.5, 0.25, 0.25, 9.0], [1.5, 9.0, 0.5, 9.0]])
    got = np.asarray(optimal_token_baseline(make(returns), make(energy), make(mask), make(np.zeros(2, int))))
    first, second = 0.5 / (0.5 + 1.5), 0.75 / (0.75 + 2.0)
    np.testing.assert_allclose(got, [[first, second, 0.0, 0.0], [first, 0.0, second, 0.0]], rtol=1e-12)


def test_energy_is_the_gradients_and_its_baseline_the_least_noisy():
    """On a softmax of four: no constant makes the expected square of (r − b)·∇ log π smaller."""
    logits, reward = torch.tensor([0.3, -1.0, 1.2, 0.0]).double().requires_grad_(), torch.tensor([1.0, 0, 0.2, 3])
    p = logits.softmax(0)
    pulls = [torch.autograd.grad(p.log()[i], logits, retain_graph=True)[0].square().sum() for i in range(4)]
    energy = decision_energy(p.log().detach(), p.detach().square().sum().expand(4))
    torch.testing.assert_close(energy, torch.stack(pulls))

    def noise(b):
        return float((p.detach() * (reward - b) ** 2 * energy).sum())

    best = float((p.detach() * reward * energy).sum() / (p.detach() * energy).sum())
    assert noise(best) < min(noise(best + 0.01), noise(best - 0.01), noise(float((p.detach() * reward).sum())))


@pytest.mark.parametrize("maker", MAKERS)
def test_turns_are_what_nobody_interrupts(maker):
    make = MAKERS[maker]
    mask = make(np.array([[True, True, False, True], [False, True, True, True]]))
    first, number = turns(mask)
    assert np.asarray(first).tolist() == [[True, False, False, True], [False, True, False, False]]
    value = make(np.array([[1.0, 2.0, 0.0, 4.0], [0.0, 1.0, 1.0, 1.0]]))
    assert np.asarray(to_turns(value, number))[np.asarray(mask)].tolist() == [3.0, 3.0, 4.0, 3.0, 3.0, 3.0]


def test_role_means_by_hand():
    """Each role against what it was given before, 0 at first; a try that failed moves nothing."""
    rewards, roles, counted = (
        [1.0, -1.0, 1.0, float("nan"), 0.0, 1.0],
        [7, 3, 7, 7, 3, 7],
        [True, True, True, False, 1, 1],
    )
    found, after = role_means(rewards, roles, counted, {3: 2.0}, 0.5)
    assert found == [0.0, 2.0, 0.5, 0.75, 0.5, 0.75]
    assert after == {7: 0.875, 3: 0.25}
    first, middle = role_means(rewards[:3], roles[:3], counted[:3], {3: 2.0}, 0.5)
    assert (first + role_means(rewards[3:], roles[3:], counted[3:], middle, 0.5)[0]) == found  # as cut by steps


@pytest.mark.parametrize("maker", MAKERS)
def test_soft_maximum_by_hand(maker):
    make = MAKERS[maker]
    value, group = make(np.array([0.0, 1.0, 0.0, 5.0, 3.0, 9.0])), make(np.array([0, 0, 0, 1, 1, 2]))
    weight = make(np.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    got = np.asarray(soft_maximum(value, group, 0.5, weight))
    want = 0.5 * math.log((2 + math.e**2) / 3)
    np.testing.assert_allclose(got[:5], [want, want, want, 5.0, 5.0], rtol=1e-6)
    ends = [np.asarray(soft_maximum(value, group, beta, weight))[0] for beta in (1e-3, 1e4)]
    np.testing.assert_allclose(ends, [1.0, 1 / 3], atol=2e-3)
