"""The actor: it reads latents, and scores the decisions it made in imagination. Latents come without gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from grpo.envs.heads import Head
from grpo.rollouts import Rollouts, Scores, by_rows
from grpo.worldmodel.actions import Actions
from grpo.worldmodel.model import networks
from grpo.worldmodel.model.adapters import switched_off, trained

FIRST_SCALE = 0.01
"""Of the last layer's weights at first: every action about equally likely."""


def make_network(width: int, units: int, head: Head, layers: int, seed: int) -> nn.Module:
    """From a latent of `width` numbers to what the head needs."""
    with torch.random.fork_rng(devices=[]):  # the same seed gives the same actor, and nobody else's numbers move
        torch.default_generator.manual_seed(seed)
        return networks.head(width, units, head.size, layers, FIRST_SCALE)


class ActorPolicy:
    """A network and an action head. `inputs` of its rollouts: flat (N, T, F) and action (N, T, …), old (N, T, D)."""

    def __init__(self, network: nn.Module, head: Head) -> None:
        self.network, self.head, self.actions = network, head, Actions(head)
        self.version = 0
        self.module = nn.ModuleDict({"network": network, "head": head})

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return next(self.module.parameters()).device

    def score(self, rows: Rollouts, entropy: bool = False) -> Scores:
        """log π of recorded actions; the entropy and KL(old‖π) exactly, since the head knows the distribution."""
        inputs = rows.inputs
        out = self.network(inputs["flat"])
        return Scores(
            logp_NT=self.head.logp(out, inputs["action"]),
            entropy_NT=self.head.entropy(out) if entropy else None,
            exact_kl_NT=self.head.kl(inputs["old"], out) if "old" in inputs else None,
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """What is trained: everything, or the adapters where there are some."""
        return trained(self.module)

    split = staticmethod(by_rows)

    def train(self) -> None:
        """Nothing differs between learning …"""

    def eval(self) -> None:
        """… and acting."""


class WithoutAdapters:
    """The agent as it was before it was adapted: the same weights with the adapters off."""

    def __init__(self, policy: ActorPolicy) -> None:
        self._policy = policy

    @torch.no_grad()
    def score(self, rows: Rollouts) -> Tensor:
        """Its log-probs of the recorded actions."""
        with switched_off(self._policy.module):
            logp_NT: Tensor = self._policy.score(rows).logp_NT
        return logp_NT

    def sync(self, policy: Mapping[str, Tensor], alpha: float) -> None:
        """Refused by the settings: what is off cannot follow."""
        raise RuntimeError("the agent without its adapters cannot follow; leave ref_sync_steps out")

    def parameters(self) -> Mapping[str, Tensor]:
        """Nothing of its own."""
        return {}
