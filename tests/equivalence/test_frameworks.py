"""NumPy, PyTorch and JAX give the same numbers and gradients; their compilers change nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from grpo.experience import Experience, with_gates
from grpo.objective import objective
from grpo.recipes import RECIPES
from grpo.rollouts import Scores
from tests.batches import MAKERS, loaded, numbers, rollouts, taught

JITTED = ("grpo", "gspo", "abs")
"""Compiled whole; the others operation by operation, which they share: a program each takes longer than it runs."""


def build(kind, variant, x):
    make = MAKERS[kind]
    batch = taught(Experience.build(rollouts(x, make, variant), variant, make(x["ref"])), x, make, variant)
    return with_gates(batch, Scores(make(x["logp"]), make(x["entropy"])), variant, make(x["priority"]))


@pytest.mark.parametrize("on_policy", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("name", [*RECIPES, "abs"])
def test_same_values_and_gradients(name, on_policy):
    """On-policy too: at ratio 1 and π = ref the frameworks' own |x| and clip differ in their gradients."""
    variant = loaded("grpo").but(kl_estimator="abs") if name == "abs" else loaded(name)
    x = numbers(3)
    if on_policy:
        x["old"] = x["ref"] = x["logp"]
    losses, grads = {}, {}
    for kind, make in MAKERS.items():
        batch = build(kind, variant, x)
        entropy = make(x["entropy"])

        choices = make(x["choices"])

        def loss(logp, batch=batch, entropy=entropy, choices=choices):
            mine = choices + 0.1 * logp[:, :, None]
            return objective(Scores(logp, entropy, choice_logp_NTK=mine), batch, variant).loss

        if kind == "torch":
            leaf = make(x["logp"]).clone().requires_grad_()
            losses[kind] = loss(leaf)
            grads[kind] = torch.autograd.grad(losses[kind], leaf)[0].numpy()
            losses[kind] = losses[kind].detach()
        elif kind == "jax":
            differentiated = jax.value_and_grad(loss)
            losses[kind], grads[kind] = (jax.jit(differentiated) if name in JITTED else differentiated)(make(x["logp"]))
        else:
            losses[kind] = loss(make(x["logp"]))
    np.testing.assert_allclose(float(losses["torch"]), float(losses["numpy"]), rtol=1e-12)
    np.testing.assert_allclose(float(losses["jax"]), float(losses["numpy"]), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(grads["jax"]), grads["torch"], rtol=1e-9, atol=1e-15)
    assert np.abs(grads["torch"]).sum() > 0


def test_single_precision_stays_single():
    """Nothing is silently widened to double."""
    x = numbers(3, dtype=np.float32)
    variant = loaded("grpo")
    batch = build("jax", variant, x)
    loss = objective(Scores(jnp.asarray(x["logp"]), jnp.asarray(x["entropy"])), batch, variant).loss
    assert loss.dtype == jnp.float32
    want = objective(Scores(x["logp"], x["entropy"]), build("numpy", variant, x), variant).loss
    np.testing.assert_allclose(float(loss), float(want), rtol=1e-5)


def test_torch_compile_traces_the_objective_whole():
    """No graph break: the loss can be fused with a model's own forward."""
    x, variant = numbers(3), loaded("grpo")
    batch = build("torch", variant, x)
    entropy = torch.as_tensor(x["entropy"])

    def loss(logp):
        return objective(Scores(logp, entropy), batch, variant).loss

    logp = torch.as_tensor(x["logp"])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logp), loss(logp))
