"""The record a room hands over: several tries from the same start, with everything the algorithm reads.

Dimension legend, used as suffixes everywhere:

    N trajectories (rows)   P starts (prompts, states, seeds)   G group size   T decisions (tokens, actions, chunks)
    V choices of a decision (vocabulary)   K reward parts   M any flat list   H horizon
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

from grpo.core.arrays import Array, expect_finite, expect_ndim, expect_shape, is_torch, is_traced, namespace, zeros
from grpo.core.reductions import Denominators

__all__ = ["LARGEST_REWARD", "Denominators", "Rollouts", "Scores", "Status", "Taught", "by_cost", "by_rows"]


LARGEST_REWARD = 3.4028234663852886e38
"""The largest number of float32, in which rewards are compared: one beyond it is as wrong as an infinite one."""


class Status(IntEnum):
    """How a trajectory ended."""

    OK = 0
    FAILED = 1
    """Its reward, environment or engine request failed: no reward is read, it teaches nothing."""
    TERMINATED = 2
    TRUNCATED = 3


@dataclass(frozen=True)
class Scores:
    """What a policy says about recorded decisions now, differentiable."""

    logp_NT: Array
    entropy_NT: Array | None = None
    exact_kl_NT: Array | None = None
    choice_logp_NTK: Array | None = None
    """Of the choices that `Rollouts.choice_NTK` names."""


@dataclass(frozen=True)
class Taught:
    """What a teacher says about recorded decisions: how likely they would have been to it, and K choices of its own."""

    logp_NT: Array
    """NaN: it has no opinion on the decision."""
    choice_NTK: Array | None = None
    """Numbers of choices (token ids), the likeliest first."""
    choice_logp_NTK: Array | None = None


_NO_ARRAYS = ("reward_names", "inputs")
"""Fields of `Rollouts` that are not arrays."""


@dataclass(frozen=True)
class Rollouts:
    """N trajectories of up to T decisions, frozen, checked once here. NumPy, PyTorch or JAX arrays, one kind.

    Two answers (N = 2) to one question, of up to three tokens (T = 3); the first ended after two, then padding::

        row │ inputs │ group_N │ mask_NT │ old_logp_NT      │ reward_N
         0  │ "4."   │    0    │  ■ ■ ·  │ −0.1  −0.7   0.0 │   1.0
         1  │ "5!."  │    0    │  ■ ■ ■  │ −2.3  −1.2  −0.1 │   0.0

    >>> import numpy as np
    >>> rollouts = Rollouts(
    ...     group_N=np.array([0, 0]),
    ...     mask_NT=np.array([[True, True, False], [True, True, True]]),
    ...     old_logp_NT=np.array([[-0.1, -0.7, 0.0], [-2.3, -1.2, -0.1]]),
    ...     reward_N=np.array([1.0, 0.0]),
    ...     inputs=["4.", "5!."],
    ... )
    >>> len(rollouts), int(rollouts.mask_NT.sum()), rollouts.select([1]).inputs
    (2, 5, ['5!.'])
    """

    group_N: Array
    """Which rows are tries from the same start: equal integers. Keyed by slot, never by the text of a prompt."""
    mask_NT: Array
    """True for decisions the policy made: not prompt, padding, tool output or steps after done."""
    old_logp_NT: Array
    """Their log-probabilities when sampled."""
    reward_N: Array | None = None
    """One reward a trajectory; added to the last decision where rewards are dense too."""
    reward_NT: Array | None = None
    """Dense rewards."""
    reward_parts_NK: Array | None = None
    """Several rewards a trajectory; NaN = no opinion."""
    inputs: Any = None
    """What the policy needs to score the rows again: a sequence, array or dict of them, indexable by row."""
    group_NT: Array | None = None
    """Groups inside trajectories (anchors, turns); default: group_N."""
    episode_N: Array | None = None
    """Rows of one trajectory (turns) share an id and count once in statistics."""
    sampled_logp_NT: Array | None = None
    """A foreign engine's own numbers; NaN = it gave none."""
    version_NT: Array | None = None
    """Steps that had been learned from when a decision was made, where tries are asked for ahead of their step."""
    weight_NT: Array | None = None
    """Float weight of a decision's loss (continuation probability)."""
    baseline_NT: Array | None = None
    """What a try is compared with where that does not follow from its group: the room's own estimate (baseline=given),
    the reward of a greedy try (greedy), its role's mean (role_mean), the best policy's value (optimal_value)."""
    energy_NT: Array | None = None
    """‖∇ log π‖² of each decision on its logits, for baseline=optimal_token."""
    status_N: Array | None = None
    """`Status` of each row."""
    learns_N: Array | None = None
    """Rows that learn; the others are compared with and nothing more, and need no log-probs. None: all."""
    choice_NTK: Array | None = None
    """Choices of each decision whose log-probs a policy is to give, too."""
    reward_names: Sequence[str] | None = None
    """Of the K parts. A source that names them reports on them itself; others are told by number, `rewards/0/mean`."""
    role_N: Array | None = None
    """Whose part the policy played in each row, where it plays several: equal integers, the same in every step."""

    def __post_init__(self) -> None:
        expect_ndim(2, mask_NT=self.mask_NT)
        rows, steps = (int(n) for n in self.mask_NT.shape)
        if rows == 0 or steps == 0:
            raise ValueError(f"mask_NT has shape {(rows, steps)}: there is nothing to learn from")
        shapes = {"N": (rows,), "NT": (rows, steps)}
        for name, array in self._arrays():
            if namespace(array) is not namespace(self.mask_NT):
                kinds = f"{namespace(array).__name__} array, mask_NT a {namespace(self.mask_NT).__name__} one"
                raise TypeError(f"{name} is a {kinds}; use one kind")
            dimensions = name.rpartition("_")[2]
            if dimensions in shapes:
                expect_shape(shapes[dimensions], **{name: array})
        if self.reward_parts_NK is not None:
            expect_ndim(2, reward_parts_NK=self.reward_parts_NK)
            expect_shape((rows, self.reward_parts_NK.shape[1]), reward_parts_NK=self.reward_parts_NK)
            if self.reward_names is not None and len(self.reward_names) != self.reward_parts_NK.shape[1]:
                raise ValueError(f"{len(self.reward_names)} reward_names for {self.reward_parts_NK.shape[1]} parts")
        if self.reward_N is None and self.reward_NT is None and self.reward_parts_NK is None:
            raise ValueError("Rollouts need a reward: give reward_N, reward_NT or reward_parts_NK")
        if not any(kind in str(self.group_N.dtype) for kind in ("int", "bool")):
            raise TypeError(f"group_N must hold integers, not {self.group_N.dtype}; number the starts 0, 1, …")
        object.__setattr__(self, "mask_NT", self._as_mask(self.mask_NT))
        scored_N = self.scored_N
        expect_finite(where=scored_N, reward_N=self.reward_N)
        expect_finite(where=self.mask_NT & scored_N[:, None], reward_NT=self.reward_NT)
        learns_NT = self.mask_NT if self.learns_N is None else self.mask_NT & self.learns_N[:, None]
        expect_finite(where=learns_NT, old_logp_NT=self.old_logp_NT, weight_NT=self.weight_NT)
        expect_finite(where=self.mask_NT, baseline_NT=self.baseline_NT, energy_NT=self.energy_NT)
        if self.sampled_logp_NT is not None:  # NaN: the engine gave none
            known_NT = ~namespace(self.sampled_logp_NT).isnan(self.sampled_logp_NT)
            expect_finite(where=self.mask_NT & known_NT, sampled_logp_NT=self.sampled_logp_NT)
        if not isinstance(self.inputs, dict) and hasattr(self.inputs, "__len__") and len(self.inputs) != rows:
            raise ValueError(f"inputs has {len(self.inputs)} entries for {rows} rows")

    def _arrays(self) -> list[tuple[str, Array]]:
        values = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in _NO_ARRAYS]
        return [(name, value) for name, value in values if value is not None]

    @staticmethod
    def _as_mask(mask_NT: Array) -> Array:
        if "bool" in str(mask_NT.dtype):
            return mask_NT
        if not is_traced(mask_NT) and not bool(namespace(mask_NT).all((mask_NT == 0) | (mask_NT == 1))):
            raise ValueError("mask_NT must hold only 0 and 1; fractional weights go into weight_NT")
        return mask_NT != 0

    def __len__(self) -> int:
        return int(self.mask_NT.shape[0])

    @cached_property
    def scored_N(self) -> Array:
        """Rows that have a reward: not failed."""
        if self.status_N is None:
            return zeros((len(self),), self.old_logp_NT) == 0
        return self.status_N != int(Status.FAILED)

    def select(self, rows: Sequence[int] | Array) -> Rollouts:
        """The same record for some rows, in the given order."""
        index = row_index(rows, self.mask_NT)
        chosen: dict[str, Any] = {name: array[index] for name, array in self._arrays()}
        return self._same(**chosen, inputs=_pick(self.inputs, index))

    def _same(self, **changes: Any) -> Rollouts:
        """This record with other rows of itself: checked already, and so not again."""
        made = object.__new__(Rollouts)
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        made.__dict__.update(own | changes)
        return made

    def each(self, change: Callable[[Array], Array]) -> Rollouts:
        """This record with something done to every array, of inputs too, that changes no value: another device, say."""
        arrays: dict[str, Any] = {name: change(array) for name, array in self._arrays()}
        return self._same(**arrays, inputs=_each(self.inputs, change))

    def arrays(self) -> dict[str, Array]:
        """The fields that are given, by name; not the inputs."""
        return dict(self._arrays())

    def but(self, **changes: Any) -> Rollouts:
        """This record with some fields replaced, checked again."""
        return replace(self, **changes)

    def decisions(self) -> Rollouts:
        """The same record with each decision as a row of its own (T = 1). Inputs must have a row a decision too."""
        chosen: dict[str, Any] = {
            name: alone(array, self.mask_NT, name.endswith("_N"))
            for name, array in self._arrays()
            if name != "reward_parts_NK"
        }
        if self.reward_N is None and self.reward_NT is None:  # parts alone: they have been compared already
            chosen["reward_NT"] = chosen["old_logp_NT"] * 0
        inputs = _apart(self.inputs, self.mask_NT)
        return replace(self, **chosen, reward_parts_NK=None, reward_names=None, inputs=inputs)

    @staticmethod
    def cat(parts: Sequence[Rollouts]) -> Rollouts:
        """Several records as one, padded to the longest. Equal group ids mean the same group."""
        if not parts:
            raise ValueError("nothing to concatenate")
        steps = max(part.mask_NT.shape[1] for part in parts)
        joined: dict[str, Any] = {}
        for name in (f.name for f in fields(parts[0]) if f.name not in _NO_ARRAYS):
            arrays = [getattr(part, name) for part in parts]
            if all(array is None for array in arrays):
                continue
            if any(array is None for array in arrays):
                raise ValueError(f"{name} is given in some of the records and missing in others")
            if name.endswith("_NT"):
                arrays = [_pad(array, steps) for array in arrays]
            joined[name] = namespace(arrays[0]).concatenate(arrays)
        inputs = _join([_stretched(part.inputs, part.mask_NT, steps) for part in parts])
        return Rollouts(**joined, reward_names=parts[0].reward_names, inputs=inputs)


def row_index(rows: Sequence[int] | Array, like: Array) -> Array:
    """Row numbers as an array that can index `like`."""
    xp = namespace(like)
    return xp.as_tensor(rows, device=like.device) if is_torch(like) else xp.asarray(rows)


def by_cost(cost_N: Sequence[int], limit: int | None, halvings: int = 0) -> list[Sequence[int]]:
    """Row numbers in order, in parts that cost at most `limit` (None: all together) halved `halvings` times.

    A part holds at least one row: what a single row costs cannot be halved.
    """
    if limit is None and not halvings:
        return [range(len(cost_N))]
    budget = max((sum(cost_N) if limit is None else limit) >> halvings, 1)
    parts: list[Sequence[int]] = []
    first, spent = 0, 0
    for row, cost in enumerate(cost_N):
        if row > first and spent + cost > budget:
            parts.append(range(first, row))
            first, spent = row, 0
        spent += cost
    return [*parts, range(first, len(cost_N))]


def by_rows(rows: Rollouts, limit: int | None, halvings: int = 0) -> list[Sequence[int]]:
    """Parts of at most `limit` rows: the `split` of a policy whose rows all cost the same."""
    return by_cost([1] * len(rows), limit, halvings)


def alone(x: Array, mask_NT: Array, per_row: bool) -> Array:
    """The entries of each decision that was made, as rows of one: (M, 1), or (M,) where `x` has one entry a row."""
    if per_row:
        return namespace(x).broadcast_to(x[:, None], tuple(mask_NT.shape))[mask_NT]
    return x[mask_NT][:, None]


def _apart(inputs: Any, mask_NT: Array) -> Any:
    if isinstance(inputs, dict):
        return {key: _apart(value, mask_NT) for key, value in inputs.items()}
    if inputs is None or tuple(getattr(inputs, "shape", ()))[:2] != tuple(mask_NT.shape):
        shape = tuple(mask_NT.shape)
        raise TypeError(f"decisions can be taken apart only where inputs are arrays of shape {shape}, one a decision")
    return inputs[mask_NT][:, None]


def _pick(inputs: Any, index: Array) -> Any:
    if inputs is None:
        return None
    if isinstance(inputs, dict):
        return {key: _pick(value, index) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return [inputs[i] for i in index.tolist()]
    return inputs[index]


def _each(inputs: Any, change: Callable[[Array], Array]) -> Any:
    if isinstance(inputs, dict):
        return {key: _each(value, change) for key, value in inputs.items()}
    return change(inputs) if hasattr(inputs, "shape") and is_torch(inputs) else inputs


def _stretched(inputs: Any, mask_NT: Array, steps: int) -> Any:
    """Inputs with an entry a decision, padded as the record itself is."""
    if isinstance(inputs, dict):
        return {key: _stretched(value, mask_NT, steps) for key, value in inputs.items()}
    each = tuple(getattr(inputs, "shape", ()))[:2] == tuple(mask_NT.shape)
    return _pad(inputs, steps) if each else inputs


def _join(parts: list[Any]) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: _join([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return [item for part in parts for item in part]
    if hasattr(first, "cat"):
        return first.cat(parts)
    return namespace(first).concatenate(parts)


def _pad(x_NT: Array, steps: int) -> Array:
    pad = zeros((x_NT.shape[0], steps - x_NT.shape[1], *x_NT.shape[2:]), x_NT)
    return namespace(x_NT).concatenate([x_NT, pad], axis=1)
