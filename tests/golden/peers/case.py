"""What an adapter gives back, and the record it builds from a vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from grpo.core.arrays import zeros
from grpo.core.reductions import Denominators
from grpo.experience import Experience, with_gates
from grpo.objective import Terms, objective
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts, Scores
from tests.golden.backends import Numpy
from tests.golden.vectors import Vector


class Case(dict):
    """Outputs by name, plus the changes to the peer's own outputs (`quirks`) that the adapter documents."""

    def __init__(self, outputs: dict[str, Any], quirks: dict[str, Callable[[Any], Any]] | None = None):
        super().__init__(outputs)
        self.quirks = quirks or {}

    def expect(self, name: str, value: Any) -> Any:
        return self.quirks[name](value) if name in self.quirks else value


def inputs(vector: Vector, backend: Numpy) -> dict[str, Any]:
    """Every numeric input as an array of the backend; null stays None."""
    numeric = {key: value for key, value in vector.inputs.items() if key != "index"}  # group ids may be any names
    return {key: None if value is None else backend.array(value) for key, value in numeric.items()}


def record(
    x: dict[str, Any], recipe: Recipe, over: Denominators | None = None, mask: str = "mask", sampled: Any = None
) -> Experience:
    """Rollouts with given advantages, (N,) or (N, T), as an experience."""
    mask_NT = x[mask] != 0
    old_NT = x["old_logp"] if x.get("old_logp") is not None else x["logp"]
    advantage = x["advantages"]
    advantage_NT = (
        advantage if advantage.ndim == 2 else advantage[:, None] * zeros(tuple(mask_NT.shape), advantage, 1.0)
    )
    rollouts = Rollouts(
        group_N=mask_NT.sum(1) * 0,
        mask_NT=mask_NT,
        old_logp_NT=old_NT,
        reward_N=advantage_NT[:, 0] * 0,
        sampled_logp_NT=sampled,
    )
    batch = Experience.build(rollouts, recipe, x.get("ref_logp"), detached=x.get("old_logp") is None)
    batch = replace(batch, advantage_NT=advantage_NT)
    return batch if over is None else replace(batch, denominators=over)


def differentiate(
    backend: Numpy,
    batch: Experience,
    recipe: Recipe,
    logp: Any,
    entropy: Any = None,
    differentiate_entropy: bool = False,
) -> tuple[dict[str, Any], Terms]:
    """loss, grad_logp and (asked for) grad_entropies of our objective, and its terms."""

    def loss(logp_NT: Any, entropy_NT: Any = entropy) -> Any:
        return objective(Scores(logp_NT, entropy_NT), batch, recipe).loss

    leaves = [logp, entropy] if differentiate_entropy else [logp]
    value, grads = backend.gradients(loss, leaves)
    outputs = {"loss": value, **dict(zip(("grad_logp", "grad_entropies"), grads, strict=False))}
    return outputs, objective(Scores(logp, entropy), batch, recipe)


__all__ = ["Case", "Scores", "differentiate", "inputs", "record", "with_gates"]
