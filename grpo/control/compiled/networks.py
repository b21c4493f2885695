"""The control room's small networks and action heads for JAX: the same numbers as torch gives, from one flat vector.

Weights travel as one vector in the order of the policy's parameters: one array to hand over, one that Adam moves.

Letters: M decisions, D numbers of an observation, F numbers of the network, A numbers of an action, W all weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo.control.compiled.weights import Weights
from grpo.core.arrays import clip
from grpo.envs.heads import LOG_STD, Categorical, Gaussian, Head

ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh, "relu": jax.nn.relu, "elu": jax.nn.elu, "silu": jax.nn.silu,
}  # fmt: skip

_held: Any = jax.lax.optimization_barrier
"""What XLA does not merge with what comes before or after."""


@dataclass(frozen=True)
class CompiledPolicy:
    """A chain of dense layers and an action head, of flat weights."""

    weights: Weights
    activation: str
    head: CompiledHead

    def out(self, flat_W: Any, seen_MD: Any) -> Any:
        """(M, F)."""
        return self.out_of(self.weights.apart(flat_W), seen_MD)

    def ready(self, flat_W: Any) -> dict[str, Any]:
        """By name, for many calls: XLA would cut the vector again at each step of a loop."""
        return {name: _held(x) for name, x in self.weights.apart(flat_W).items()}

    def out_of(self, named: Mapping[str, Any], seen_MD: Any) -> Any:
        """(M, F), of weights by name.

        Decisions are columns inside: of rows XLA takes twice as long for the gradients, on a CPU.
        """
        layers = [name.removesuffix(".weight") for name in named if name.endswith(".weight")]
        x_FM = seen_MD.reshape(len(seen_MD), -1).astype(jnp.float32).T
        for i, layer in enumerate(layers):
            x_FM = named[f"{layer}.weight"] @ x_FM + named[f"{layer}.bias"][:, None]
            x_FM = x_FM if i == len(layers) - 1 else ACTIVATIONS[self.activation](x_FM)
        return _held(x_FM).T

    def log_std(self, flat_W: Any) -> Any:
        """(A,), of a Gaussian; None of choices."""
        log_std_A = self.weights.apart(flat_W).get("head.log_std_A")
        return None if log_std_A is None else clip(log_std_A, *LOG_STD)


class CompiledHead:
    """From a network's numbers to actions and their log-probs; the formulas of `grpo.envs.heads`."""

    dtype: Any

    def noise(self, key: Any, rows: int) -> Any:
        """What a draw of `rows` decisions needs."""
        raise NotImplementedError

    def sample(self, out_MF: Any, log_std_A: Any, noise: Any) -> tuple[Any, Any]:
        """Records and log-probs."""
        raise NotImplementedError

    def mode(self, out_MF: Any) -> Any:
        """Records of greedy decisions."""
        raise NotImplementedError

    def to_env(self, recorded: Any) -> Any:
        """The actions that records stand for."""
        raise NotImplementedError

    def logp(self, out_MF: Any, log_std_A: Any, recorded: Any) -> Any:
        """log π of what was recorded."""
        raise NotImplementedError

    def entropy(self, out_MF: Any, log_std_A: Any) -> Any:
        """Exact."""
        raise NotImplementedError


class CompiledChoice(CompiledHead):
    """One of n."""

    dtype = jnp.int32

    def __init__(self, head: Categorical) -> None:
        self._start = int(head.to_env(np.zeros(1, np.int64))[0])

    def noise(self, key: Any, rows: int) -> Any:
        """A uniform number each."""
        return jax.random.uniform(key, (rows,), jnp.float32)

    def sample(self, out_MF: Any, log_std_A: Any, noise: Any) -> tuple[Any, Any]:
        """By inverting the distribution function."""
        shifted_MF = out_MF - out_MF.max(1, keepdims=True)
        cumulative_MF = jnp.cumsum(jnp.exp(shifted_MF), 1)
        total_M = cumulative_MF[:, -1]
        chosen_M = (cumulative_MF[:, :-1] <= (noise * total_M)[:, None]).sum(1, dtype=self.dtype)
        return chosen_M, self._of(shifted_MF, chosen_M) - jnp.log(total_M)

    def mode(self, out_MF: Any) -> Any:
        """The likeliest, the first of equals."""
        return out_MF.argmax(1).astype(self.dtype)

    def to_env(self, recorded: Any) -> Any:
        """Counted from the space's start."""
        return recorded + self._start

    def logp(self, out_MF: Any, log_std_A: Any, recorded: Any) -> Any:
        """Of the choices made."""
        return self._of(jax.nn.log_softmax(out_MF), recorded)

    def entropy(self, out_MF: Any, log_std_A: Any) -> Any:
        """Over all choices."""
        logp_MF = jax.nn.log_softmax(out_MF)
        return -(jnp.exp(logp_MF) * logp_MF).sum(1)

    def _of(self, value_MF: Any, chosen_M: Any) -> Any:
        """A sum over few choices: XLA gathers one by one."""
        return jnp.where(chosen_M[:, None] == jnp.arange(value_MF.shape[1]), value_MF, 0).sum(1)


class CompiledGaussian(CompiledHead):
    """Normal numbers, clipped to the bounds."""

    dtype = jnp.float32

    def __init__(self, head: Gaussian) -> None:
        self._size, self._shape = head.shape[0], head.to_env(np.zeros((1, *head.shape), np.float32)).shape[1:]
        bounds = {name: np.asarray(tensor.cpu()) for name, tensor in head.named_buffers()}
        self._low, self._high, self._middle, self._half = (
            bounds[name] for name in ("low_A", "high_A", "middle_A", "half_A")
        )

    def noise(self, key: Any, rows: int) -> Any:
        """A normal number for each of the action's."""
        return jax.random.normal(key, (rows, self._size), jnp.float32)

    def sample(self, out_MF: Any, log_std_A: Any, noise: Any) -> tuple[Any, Any]:
        """Mean plus noise."""
        recorded_MA = out_MF + jnp.exp(log_std_A) * noise
        return recorded_MA, self.logp(out_MF, log_std_A, recorded_MA)

    def mode(self, out_MF: Any) -> Any:
        """The mean."""
        return out_MF

    def to_env(self, recorded: Any) -> Any:
        """Inside the bounds."""
        return jnp.clip(self._middle + self._half * recorded, self._low, self._high).reshape(-1, *self._shape)

    def logp(self, out_MF: Any, log_std_A: Any, recorded: Any) -> Any:
        """Of the sample before clipping."""
        z_MA = (recorded - out_MF) * jnp.exp(-log_std_A)
        return (-0.5 * z_MA * z_MA - log_std_A - 0.5 * math.log(2 * math.pi)).sum(1)

    def entropy(self, out_MF: Any, log_std_A: Any) -> Any:
        """Before clipping."""
        return jnp.broadcast_to((log_std_A + 0.5 * math.log(2 * math.pi * math.e)).sum(), out_MF.shape[:1])


def compiled_head(head: Head) -> CompiledHead | None:
    """The same head for JAX; None: there is none."""
    if type(head) is Categorical:
        return CompiledChoice(head)
    return CompiledGaussian(head) if type(head) is Gaussian and head.log_std_A is not None else None
