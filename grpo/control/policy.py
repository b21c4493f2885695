"""The actor as the trainer's SequencePolicy and the players' hand: scores with torch, acts with NumPy where it can.

Letters: M decisions, F numbers of the network, L live members, D chunks, K chunks that were decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo.control.chunks import ChunkColumns
from grpo.control.networks import Network, RecurrentNetwork, tensors
from grpo.control.numpy_policy import numpy_policy
from grpo.envs.draws import Random
from grpo.envs.fleet import Tree
from grpo.envs.heads import Head
from grpo.envs.spaces import Layout, each, flatten, leaves, take
from grpo.rollouts import Rollouts, Scores, by_rows

LOOKS = 1024
"""Pictures that are looked at together: as floats they are four times what they were."""


@dataclass(frozen=True)
class Acted:
    """What members decided: an entry for each action, those of a member's chunk one after the other."""

    recorded: np.ndarray
    """The action as the head keeps it: what the log-prob is of."""
    logp_M: np.ndarray
    out_MF: np.ndarray
    """The network's numbers."""
    memory: Any = None
    """A recurrent policy's state after this decision."""


class ActorPolicy:
    """A network and an action head. `inputs` of its rollouts: observation and action, (N, T, …), and old, (N, T, D).

    With chunks the network gives the head's numbers several times, one after the other.
    """

    def __init__(self, network: nn.Module, head: Head, columns: ChunkColumns | None = None) -> None:
        self.network, self.head = network, head
        self.columns = columns or ChunkColumns()
        self.recurrent = isinstance(network, RecurrentNetwork)
        self.version = 0
        self._layout: Layout | None = network.layout if isinstance(network, Network | RecurrentNetwork) else None
        """How our own networks read an observation; a user's module gets it in float32."""
        self._numpy = numpy_policy(network)
        self._parameters = dict(self.modules().named_parameters())
        self.device = next((p.device for p in self._parameters.values()), torch.device("cpu"))

    def modules(self) -> nn.ModuleDict:
        """Network and head, as one module."""
        return nn.ModuleDict({"network": self.network, "head": self.head})

    # --- learning ---------------------------------------------------------------------------------------------------

    def score(self, rows: Rollouts, entropy: bool = False) -> Scores:
        """log π of recorded actions; the entropy and KL(old‖π) exactly, since the head knows the distribution."""
        if self.columns.stride > 1:
            return self._score_chunks(rows, entropy)
        inputs, mask_NT = rows.inputs, rows.mask_NT
        single = mask_NT.shape[1] == 1  # decisions taken apart: nothing to leave out, nothing to put back

        def made(x: Tensor) -> Tensor:
            return x[:, 0] if single else x[mask_NT]

        def placed(values_M: Tensor) -> Tensor:
            return values_M[:, None] if single else values_M.new_zeros(mask_NT.shape).masked_scatter(mask_NT, values_M)

        if self.recurrent:
            out = made(self.network(inputs["observation"])[0])
        else:
            out = self.network(each(inputs["observation"], made))
        return Scores(
            logp_NT=placed(self.head.logp(out, made(inputs["action"]))),
            entropy_NT=placed(self.head.entropy(out)) if entropy else None,
            exact_kl_NT=placed(self.head.kl(made(inputs["old"]), out)) if "old" in inputs else None,
        )

    def _score_chunks(self, rows: Rollouts, entropy: bool) -> Scores:
        """The same where a look serves several columns."""
        inputs, mask_NT, columns = rows.inputs, rows.mask_NT, self.columns
        seen, decided_ND = columns.firsts(inputs["observation"]), columns.firsts(mask_NT)
        if self.recurrent:
            out_K = self.network(seen)[0][decided_ND]
        else:
            out_K = self.network(each(seen, lambda x: x[decided_ND]))
        out_M = columns.actions(out_K, mask_NT)
        action_M = columns.recorded(inputs["action"], mask_NT)
        logp_M = self.head.logp(out_M, action_M)
        if columns.width > 1:
            logp_M = self.head.token_logp(out_M, action_M).reshape(-1)

        def placed(values_M: Tensor) -> Tensor:
            return values_M.new_zeros(mask_NT.shape).masked_scatter(mask_NT, values_M)

        return Scores(
            logp_NT=placed(logp_M),
            entropy_NT=columns.entropies(self.head.token_entropy(out_M), mask_NT) if entropy else None,
            exact_kl_NT=placed(self.head.kl(inputs["old"][mask_NT], out_M)) if "old" in inputs else None,
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """What is trained."""
        return self._parameters

    split = staticmethod(by_rows)

    def train(self) -> None:
        """The same as when playing: with dropout on, what is scored would be another policy than what played."""
        self.eval()

    def eval(self) -> None:
        """Playing mode of the modules."""
        self.network.eval()
        for module in self.network.modules():
            if isinstance(module, nn.RNNBase) and not module.dropout:
                module.train()  # else cuDNN keeps nothing for a backward pass; without dropout both modes are one

    # --- playing ----------------------------------------------------------------------------------------------------

    def begin(self, count: int) -> Any:
        """The memory of `count` members at the start of their episodes."""
        return self.network.initial(count) if isinstance(self.network, RecurrentNetwork) else None

    def seated(self, memory: Any, stay_L: np.ndarray, fresh: int) -> Any:
        """The memories of the members that stay, then of those that begin an episode."""
        return torch.cat([memory[torch.as_tensor(stay_L)], self.begin(fresh)])

    def act(self, observation: Tree, random: Random | None, memory: Any = None) -> Acted:
        """Decide for M members; without `random` the most likely action."""
        if self._numpy is not None:
            out_MF = self._numpy(observation if self._layout is None else flatten(observation, self._layout))
        else:
            out_MF, memory = self._forward(observation, memory)
        out_MF = out_MF.reshape(-1, self.head.size)
        if random is None:
            return Acted(self.head.mode(out_MF), np.zeros(len(out_MF), np.float32), out_MF, memory)
        recorded, logp_M = self.head.sample(out_MF, random)
        return Acted(recorded, logp_M, out_MF, memory)

    @torch.no_grad()
    def _forward(self, observation: Tree, memory: Any) -> tuple[np.ndarray, Any]:
        """The network's numbers by torch."""
        seen = self.tensors(observation)
        if self.recurrent:
            out, memory = self.network(each(seen, lambda x: x[:, None]), memory)
            out = out[:, 0]
        else:
            out = self.network(seen)
        return out.float().cpu().numpy(), memory

    @property
    def way(self) -> int:
        """How our own networks read drawn pictures; 0: there are none, or the network is not ours."""
        return self.network.way if isinstance(self.network, Network | RecurrentNetwork) else 0

    @property
    def sight_size(self) -> int:
        """H of `sight`; 0: nobody knows what this network sees."""
        return self.network.sight_size if isinstance(self.network, Network) else 0

    @torch.no_grad()
    def sight(self, observation: Tree) -> np.ndarray:
        """(M, H): what the last layer is given of M observations; (M, 0) of a network whose layers nobody knows."""
        count = len(leaves(observation)[0])
        if not isinstance(self.network, Network):
            return np.zeros((count, 0), np.float32)
        parts = (self.tensors(take(observation, slice(i, i + LOOKS))) for i in range(0, max(count, 1), LOOKS))
        return np.concatenate([self.network.sight(part).float().cpu().numpy() for part in parts])

    def tensors(self, observation: Tree) -> Any:
        """An observation as the network takes it, on its device."""
        return tensors(observation, self.device, floats=self._layout is None)
