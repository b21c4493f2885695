"""Every row of the table: complete, finite on a bandit, right signs, exact zeros, clear errors."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from grpo.config import GRPOConfig
from grpo.core import surrogates
from grpo.credit import advantages
from grpo.experience import Experience, with_gates
from grpo.objective import objective
from grpo.recipes import CHOICES, RECIPES, Recipe, recipe, table_markdown, table_text
from grpo.rollouts import Rollouts, Scores, Taught

REQUIRED = [
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "luspo",
    "vespo",
    "dppo",
    "gpg",
    "rloo",
    "reinforce++",
    "maxrl",
    "gdpo",
    "opo",
    "lite_ppo",
]
PAYOFF = torch.tensor([0.1, 0.2, 0.0, 0.9, 0.3], dtype=torch.float64)
GROUPLESS = ("reinforce++",)
OUTSIDE = ("greedy", "role_mean", "optimal_value")
ALONE = [name for name, row in RECIPES.items() if row.whiten == "none" and row.baseline not in OUTSIDE]
"""Rows in which a group says nothing but what its members differ in."""


def tries(actions, logp, rewards, groups, turns=False):
    """Rollouts of one-decision trajectories."""
    rows = len(actions)
    return Rollouts(
        group_N=torch.as_tensor(groups),
        mask_NT=torch.ones(rows, 1, dtype=torch.bool),
        old_logp_NT=logp.reshape(rows, 1),
        reward_parts_NK=rewards.reshape(rows, 1),
        baseline_NT=torch.full((rows, 1), 0.5, dtype=rewards.dtype),  # what a greedy try was given, say
        energy_NT=torch.ones(rows, 1, dtype=rewards.dtype),
        group_NT=torch.as_tensor(groups).reshape(rows, 1) if turns else None,
    )


def lesson(actions, teacher_logits):
    """What a teacher with these logits (rows, choices) says: of what was sampled, and of its likeliest choices."""
    logp = teacher_logits.log_softmax(-1)
    best = logp.topk(3, -1)
    return Taught(logp.gather(-1, actions[:, None]), best.indices[:, None], best.values[:, None])


def scores_of(logits, actions, choice_NTK=None):
    """Of one decision a row."""
    logp = logits.log_softmax(-1)
    choices = None if choice_NTK is None else logp.gather(-1, choice_NTK[:, 0])[:, None]
    return Scores(logp.gather(-1, actions[:, None]), choice_logp_NTK=choices)


def test_the_required_rows_are_there():
    assert set(REQUIRED) <= set(RECIPES)
    for name, row in RECIPES.items():
        assert row.name == name
        assert re.search(r"arXiv:\d{4}\.\d{5}", row.paper), name
        assert len(row.follows) > 20, f"{name} does not say whose definition it follows"


def test_rows_differ():
    """No two names for one algorithm."""
    bare = [replace(row, name="", paper="", follows="") for row in RECIPES.values()]
    assert len(set(bare)) == len(bare)


@pytest.mark.parametrize("name", RECIPES)
def test_twenty_steps_on_a_softmax_bandit(name):
    """Finite throughout, a gradient at every step that has signal, and the best arm gains; or what a teacher takes.

    Rewards pay nothing where a teacher alone teaches, so that only its term can move the policy.
    """
    variant = recipe(name, beta=0.0)
    teacher = torch.tensor([0.0, 0.0, 0.0, 3.0, 0.0], dtype=torch.float64).expand(32, 5)
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)  # two starts, five arms
    optimizer = torch.optim.Adam([logits], lr=0.1)
    groups = torch.arange(2).repeat_interleave(16)
    gradients = []
    for _ in range(20):
        with torch.no_grad():
            actions = torch.multinomial(logits.softmax(-1)[groups], 1, generator=generator).squeeze(-1)
            old_logp = logits.log_softmax(-1)[groups, actions]
        noise = 0.05 * torch.rand(32, generator=generator, dtype=torch.float64)
        rewards = (PAYOFF[actions] + noise) * bool(variant.outcome_coef)
        experience = Experience.build(tries(actions, old_logp, rewards, groups, bool(variant.turn_coef)), variant)
        if variant.teacher_coef:
            experience = experience.taught(lesson(actions, teacher), variant)
        for _ in range(2):
            scores = scores_of(logits[groups], actions, experience.rollouts.choice_NTK)
            priority = torch.rand(32, 1, generator=generator, dtype=torch.float64)
            batch = with_gates(experience, scores, variant, priority)
            terms = objective(scores, batch, variant)
            optimizer.zero_grad()
            terms.loss.backward()
            assert torch.isfinite(terms.loss) and torch.isfinite(logits.grad).all()
            assert all(torch.isfinite(value) for value in terms.metrics.values())
            gradients.append(float(logits.grad.abs().sum()))
            optimizer.step()
    assert gradients[0] > 0 and sum(gradient > 0 for gradient in gradients) > 20  # of 40; tight clips hold some back
    assert (logits.softmax(-1)[:, 3] > 0.25).all(), logits.softmax(-1)  # uniform is 0.2


TAUGHT = [name for name, row in RECIPES.items() if row.teacher_coef]


@pytest.mark.parametrize("name", TAUGHT)
def test_what_the_teacher_would_rather_do_becomes_likelier(name):
    """And what it would not becomes less likely; a policy that is its teacher stays as it is."""
    variant, actions = recipe(name), torch.tensor([0, 1])
    logits = torch.zeros(2, 4, dtype=torch.float64)
    for teacher, signs in ((torch.tensor([1.0, -1.0, 0.0, 0.0]).double(), (1, -1)), (logits[0], (0, 0))):
        rewards = torch.tensor([0.0, 1.0]).double()  # against the teacher's word: they do not count here
        experience = Experience.build(tries(actions, logits.log_softmax(-1)[:, 0], rewards, [0, 0]), variant)
        experience = experience.taught(lesson(actions, teacher.expand(2, 4)), variant)
        leaf = logits.clone().requires_grad_()
        objective(scores_of(leaf, actions, experience.rollouts.choice_NTK), experience, variant).loss.backward()
        pulled = -leaf.grad * (leaf.grad.abs() > 1e-12)  # float64, summed in another order
        assert tuple(pulled[[0, 1], actions].sign().tolist()) == signs and torch.isfinite(leaf.grad).all()
        assert bool(pulled.any()) == any(signs)


@pytest.mark.parametrize("name", RECIPES)
def test_advantage_has_the_sign_of_the_comparison(name):
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.2, 0.8], dtype=torch.float64)
    groups = [0, 0, 0, 0, 1, 1]
    got = advantages(tries(rewards, rewards * 0, rewards, groups, name == "gigpo"), recipe(name))[:, 0]
    if name == "pass_at_k":
        want = torch.tensor([0.0, 1, 0, 0, 0, 1], dtype=torch.float64)
    elif name == "discover":  # all but the best are held back
        want = torch.tensor([-1.0, 1, -1, -1, -1, 1], dtype=torch.float64)
    elif name in GROUPLESS:
        want = (rewards - rewards.mean()).sign()
    else:
        want = torch.tensor([-1.0, 1, 0, 0, -1, 1], dtype=torch.float64)
    torch.testing.assert_close(got.sign() * (got.abs() > 1e-12), want)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("sign", "ratio_moves"), [(1.0, "up"), (-1.0, "down")])
def test_gradient_raises_what_was_better(name, sign, ratio_moves):
    """A step against the gradient makes a better try likelier and a worse one less likely."""
    variant = recipe(name, beta=0.0)
    logp = torch.full((2, 1), -1.0, dtype=torch.float64)
    two = tries(logp, logp, torch.tensor([1.0, 0.0]).double(), [0, 0], bool(variant.turn_coef))
    experience = Experience.build(two, variant)
    advantage = torch.tensor([[sign], [0.0]], dtype=torch.float64)
    leaf = logp.clone().requires_grad_()
    batch = replace(experience, advantage_NT=advantage)
    objective(Scores(leaf), batch, variant).loss.backward()
    assert float(leaf.grad[0, 0]) * sign < 0, ratio_moves
    assert float(leaf.grad[1, 0]) == 0.0


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("flat", [[0.1] * 7, [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [1 / 3] * 3, [0.0] * 4])
def test_a_group_without_spread_gets_exactly_zero(name, dtype, flat):
    rewards = torch.tensor([*flat, 0.0, 0.7, 0.2], dtype=dtype)
    groups = [0] * len(flat) + [1] * 3
    got = advantages(tries(rewards, rewards * 0, rewards, groups, name == "gigpo"), recipe(name))[:, 0]
    assert (got[: len(flat)] == 0).all(), got
    assert got[len(flat) :].abs().max() > 0


def test_ties_are_judged_by_what_was_summed():
    """0.1 + 0.2 − 0.3 is 5.6e-17, not 0: the same reward as 0 + 0 + 0 for every purpose."""
    parts = torch.tensor([[0.1, 0.2, -0.3], [0.0, 0.0, 0.0], [0.1, 0.2, -0.3]], dtype=torch.float64)
    record = Rollouts(
        group_N=torch.zeros(3, dtype=torch.long),
        mask_NT=torch.ones(3, 1, dtype=torch.bool),
        old_logp_NT=torch.zeros(3, 1, dtype=torch.float64),
        reward_parts_NK=parts,
    )
    assert not advantages(record, recipe("grpo", scale_eps=0.0)).any()
    assert not Experience.build(record, recipe("dapo")).mask_NT.any()


@pytest.mark.parametrize("name", [name for name in ALONE if name != "otb"])  # a tail of one has baseline 0
def test_a_single_try_has_no_signal(name):
    rewards = torch.tensor([0.9, 0.0, 0.7, 0.2], dtype=torch.float64)
    got = advantages(tries(rewards, rewards * 0, rewards, [7, 1, 1, 1], name == "gigpo"), recipe(name))[:, 0]
    assert float(got[0]) == 0.0


@pytest.mark.parametrize("axis", CHOICES)
def test_unknown_choice_lists_the_known_ones(axis):
    with pytest.raises(ValueError, match=f"{axis}='nonsense' is not one of {re.escape(CHOICES[axis][0])}"):
        recipe("grpo").but(**{axis: "nonsense"})


def test_a_surrogate_of_ones_own_is_known_as_soon_as_it_is_defined():
    try:

        @dataclass(frozen=True)
        class Doubled(surrogates.Unclipped):
            kind = "doubled"

        assert Recipe("mine", surrogate=Doubled()).surrogate.kind == "doubled"
        assert GRPOConfig(surrogate="doubled").recipe.surrogate == Doubled()
    finally:
        del surrogates.SURROGATES["doubled"]
    with pytest.raises(ValueError, match="surrogate='clip' is no surrogate; give a record"):
        Recipe("mine", surrogate="clip")


def test_a_star_po_is_a_regression_on_the_best_policys_advantage():
    """The gradient of (β·log π/π_start − (r − V*))² / 2β, also behind the sampler."""
    drawn, beta = torch.Generator().manual_seed(1), 0.1
    logp, old, start = -torch.rand(3, 4, 3, generator=drawn, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]) > 0
    reward, value = torch.tensor([1.0, 0.0, 0.3, 1.0]).double(), torch.tensor([0.6, 0.6, 0.2, 0.2]).double()
    rollouts = Rollouts(torch.tensor([0, 0, 1, 1]), mask, old, reward, baseline_NT=value[:, None].expand(4, 3))
    variant, leaf = recipe("a_star_po", beta=beta, dro_beta=beta), logp.clone().requires_grad_()
    got = objective(Scores(leaf), Experience.build(rollouts, variant, start), variant).loss
    implied = beta * ((leaf - start) * mask).sum(1)
    want = ((implied - (reward - value)) ** 2).mean() / (2 * beta)
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaf)[0] for loss in (got, want)))


def test_unknown_names_say_what_was_meant():
    with pytest.raises(ValueError, match='unknown recipe "dr-grpo"; did you mean "dr_grpo"'):
        recipe("dr-grpo")
    with pytest.raises(ValueError, match="no setting 'epsilon_hi'; did you mean \"epsilon_high\""):
        recipe("grpo", epsilon_hi=0.3)
    with pytest.raises(ValueError, match='did you mean "group_mean"'):
        recipe("grpo", baseline="groupmean")


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"chunk_size": 4}, "chunk_size has no effect without ratio=chunk"),
        ({"ratio": "trajectory", "top_entropy": 0.2}, "pick single decisions"),
        ({"delta": 2.0, "surrogate": "sapo"}, "delta=2.0 has no effect here: it needs surrogate=clip"),
        ({"credit": "reward_to_go", "whiten": "rows"}, "use whiten=decisions"),
        ({"kl_in": "reward", "kl_to": "old"}, "use kl_to=reference"),
        ({"kl_direction": "other_current", "kl_estimator": "k1"}, "needs kl_estimator k3 or exact"),
        ({"length": 5.0}, "length has no effect without reduction=fixed_length"),
        ({"top_entropy": 0.0}, r"top_entropy is a share in \(0, 1\]"),
        ({"epsilon": -0.1}, "must not be negative"),
        ({"gamma": 1.5}, r"gamma is in \[0, 1\]"),
        ({"surrogate": "geometric", "ratio": "sequence"}, "use ratio=token"),
        ({"bounds": "absolute"}, "bounds=absolute has no effect here: it needs surrogate=cispo"),
        ({"bounds": "absolute", "surrogate": "cispo"}, "needs epsilon_high, the cap"),
        ({"surrogate": "vespo", "mismatch": "mask", "mismatch_level": "sequence"}, "use mismatch_level=token"),
        ({"kl_importance": True, "kl_direction": "other_current"}, "kl_importance is for kl_direction=current_other"),
        ({"kl_importance": True, "kl_gradient": "k2"}, "has the right gradient already"),
        ({"kl_estimator": "exact", "kl_cap": 1.0}, "kl_cap is for sampled estimators"),
        ({"credit": "per_reward", "kl_in": "reward", "beta": 0.1}, "kl_in=reward needs another credit"),
        ({"credit": "reward_to_go", "drop_no_signal": True}, "it needs credit=trajectory"),
        ({"surrogate": "sapo", "tau_pos": 0.0}, "tau_pos must be positive"),
        ({"dual_clip": -1.0}, "dual_clip must be positive"),
        ({"beta": -0.1}, "not negative"),
        ({"epsilon": float("nan")}, "epsilon must be a finite number, got nan"),
        ({"epsilon": "0.2"}, "epsilon must be a finite number, got '0.2'"),
        ({"mismatch_low": 2.0, "mismatch_high": 1.0}, "mismatch_low must not be above"),
        ({"ratio": "chunk", "chunk_size": 2.5}, "whole number"),
        ({"clip_cov": 5.0}, r"shares in \[0, 1\]"),
        ({"baseline": "optimal_token", "scale": "none"}, "optimal_token is of each decision: credit=reward_to_go"),
        ({"baseline": "optimal_token", "credit": "reward_to_go"}, "compared already; set scale=none"),
        ({"baseline": "greedy", "credit": "per_reward"}, "baseline=greedy needs another credit"),
        ({"turn_coef": 1.0, "credit": "reward_to_go"}, "turn_coef stands beside credit=trajectory"),
        ({"turn_coef": 1.0, "baseline": "none"}, "turn_coef compares with a mean"),
        ({"turn_coef": -1.0}, "turn_coef must not be negative"),
    ],
)
def test_combinations_without_meaning_are_refused(changes, remedy):
    with pytest.raises(ValueError, match=remedy):
        recipe("grpo", **changes)


def test_k1_in_the_loss_is_resolved_and_said():
    """Its own expected gradient is zero: value k1, gradient k2, unless asked for literally."""
    k1 = recipe("grpo", beta=0.1, kl_estimator="k1")
    assert k1.kl_gradient_estimator == "k2"
    assert "gradient is k2's" in k1.notices()[0]
    literal = k1.but(kl_gradient="own")
    assert literal.kl_gradient_estimator is None and literal.notices() == []
    assert recipe("grpo", beta=0.1).notices() == []
    assert recipe("rloo", beta=0.1).notices() == []  # k1 in the reward is a value: nothing to resolve


def test_tables_have_every_row():
    text, page = table_text(), table_markdown()
    for name, row in RECIPES.items():
        assert re.search(rf"^{re.escape(name)}\s", text, re.MULTILINE)
        assert f"| `{name}` |" in page
        assert row.follows in page and row.follows in text


def test_recipes_are_frozen_and_hashable():
    with pytest.raises(AttributeError):
        recipe("grpo").beta = 1.0
    assert hash(recipe("grpo")) == hash(Recipe(**vars(recipe("grpo"))))
    assert np.isfinite(recipe("grpo").surrogate.epsilon)
