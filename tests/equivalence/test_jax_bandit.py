"""The bandit trained in JAX with the same `grpo.objective` has the weights that PyTorch gives.

The sampled arms and rewards are PyTorch's; log-probs, advantages, loss, gradient and optimizer are JAX's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from grpo import Experience, GRPOTrainer, Rollouts
from grpo.bandit import BanditConfig, BanditSource, SoftmaxPolicy
from grpo.core.kl import exact_entropy
from grpo.objective import objective
from grpo.reference import FrozenReference
from grpo.rollouts import Scores

SHORT = {"phase_length": 5}
"""All five phases in 25 steps."""


@pytest.fixture(autouse=True)
def _float64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def torch_trainer(config: BanditConfig) -> GRPOTrainer:
    """`grpo.bandit.make_trainer` in float64."""
    policy = SoftmaxPolicy(torch.zeros(config.arms, dtype=torch.float64))
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[config.optimizer]
    optimizer = make([policy.logits_V], lr=config.learning_rate, weight_decay=config.weight_decay)
    source = BanditSource(policy, config)
    return GRPOTrainer(config, policy, FrozenReference.copy_of(policy), optimizer=optimizer, source=source)


class JaxTrainer:
    """The same steps in plain JAX: uniform start, gradient clipping, SGD or Adam with decoupled decay by hand."""

    def __init__(self, config: BanditConfig):
        self.config, self.recipe = config, config.algorithm
        self.logits_V = self.reference_V = jnp.zeros(config.arms)
        self.first_V = self.second_V = jnp.zeros(config.arms)
        self.updates = 0

    def step(self, group_N, arm_N, reward_N) -> None:
        """The passes of one step over given pulls."""

        def logp_NT(some_V):
            return jax.nn.log_softmax(some_V)[arm_N][:, None]

        def loss(logits_V):
            entropy_NT = jnp.broadcast_to(exact_entropy(jax.nn.log_softmax(logits_V)), experience.mask_NT.shape)
            return objective(Scores(logp_NT(logits_V), entropy_NT), experience, self.recipe).loss

        rollouts = Rollouts(
            group_N=group_N,
            mask_NT=jnp.ones((len(arm_N), 1), bool),
            old_logp_NT=logp_NT(self.logits_V),
            reward_N=reward_N,
        )
        ref_logp_NT = logp_NT(self.reference_V) if self.recipe.beta else None
        experience = Experience.build(rollouts, self.recipe, ref_logp_NT)
        for _ in range(self.config.num_iterations):
            _, gradient_V = jax.value_and_grad(loss)(self.logits_V)
            norm = jnp.sqrt((gradient_V**2).sum())
            self.update(gradient_V * jnp.minimum(1.0, self.config.max_grad_norm / (norm + 1e-6)))

    def update(self, gradient_V) -> None:
        rate, self.updates = self.config.learning_rate, self.updates + 1
        shrunk_V = self.logits_V * (1 - rate * self.config.weight_decay)
        if self.config.optimizer == "adamw":
            self.first_V = 0.9 * self.first_V + 0.1 * gradient_V
            self.second_V = 0.999 * self.second_V + 0.001 * gradient_V**2
            mean_V, square_V = self.first_V / (1 - 0.9**self.updates), self.second_V / (1 - 0.999**self.updates)
            gradient_V = mean_V / (jnp.sqrt(square_V) + 1e-8)
        self.logits_V = shrunk_V - rate * gradient_V


@pytest.mark.parametrize(
    "settings",
    [
        SHORT,
        {"loss_type": "dr_grpo", "learning_rate": 30.0, "weight_decay": 0.004, "noise": 0.1, **SHORT},
        pytest.param(
            {"beta": 0.05, "entropy_coef": 0.02, "num_iterations": 3, "groups_per_step": 2, "group_size": 8, **SHORT},
            marks=pytest.mark.slow,
        ),
        {"optimizer": "adamw", "learning_rate": 2.0, "weight_decay": 0.1, "noise": 0.1, **SHORT},
    ],
    ids=["preset", "dr_grpo", "kl_entropy_passes", "adamw"],
)
def test_same_weights_in_jax_and_torch(settings):
    config = BanditConfig(seed=7, **settings)
    ours, theirs = torch_trainer(config), JaxTrainer(config)
    farthest = 0.0
    for step in range(5 * config.phase_length):
        rollouts = ours.step().experience.rollouts
        theirs.step(*(jnp.asarray(array.numpy()) for array in (rollouts.group_N, rollouts.inputs, rollouts.reward_N)))
        expected = ours.policy.parameters()["logits"].detach().numpy()
        np.testing.assert_allclose(np.asarray(theirs.logits_V), expected, rtol=0, atol=1e-6, err_msg=f"step {step}")
        farthest = max(farthest, np.abs(expected).max())
    assert farthest > 1, "hardly anything was learned, so hardly anything was compared"
