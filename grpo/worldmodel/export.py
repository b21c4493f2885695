"""The agent as an ONNX file: what it sees and what it remembers in, greedy action and memory out.

Inputs are what the world model sees (`View`): "vector", all numbers of an observation in a row, and pictures brought to
their size, bytes, channels last. "hidden" is zeros when an episode begins. Where the agent in training draws what a
state may be, the file takes the likeliest.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grpo.envs.onnx import ROWS, export_onnx
from grpo.worldmodel.actions import Actions
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy
from grpo.worldmodel.views import View


class Agent(nn.Module):
    """(seen, hidden) → (action in the environment's units, the actor's numbers, hidden)."""

    def __init__(self, model: WorldModel, policy: ActorPolicy) -> None:
        super().__init__()
        self.encoder, self.rssm, self.network, self.head = model.encoder, model.rssm, policy.network, policy.head
        self._actions = Actions(policy.head)
        self._widths = (model.rssm.size.deter, model.rssm.size.stoch * model.rssm.size.classes, policy.actions.width)

    @property
    def memory(self) -> int:
        """Numbers of `hidden`: the latent and the last action's code."""
        return sum(self._widths)

    def forward(self, seen: dict[str, Tensor], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of B observations."""
        size = self.rssm.size
        deter, stoch, code_BA = torch.split(hidden, list(self._widths), dim=-1)
        before = Latent(deter, stoch.reshape(-1, size.stoch, size.classes))
        half_BS = hidden.new_full((hidden.shape[0], size.stoch), 0.5)  # what it draws is not used
        begins_B = hidden.new_zeros(hidden.shape[0], dtype=torch.bool)  # zeros are what an episode begins with
        after, logits = self.rssm.observe_step(self.encoder(seen), code_BA, begins_B, before, half_BS)
        stoch = F.one_hot(logits.argmax(-1), size.classes).to(logits)
        out = self.network(Latent(after.deter, stoch).flat)
        code_BA = self._actions.code(self.head.mode(out))
        return self.head.greedy(out), out, torch.cat([after.deter, stoch.flatten(1), code_BA], -1)


def export_agent(model: WorldModel, policy: ActorPolicy, view: View, path: Path) -> Path:
    """Write and check it."""
    agent = Agent(model, policy)
    example = {
        name: torch.zeros(ROWS, *shape, dtype=torch.uint8 if len(shape) == 3 else torch.float32)
        for name, shape in view.shapes.items()
    }
    return export_onnx(copy.deepcopy(agent), example, path, torch.zeros(ROWS, agent.memory))
