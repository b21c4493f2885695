"""Rollouts as flat arrays, to travel between ranks: of every row only the decisions up to its last one.

A token takes 5 bytes (mask and log-prob) and what a room adds to it, 4 for its id; padding takes none.

Letters: L decisions of all rows up to each one's last, end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.protocols import State, as_part, part
from grpo.rollouts import Rollouts

PLAIN = (str, int, float, bool, type(None))
"""What travels as it is."""


def flat(rollouts: Rollouts) -> State:
    """The record without its padding."""
    steps = int(rollouts.mask_NT.shape[1])
    place_T = torch.arange(1, steps + 1, device=rollouts.mask_NT.device)
    length_N = (rollouts.mask_NT * place_T).amax(1)
    kept_NT = place_T <= length_N[:, None]
    arrays = {"length": length_N} | {
        name: x[kept_NT] if name.endswith("_NT") else x for name, x in rollouts.arrays().items()
    }
    inputs = _flat_inputs(rollouts.inputs, "inputs")
    names = None if rollouts.reward_names is None else list(rollouts.reward_names)
    values = {"steps": steps, "reward_names": names, "inputs": inputs.values["inputs"]}
    return State(values, arrays | as_part("inputs", inputs.arrays))


def whole(states: Sequence[State]) -> Rollouts:
    """The way back, for the records of several ranks, their rows in this order."""
    steps = max(state.values["steps"] for state in states)
    length_N = torch.cat([torch.as_tensor(state.arrays["length"]) for state in states])
    kept_NT = torch.arange(1, steps + 1) <= length_N[:, None]
    rows = len(length_N)
    found: dict[str, Any] = {}
    for name in states[0].arrays:
        if name == "length" or name.startswith("inputs/"):
            continue
        joined = torch.cat([torch.as_tensor(state.arrays[name]) for state in states])
        if name.endswith("_NT"):
            x_NT = torch.zeros(rows, steps, dtype=joined.dtype)
            x_NT[kept_NT] = joined
            joined = x_NT
        found[name] = joined
    inputs = _join([_inputs(state.values["inputs"], part(state.arrays, "inputs")) for state in states], rows)
    return Rollouts(**found, reward_names=states[0].values["reward_names"], inputs=inputs)


def _flat_inputs(inputs: Any, place: str) -> State:
    """Inputs that can travel by themselves: arrays, lists of plain values, dicts of these."""
    if isinstance(inputs, Tensor):
        return State({"inputs": "array"}, {"": inputs})
    if isinstance(inputs, Mapping):
        parts = {key: _flat_inputs(value, f"{place}[{key!r}]") for key, value in inputs.items()}
        arrays = {f"{key}/{name}": x for key, found in parts.items() for name, x in found.arrays.items()}
        return State({"inputs": {key: found.values["inputs"] for key, found in parts.items()}}, arrays)
    if inputs is None or (isinstance(inputs, list | tuple) and all(isinstance(x, PLAIN) for x in inputs)):
        return State({"inputs": None if inputs is None else [list(inputs)]}, {})
    raise TypeError(
        f"{place} of type {type(inputs).__name__} cannot travel between ranks: give tensors or lists of plain values, "
        "or leave inputs out of the part and put them together again (grpo.capabilities.Divides)"
    )


def _inputs(told: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(told, Mapping):
        return {key: _inputs(value, part(arrays, key)) for key, value in told.items()}
    if told == "array":
        return arrays[""]
    return None if told is None else told[0]


def _join(parts: Sequence[Any], rows: int) -> Any:
    """Inputs one after the other; those with an entry a decision as long as the longest."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts], rows) for key in first}
    if isinstance(first, Tensor):
        longest = max(x.shape[1:2] for x in parts)
        if first.ndim > 1 and any(x.shape[1:2] != longest for x in parts):
            parts = [_longer(x, longest[0]) for x in parts]
        return torch.cat(list(parts))
    return None if first is None else [item for part in parts for item in part]


def _longer(x: Tensor, steps: int) -> Tensor:
    more = torch.zeros(x.shape[0], steps - x.shape[1], *x.shape[2:], dtype=x.dtype)
    return torch.cat([x, more], 1)
