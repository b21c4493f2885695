"""A policy of dense layers in NumPy alone: what its network gives, greedy actions, entropies.

The same numbers as `grpo.control.policy` plays with, for whoever has the weights and nothing of PyTorch.

Letters: M decisions, F numbers of the network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.control.activations import IN_PLACE
from grpo.control.compiled.weights import Weights


@dataclass(frozen=True)
class PlainHead:
    """From the network's numbers to actions."""

    values: Mapping[str, Any]
    bounds: Mapping[str, np.ndarray]
    """Of numbers; choices have none."""

    def mode(self, out_MF: np.ndarray) -> np.ndarray:
        """Records of greedy decisions."""
        return out_MF if self.bounds else out_MF.argmax(-1)

    def to_env(self, recorded: np.ndarray) -> np.ndarray:
        """The actions that records stand for."""
        if not self.bounds:
            return np.asarray(recorded + self.values["start"], np.int64)
        low_A, high_A, middle_A, half_A = (self.bounds[name] for name in ("low_A", "high_A", "middle_A", "half_A"))
        action_MA = np.clip(middle_A + half_A * recorded, low_A, high_A)
        return action_MA.reshape(-1, *self.values["shape"]).astype(np.float32)


class PlainPolicy:
    """What plays greedy episodes, and says how sure it is."""

    def __init__(self, weights: Weights, flat_W: np.ndarray, activation: str, head: PlainHead) -> None:
        self.head, self._named, self._activate = head, weights.apart(flat_W), IN_PLACE[activation]

    def out(self, seen: np.ndarray) -> np.ndarray:
        """(M, F)."""
        layers = [name.removesuffix(".weight") for name in self._named if name.endswith(".weight")]
        x_MF = np.asarray(seen, np.float32).reshape(len(seen), -1)
        for i, layer in enumerate(layers):
            x_MF = x_MF @ self._named[f"{layer}.weight"].T + self._named[f"{layer}.bias"]
            if i < len(layers) - 1:
                self._activate(x_MF)
        return x_MF

    def entropy(self, seen: np.ndarray) -> np.ndarray:
        """Exact, of each decision."""
        out_MF = self.out(seen)
        if self.head.bounds:
            log_std_A = np.clip(self._named["head.log_std_A"], -10.0, 10.0)
            return np.full(len(seen), (log_std_A + 0.5 * math.log(2 * math.pi * math.e)).sum(), np.float32)
        shifted_MF = out_MF - out_MF.max(-1, keepdims=True)
        logp_MF = shifted_MF - np.log(np.exp(shifted_MF).sum(-1, keepdims=True))
        return -(np.exp(logp_MF) * logp_MF).sum(-1)

    # --- as `grpo.control.evaluate.Player` asks a policy ------------------------------------------------------------

    def eval(self) -> None:
        """It has no other mode."""

    def begin(self, count: int) -> None:
        """It remembers nothing."""

    def act(self, seen: np.ndarray, random: None, memory: None = None) -> Any:
        """The likeliest actions."""
        return Greedy(self.head.mode(self.out(seen)))


@dataclass(frozen=True)
class Greedy:
    """What was decided."""

    recorded: np.ndarray
    memory: None = None
