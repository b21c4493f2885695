"""A trained policy as an ONNX file, for places without this library: observation in, greedy action out.

Scaling, network and head become one graph. The file gets its name only after onnxruntime has given the same numbers.

Letters: B observations, F numbers of the network.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from grpo.control.policy import ActorPolicy
from grpo.control.scaling import LIMIT, Scaling
from grpo.envs.fleet import Tree
from grpo.envs.heads import Head
from grpo.envs.onnx import ROWS, export_onnx, paths_of
from grpo.envs.spaces import leaf, stack

__all__ = ["Greedy", "export_onnx", "export_policy"]


def export_policy(
    policy: ActorPolicy, scaling: Scaling, space: gym.Space[Any], path: Path, action_repeat: int = 1
) -> Path:
    """The greedy policy, scaling included, checked on observations of this space."""
    mean, std = scaling.tree()
    greedy = Greedy(policy.network, policy.head, mean, std, LIMIT, policy.columns.size)
    space = copy.deepcopy(space)
    space.seed(0)
    example = policy.tensors(stack([space.sample() for _ in range(ROWS)], space))
    about = {"chunk": policy.columns.size, "action_repeat": action_repeat}
    return export_onnx(greedy, example, path, policy.begin(ROWS), about)


class Greedy(nn.Module):
    """Observation → (action in the environment's units, the network's numbers); with a memory, that goes in and out.

    `mean` and `std` are trees like the observation, of arrays that broadcast with its leaves; a leaf they leave out is
    not scaled, and None scales nothing. `clip` limits scaled values on both sides. The action of a policy with chunks
    is (B, chunk, …).
    """

    def __init__(
        self,
        network: nn.Module,
        head: Head,
        mean: Tree = None,
        std: Tree = None,
        clip: float | None = None,
        chunk: int = 1,
    ) -> None:
        super().__init__()
        self.network, self.head, self._clip, self._chunk = network, head, clip, chunk
        self._paths = [] if mean is None else paths_of(mean)
        for at, path in enumerate(self._paths):
            self.register_buffer(f"mean_{at}", torch.tensor(np.asarray(leaf(mean, path)), dtype=torch.float32))
            self.register_buffer(f"std_{at}", torch.tensor(np.asarray(leaf(std, path)), dtype=torch.float32))

    def forward(self, observation: Tree, hidden: Tensor | None = None) -> tuple[Tensor, ...]:
        """Of B observations: (action, out), or (action, out, hidden) where `hidden` (B, memory) is given."""
        scaled = self._scaled(observation, ())
        if hidden is None:
            out = self.network(scaled)
            return self._greedy(out), out
        out_B1F, hidden = self.network(_one_decision(scaled), hidden)
        return self._greedy(out_B1F[:, 0]), out_B1F[:, 0], hidden

    def _greedy(self, out_BF: Tensor) -> Tensor:
        if self._chunk == 1:
            return self.head.greedy(out_BF)
        action = self.head.greedy(out_BF.reshape(-1, self.head.size))
        return action.reshape(-1, self._chunk, *action.shape[1:])

    def _scaled(self, observation: Tree, path: tuple[str, ...]) -> Tree:
        if isinstance(observation, dict):
            return {key: self._scaled(part, (*path, key)) for key, part in observation.items()}
        if path not in self._paths:
            return observation
        at = self._paths.index(path)
        scaled = (observation - self.get_buffer(f"mean_{at}")) / self.get_buffer(f"std_{at}")
        return scaled if self._clip is None else scaled.clamp(-self._clip, self._clip)


def _one_decision(tree: Tree) -> Tree:
    """(B, …) as (B, 1, …): episodes of one decision."""
    return {key: _one_decision(part) for key, part in tree.items()} if isinstance(tree, dict) else tree[:, None]
