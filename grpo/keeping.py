"""Parameters and an optimizer's state as a checkpoint keeps them: named tensors and plain values, and the way back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo.protocols import SequencePolicy


def copies(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of their own, which later steps do not change."""
    return {name: x.detach().clone() if isinstance(x, Tensor) else copy.copy(x) for name, x in arrays.items()}


def copy_into(parameters: Mapping[str, Tensor], saved: Mapping[str, Any], kind: str) -> None:
    """Write what was saved into these parameters, the same ones by name and shape."""
    if set(saved) != set(parameters):
        differ = ", ".join(sorted(set(saved) ^ set(parameters))[:3])
        raise ValueError(f"the saved {kind} has other parameters than this one ({differ})")
    for name, parameter in parameters.items():
        tensor = torch.as_tensor(saved[name])
        if tuple(tensor.shape) != tuple(parameter.shape):
            shapes = f"{tuple(tensor.shape)}, not {tuple(parameter.shape)}"
            raise ValueError(f"the saved {kind} parameter {name} has shape {shapes}")
        parameter.copy_(tensor)


def expect_same_kind(saved: Mapping[str, Any], kind: str | None) -> None:
    """Refuse to go on with another optimizer than the one that was saved, or none."""
    if kind is not None and "optimizer" not in saved:
        raise ValueError("the saved state has no optimizer; going on without one would be another run")
    if saved.get("optimizer_kind") != kind:
        before = saved.get("optimizer_kind") or "no optimizer"
        raise ValueError(f"the state was saved with {before}, this trainer has {kind or 'none'}; use the same")


def flattened(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An optimizer's state dict as JSON-able values and named tensors."""
    values: dict[str, Any] = {"state": {}, "param_groups": optimizer["param_groups"]}
    tensors: dict[str, Tensor] = {}
    for index, entry in optimizer["state"].items():
        values["state"][str(index)] = {k: v for k, v in entry.items() if not isinstance(v, Tensor)}
        tensors |= {f"{index}/{k}": v.clone() for k, v in entry.items() if isinstance(v, Tensor)}
    return values, tensors


def unflattened(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The way back."""
    state: dict[int, dict[str, Any]] = {int(index): dict(entry) for index, entry in values["state"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition("/")
        state[int(index)][key] = torch.as_tensor(tensor).clone()
    return {"state": state, "param_groups": values["param_groups"]}


def of_policy(optimizer: torch.optim.Optimizer, policy: SequencePolicy) -> torch.optim.Optimizer:
    """A user's optimizer, if what it moves is what the policy says it has."""
    own = {id(p) for p in policy.parameters().values()}
    moved_by_it = [p for group in optimizer.param_groups for p in group["params"]]
    strange = sum(id(p) not in own for p in moved_by_it)
    if strange:
        raise ValueError(
            f"the optimizer holds {strange} tensors that policy.get_parameters() does not return; return the "
            "trained tensors themselves, e.g. dict(module.named_parameters()), not a copy or state_dict()"
        )
    return optimizer
