"""The gradient does not know how a minibatch was cut, ordered or padded. Every recipe, every term, every gate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.experience import Experience, with_gates
from grpo.objective import objective
from grpo.recipes import RECIPES, recipe
from grpo.rollouts import Scores
from tests.batches import loaded, numbers, rollouts, taught

VARIANTS = {name: loaded(name) for name in RECIPES} | {
    "chunk": loaded("grpo").but(ratio="chunk", chunk_size=2, top_entropy=1.0, reduction="token_mean"),
    "sequence_token": loaded("gspo").but(ratio="sequence_token"),
    "uncounted": loaded("grpo").but(count_empty_rows=False),
    "entropy_over_loss": loaded("luspo").but(entropy_over="loss"),
    "kl_importance": loaded("grpo").but(kl_importance=True),
    "mask_mismatch": loaded("grpo").but(mismatch="mask", mismatch_level="sequence"),
    "step_credit": loaded("dapo").but(credit="reward_to_go", scale="batch_std", drop_no_signal=False),
}


def minibatch(x, variant, dtype, order=None, extra_steps=0):
    """The whole minibatch with its gates, and the leaf its gradient is taken at."""
    if order is not None:
        x = {key: value[order] for key, value in x.items()}
    if extra_steps:
        x = {
            key: v if v.ndim < 2 or key == "parts" else np.pad(v, ((0, 0), (0, extra_steps)) + ((0, 0),) * (v.ndim - 2))
            for key, v in x.items()
        }
    batch = Experience.build(rollouts(x, torch.as_tensor, variant), variant, torch.as_tensor(x["ref"]))
    batch = taught(batch, x, torch.as_tensor, variant)
    scores = Scores(*(torch.as_tensor(x[name]) for name in ("logp", "entropy")), None, torch.as_tensor(x["choices"]))
    return with_gates(batch, scores, variant, torch.as_tensor(x["priority"])), scores


def gradient(batch, scores, variant, cuts):
    """Loss and gradient accumulated over micro-batches; `cuts` are lists of row numbers."""
    logp = scores.logp_NT.clone().requires_grad_()
    entropy = scores.entropy_NT.clone().requires_grad_()
    total, metrics = 0.0, {}
    for rows in cuts:
        said = Scores(logp[rows], entropy[rows], None, scores.choice_logp_NTK[rows])
        terms = objective(said, batch.select(rows), variant)
        terms.loss.backward()
        total += float(terms.loss.detach())
        for key, value in terms.metrics.items():
            metrics[key] = metrics.get(key, 0.0) + float(value)
    return total, logp.grad, entropy.grad, metrics


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 1e-6)])
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_split_any_order_any_padding(name, dtype, rtol, data):
    variant = VARIANTS[name]
    groups = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=5)))
    x = numbers(data.draw(st.integers(0, 10_000)), groups, dtype=dtype)
    rows = len(x["group"])
    batch, scores = minibatch(x, variant, dtype)
    loss, grad, entropy_grad, metrics = gradient(batch, scores, variant, [list(range(rows))])
    scale = float(grad.abs().max()) or 1.0
    close = {"rtol": rtol, "atol": rtol * scale}

    order = data.draw(st.permutations(range(rows)))
    cut = data.draw(st.lists(st.integers(1, rows - 1), max_size=4, unique=True))
    cuts = [part.tolist() for part in np.split(np.asarray(order), sorted(cut))]
    split_loss, split_grad, split_entropy_grad, split_metrics = gradient(batch, scores, variant, cuts)
    np.testing.assert_allclose(split_loss, loss, rtol=10 * rtol, atol=10 * rtol)
    np.testing.assert_allclose(split_grad, grad, **close)
    np.testing.assert_allclose(split_entropy_grad, entropy_grad, **close)
    for key in metrics:
        np.testing.assert_allclose(split_metrics[key], metrics[key], rtol=1e-5, atol=1e-6, err_msg=key)

    # Another order and more padding before anything is computed: statistics, gates and all.
    moved, moved_scores = minibatch(x, variant, dtype, np.asarray(order), extra_steps=4)
    moved_loss, moved_grad, _, _ = gradient(moved, moved_scores, variant, [list(range(rows))])
    np.testing.assert_allclose(moved_loss, loss, rtol=10 * rtol, atol=10 * rtol)
    inverse = np.argsort(np.asarray(order))
    np.testing.assert_allclose(moved_grad[inverse][:, : grad.shape[1]], grad, **close)
    assert not moved_grad[inverse][:, grad.shape[1] :].any()


def test_a_wrong_denominator_would_be_noticed():
    """The test above can fail: micro-batches that count themselves give another gradient."""
    variant = recipe("dapo", drop_no_signal=False)
    x = numbers(0)
    batch, scores = minibatch(x, variant, np.float64)
    cuts = [[0, 1, 2], list(range(3, len(x["group"])))]
    _, whole, _, _ = gradient(batch, scores, variant.but(entropy_coef=0.01), cuts)
    logp = scores.logp_NT.clone().requires_grad_()
    for rows in cuts:
        part = batch.minibatch(rows, variant)
        (objective(Scores(logp[rows], scores.entropy_NT[rows]), part, variant).loss / len(cuts)).backward()
    assert (logp.grad - whole).abs().max() > 1e-3
