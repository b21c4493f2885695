"""The loss as a whole: extremes stay finite, every setting changes something, nothing masked leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo.credit import advantages
from grpo.experience import Experience, with_gates
from grpo.objective import objective
from grpo.recipes import CHOICES, RECIPES, column_types, recipe
from grpo.rollouts import Rollouts, Scores
from tests.batches import loaded, numbers, rollouts, taught


def prepared(variant, seed=0, dtype=torch.float64, **more):
    x = {key: torch.as_tensor(value) for key, value in numbers(seed).items()}
    x = {key: value.to(dtype) if value.is_floating_point() else value for key, value in x.items()}
    record = rollouts(x, torch.as_tensor, variant, **more)
    batch = taught(Experience.build(record, variant, x["ref"]), x, torch.as_tensor, variant)
    return with_gates(batch, Scores(x["logp"], x["entropy"]), variant, x["priority"]), x


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_log_ratio_gap_of_100_stays_finite(name, dtype, gap):
    variant = loaded(name)
    x = numbers(0)
    old = torch.where(torch.as_tensor(x["mask"]), -101.0, 0.0).to(dtype)
    if gap < 0:
        old = torch.where(torch.as_tensor(x["mask"]), -1.0, 0.0).to(dtype)
    record = replace(
        rollouts(
            {k: v.astype("float32") if v.dtype == "float64" else v for k, v in x.items()}, torch.as_tensor, variant
        ),
        old_logp_NT=old,
        sampled_logp_NT=old - gap / 2,
    )
    logp = (old + gap).requires_grad_()
    batch = Experience.build(record, variant, (old - gap / 2))
    scores = Scores(logp, torch.as_tensor(x["entropy"]).to(dtype))
    batch = with_gates(batch, scores, variant, torch.as_tensor(x["priority"]).float())
    loss = objective(scores, batch, variant).loss
    loss.backward()
    assert torch.isfinite(loss), loss
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_outside_the_mask_matters(name):
    """Garbage there, NaN included, changes neither value nor gradient."""
    variant = loaded(name)
    batch, x = prepared(variant)
    results = []
    for garbage in (1e6, float("nan")):
        logp = torch.where(x["mask"], x["logp"], garbage).requires_grad_()
        entropy = torch.where(x["mask"], x["entropy"], garbage)
        loss = objective(Scores(logp, entropy, choice_logp_NTK=x["choices"]), batch, variant).loss
        results.append((loss.detach(), torch.autograd.grad(loss, logp)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[0][1][~x["mask"]].any()


@pytest.mark.parametrize("name", RECIPES)
def test_everything_masked_gives_loss_zero(name):
    variant = loaded(name)
    batch, x = prepared(variant)
    empty = replace(batch, mask_NT=x["mask"] & False)
    logp = x["logp"].clone().requires_grad_()
    terms = objective(Scores(logp, x["entropy"], choice_logp_NTK=x["choices"]), empty, variant)
    terms.loss.backward()
    assert float(terms.loss.detach()) == 0.0
    assert not logp.grad.any()


OTHER = {
    "gamma": 0.5, "turn_coef": 0.5,
    "scale_ddof": 0.0, "scale_eps": 0.1, "whiten_ddof": 0.0, "whiten_eps": 0.1, "whiten_root": False,
    "reward_clip": (0.2, 0.5), "reward_weights": (1.0, 0.3), "chunk_size": 3, "log_ratio_low": -0.1,
    "log_ratio_high": 0.1, "epsilon": 0.01, "epsilon_high": 0.01, "delta": 1.01, "dual_clip": 1.05, "tau_pos": 2.0,
    "tau_neg": 3.0, "vespo_k_pos": 1.0, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0, "vespo_lambda_neg": 1.0,
    "dro_beta": 2.0, "count_empty_rows": False, "length": 50.0, "beta": 0.5, "kl_cap": 0.01, "kl_importance": True,
    "entropy_coef": 0.5, "mask_truncated": True, "drop_no_signal": True, "top_entropy": 0.3,
    "off_policy_threshold": 0.0, "mismatch_low": 1.05, "mismatch_high": 1.01, "clip_cov": 0.3, "clip_cov_low": -3.0,
    "clip_cov_high": 0.1, "bounds": "absolute", "kl_cov": 0.3, "kl_cov_coef": 5.0,
    "teacher_coef": 0.5, "outcome_coef": 0.5, "teacher_mix": 0.2, "teacher_top_k": 2, "teacher_gamma": 0.5,
    "teacher_drift": 0.5, "teacher_clip": 0.9, "m2_limit": 0.01,
}  # fmt: skip
"""A value other than the default for every setting that is not an axis."""

BASE = {
    "gamma": {"credit": "reward_to_go"},
    "whiten_ddof": {"whiten": "rows"},
    "whiten_eps": {"whiten": "rows"},
    "whiten_root": {"whiten": "rows", "whiten_eps": 0.1},
    "chunk_size": {"ratio": "chunk", "chunk_size": 2},
    "tau_pos": {"surrogate": "sapo"},
    "tau_neg": {"surrogate": "sapo"},
    "vespo_k_pos": {"surrogate": "vespo"},
    "vespo_lambda_pos": {"surrogate": "vespo"},
    "vespo_k_neg": {"surrogate": "vespo"},
    "vespo_lambda_neg": {"surrogate": "vespo"},
    "dro_beta": {"surrogate": "dro"},
    "bounds": {"surrogate": "cispo", "epsilon_high": 1.1},
    "length": {"reduction": "fixed_length", "length": 7.0},
    "mismatch_low": {"mismatch": "truncate"},
    "mismatch_high": {"mismatch": "truncate"},
    "mismatch_level": {"mismatch": "truncate"},
    "clip_cov_low": {"clip_cov": 0.9, "clip_cov_low": 0.0},
    "clip_cov_high": {"clip_cov": 0.9, "clip_cov_low": 0.0},
    "clip_cov": {"clip_cov_low": 0.0},
    "kl_cov_coef": {"kl_cov": 0.5},
    "entropy_over": {"entropy_coef": 0.1},
    "outcome_coef": {"teacher_coef": 1.0},
    "teacher_in": {"teacher_coef": 1.0},
    "teacher_kl": {"teacher_coef": 1.0, "teacher_in": "loss"},
    "teacher_over": {"teacher_coef": 1.0, "teacher_in": "loss"},
    "teacher_mix": {"teacher_coef": 1.0, "teacher_in": "loss", "teacher_kl": "js"},
    "teacher_top_k": {"teacher_coef": 1.0, "teacher_in": "loss", "teacher_over": "top_k"},
    "teacher_gamma": {"teacher_coef": 1.0},
    "teacher_drift": {"teacher_coef": 1.0},
    "teacher_clip": {"teacher_coef": 1.0, "teacher_in": "loss"},
}
"""What must be switched on for a setting to matter (elsewhere it is refused or documented)."""


def fingerprint(variant):
    extra = {"baseline_NT": torch.as_tensor(numbers(0)["entropy"])}
    batch, x = prepared(variant, **extra)
    logp = x["logp"].clone().requires_grad_()
    exact_kl = torch.where(x["mask"], (logp - x["ref"]) ** 2, 0.0)
    choices = x["choices"][..., : variant.teacher_top_k]
    loss = objective(Scores(logp, x["entropy"], exact_kl, choices), batch, variant).loss
    return torch.cat([loss.detach()[None], torch.autograd.grad(loss, logp)[0].flatten()])


ELSEWHERE = ("teacher_sees", "baseline_decay", "value_beta")
"""The affair of a room, or of who keeps what earlier tries were given."""


@pytest.mark.parametrize("setting", [name for name in column_types() if name not in ELSEWHERE])
def test_every_setting_changes_the_result(setting):
    base = recipe("grpo", beta=0.1, **BASE.get(setting, {}))
    now = base.columns()[setting]
    values = [v for v in CHOICES[setting] if v != now] if setting in CHOICES else [OTHER[setting]]
    for value in values:
        more = NEEDED.get((setting, value), {})
        if value == "auto":
            continue
        before = fingerprint(base.but(**{k: v for k, v in more.items() if k not in ("chunk_size", "length")}))
        assert not torch.equal(fingerprint(base.but(**{setting: value}, **more)), before), f"{setting}={value}"


NEEDED = {
    ("ratio", "chunk"): {"chunk_size": 2},
    ("reduction", "fixed_length"): {"length": 9.0},
    ("kl_gradient", "own"): {"kl_estimator": "k1"},  # elsewhere auto is the estimator's own already
    ("kl_gradient", "k3"): {"kl_estimator": "k2"},
    ("kl_gradient", "k1"): {"kl_estimator": "k2"},
    ("baseline", "entropic"): {"scale": "none"},
    ("baseline", "optimal_token"): {"scale": "none", "credit": "reward_to_go"},
}
"""What else a value needs before it means anything, on both sides of the comparison."""


def test_exact_kl_must_be_given():
    variant = recipe("grpo", beta=0.1, kl_estimator="exact")
    batch, x = prepared(variant)
    with pytest.raises(ValueError, match="needs a policy that gives exact_kl_NT"):
        objective(Scores(x["logp"]), batch, variant)


def test_detached_old_log_probs_are_the_policy_gradient():
    """One pass, one minibatch: ratio 1, gradient −A/len/rows, whatever was recorded."""
    variant = recipe("grpo")
    x = {key: torch.as_tensor(value) for key, value in numbers(0).items()}
    batch = Experience.build(rollouts(x, torch.as_tensor), variant, detached=True)
    logp = x["logp"].clone().requires_grad_()
    terms = objective(Scores(logp), batch, variant)
    terms.loss.backward()
    mask = x["mask"].double()
    want = -batch.advantage_NT * mask / mask.sum(1, keepdim=True).clip(min=1) / len(mask)
    torch.testing.assert_close(logp.grad, want)
    assert float(terms.metrics["ratio"]) == pytest.approx(1.0)


def test_continuation_weights_scale_each_decision():
    variant = recipe("dapo", drop_no_signal=False, beta=0.1)
    weight = torch.full((13, 6), 0.5, dtype=torch.float64)
    half, x = prepared(variant, weight_NT=weight)
    full, _ = prepared(variant)
    scores = Scores(x["logp"])
    torch.testing.assert_close(objective(scores, half, variant).loss, 0.5 * objective(scores, full, variant).loss)


def test_whole_trajectory_as_one_chunk_is_rloo():
    """ratio=chunk with chunk_size=T and ratio=trajectory are the same thing."""
    whole = recipe("rloo", kl_in="loss")
    chunk = whole.but(ratio="chunk", chunk_size=6)
    batch, x = prepared(whole)
    scores = Scores(x["logp"])
    torch.testing.assert_close(objective(scores, batch, whole).loss, objective(scores, batch, chunk).loss)


def test_chunks_of_one_are_tokens():
    token = recipe("grpo", beta=0.1, entropy_coef=0.1)
    batch, x = prepared(token)
    scores = Scores(x["logp"], x["entropy"])
    chunk = token.but(ratio="chunk")
    torch.testing.assert_close(objective(scores, batch, chunk).loss, objective(scores, batch, token).loss)


def test_entropy_bonus_without_entropies_follows_the_score_function():
    variant = recipe("grpo", entropy_coef=1.0)
    batch, x = prepared(variant)
    batch = replace(batch, advantage_NT=batch.advantage_NT * 0)
    logp = x["logp"].clone().requires_grad_()
    terms = objective(Scores(logp), batch, variant)
    terms.loss.backward()
    mask = x["mask"].double()
    torch.testing.assert_close(logp.grad, torch.where(x["mask"], x["logp"], 0.0) / mask.sum())
    torch.testing.assert_close(terms.entropy, -(torch.where(x["mask"], x["logp"], 0.0)).sum() / mask.sum())


def test_rewards_are_only_read():
    x = numbers(0)
    before = torch.as_tensor(x["parts"]).clone()
    for name in RECIPES:
        advantages(rollouts(x, torch.as_tensor, recipe(name)), recipe(name))
    assert torch.equal(torch.as_tensor(x["parts"]), before)


@pytest.mark.parametrize("shape", [(13, 1), (6,), (1, 1), (13, 5)])
def test_log_probs_of_another_shape_are_refused(shape):
    batch, _ = prepared(recipe("grpo"))
    with pytest.raises(ValueError, match="logp_NT has shape"):
        objective(Scores(torch.zeros(shape, dtype=torch.float64)), batch, recipe("grpo"))


def test_clip_fractions_are_of_the_clip_that_is_there():
    def metrics(**changes):
        variant = recipe("grpo", **changes)
        batch, x = prepared(variant)
        return objective(Scores(x["logp"]), batch, variant).metrics

    assert "clip_ratio/region_mean" not in metrics(surrogate="policy_gradient")
    assert metrics(surrogate="cispo", bounds="absolute", epsilon_high=50.0)["clip_ratio/region_mean"] == 0
    assert metrics(surrogate="cispo", bounds="absolute", epsilon_high=0.01)["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize("gradient", ["auto", "k3"])
def test_forward_kl_follows_the_right_gradient(gradient):
    """KL(ref‖π): value of the forward estimator, expected gradient −Σ ref·∇log π, by enumeration."""
    logits = torch.tensor([0.5, -0.3, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.4, -0.2], dtype=torch.float64).log_softmax(-1)
    variant = recipe("grpo", beta=1.0, kl_direction="other_current", kl_gradient=gradient, reduction="sequence_sum")
    logp = logits.log_softmax(-1)
    record = rollouts_of(logp.detach())
    batch = replace(Experience.build(record, variant, ref[:, None]), advantage_NT=torch.zeros(3, 1).double())
    weighted = replace(batch, rollouts=record.but(weight_NT=logp.detach().exp()[:, None] * 3))
    got = torch.autograd.grad(objective(Scores(logp[:, None]), weighted, variant).loss, logits)[0]
    want = torch.autograd.grad((ref.exp() * (ref - logits.log_softmax(-1))).sum(), logits)[0]
    torch.testing.assert_close(got, want)


def rollouts_of(logp):
    """One row for each choice of a softmax."""
    rows = len(logp)
    return Rollouts(
        group_N=torch.zeros(rows, dtype=torch.long),
        mask_NT=torch.ones(rows, 1, dtype=torch.bool),
        old_logp_NT=logp[:, None],
        reward_N=torch.zeros(rows).double(),
    )
