"""A user's PolicyModel and RewardModel as the SequencePolicy, Reference and RolloutSource the trainer speaks."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.capabilities import GivesEntropy, GivesMask
from grpo.errors import RanksDiffer, line
from grpo.protocols import (
    POLICY_METHODS,
    REWARD_METHODS,
    Collected,
    CollectRequest,
    Part,
    PolicyModel,
    RewardModel,
    State,
    expect_methods,
)
from grpo.reference import FrozenReference
from grpo.rollouts import Rollouts, Scores, by_rows


def device_of(name: str) -> str:
    """The device in force: as named; auto: the first of cuda, mps, cpu."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def moved(model: Any, device: str) -> Any:
    """The model on this device; `auto` leaves a user's own model where it is."""
    if device == "auto":
        return model
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = device.partition(":")[0]
    if kind not in available:
        raise ValueError(f"device={device!r} is not one of auto, {', '.join(available)}")
    if not available[kind]:
        raise ValueError(f"device={device!r} is not available here; use device=cpu or auto")
    model.to(device)
    return model


class ModelPolicy:
    """A PolicyModel that scores rollouts whose `inputs` are {"states": [...], "actions": [...]}."""

    def __init__(self, model: PolicyModel, device: str = "auto") -> None:
        expect_methods(model, POLICY_METHODS, "policy")
        self.model = moved(model, device)
        parameters = model.get_parameters()
        if not isinstance(parameters, Mapping):
            kind = type(parameters).__name__
            raise TypeError(f"policy.get_parameters must return a dict of names to tensors, got {kind}")
        self.version = 0

    def log_probs(self, states: list[Any], actions: list[Any]) -> tuple[Tensor, Tensor]:
        """logp_NT and mask_NT of flat (state, action) lists, checked."""
        logp = self.model.get_log_probabilities(states, actions)
        if not isinstance(logp, Tensor):
            raise TypeError(f"policy.get_log_probabilities must return a torch.Tensor, got {type(logp).__name__}")
        if logp.ndim not in (1, 2) or logp.shape[0] != len(states):
            raise ValueError(
                f"policy.get_log_probabilities returned shape {tuple(logp.shape)} for {len(states)} (state, action) "
                f"pairs; expected ({len(states)},), or ({len(states)}, T) with a get_mask method"
            )
        if logp.ndim == 1:
            return logp[:, None], torch.ones(len(states), 1, dtype=torch.bool, device=logp.device)
        if not isinstance(self.model, GivesMask):
            raise TypeError(
                "two-dimensional log-probs need policy.get_mask(states, actions) -> (N, T): which decisions were made"
            )
        return logp, torch.as_tensor(self.model.get_mask(states, actions), device=logp.device)

    def score(self, rows: Rollouts, entropy: bool = False) -> Scores:
        """Log-probs now, and entropies where the model gives them and they are asked for."""
        states, actions = rows.inputs["states"], rows.inputs["actions"]
        logp_NT, _ = self.log_probs(states, actions)
        if not entropy or not isinstance(self.model, GivesEntropy):
            return Scores(logp_NT)
        entropy_NT = self.model.get_entropy(states, actions)
        if tuple(entropy_NT.shape) not in (tuple(logp_NT.shape), (len(states),)):
            shapes = f"{tuple(entropy_NT.shape)}, expected {tuple(logp_NT.shape)}"
            raise ValueError(f"policy.get_entropy returned shape {shapes}")
        return Scores(logp_NT, entropy_NT.reshape(logp_NT.shape))

    def parameters(self) -> Mapping[str, Tensor]:
        """The model's tensors by name."""
        return self.model.get_parameters()

    split = staticmethod(by_rows)

    def train(self) -> None:
        """Before an update."""
        self.model.train()

    def eval(self) -> None:
        """Before sampling."""
        self.model.eval()


def reference_of(policy: PolicyModel) -> FrozenReference:
    """A copy of the policy as it is now."""
    try:
        return FrozenReference(ModelPolicy(copy.deepcopy(policy)))
    except Exception as error:
        raise TypeError(
            f"the policy cannot be copied for a reference ({line(error)}); pass reference_policy, or set beta=0"
        ) from error


class ModelSource:
    """Samples a group of actions from each state and scores them with the reward model."""

    def __init__(
        self,
        policy: ModelPolicy,
        reward_model: RewardModel,
        group_size: int,
        states: Sequence[Any] | None = None,
        groups_per_step: int = 1,
    ) -> None:
        expect_methods(reward_model, REWARD_METHODS, "reward model")
        self._policy, self._reward, self._group_size = policy, reward_model, group_size
        self._states, self._groups_per_step, self._cursor = states, groups_per_step, 0

    @torch.no_grad()
    def collect(self, request: CollectRequest) -> Collected:
        """One group of tries from each start."""
        starts, states, actions = self._drawn(request)
        rollouts = self._rollouts(states, actions, 0)
        return Collected(rollouts.but(inputs={"states": states, "actions": actions}), starts)

    @torch.no_grad()
    def collect_part(self, request: CollectRequest) -> Part:
        """Every rank draws all actions, alike, since only the model knows how; each scores and judges its own."""
        starts, states, actions = self._drawn(request)
        own, size = request.slots.of(len(starts)), self._group_size
        rows = slice(own.start * size, own.stop * size)

        def finish(whole: Collected, besides: Sequence[State]) -> Collected:
            _expect_same_draws([some.values["drawn"] for some in besides])
            return Collected(whole.rollouts.but(inputs={"states": states, "actions": actions}), starts)

        rollouts = self._rollouts(states[rows], actions[rows], own.start) if own else None
        return Part(rollouts, starts, State({"drawn": digest([starts, actions])}, {}), finish)

    def _drawn(self, request: CollectRequest) -> tuple[list[Any], list[Any], list[Any]]:
        """The starts, and states and actions of all tries."""
        given = self._next() if request.starts is None else request.starts
        if not isinstance(given, Iterable):
            raise TypeError(
                f"a step takes a list of states, got {type(given).__name__}; train() a list for each step: [[0, 1], …]"
            )
        starts = list(given)
        if not starts:
            raise ValueError("there are no states to sample from; pass at least one")
        self._policy.eval()
        self._reward.eval()
        groups = self._policy.model.generate_actions(starts, self._group_size)
        self._check_groups(groups, len(starts))
        states = [state for state in starts for _ in range(self._group_size)]
        return starts, states, [action for group in groups for action in group]

    def _rollouts(self, states: list[Any], actions: list[Any], first: int) -> Rollouts:
        """Scored and judged, without inputs; the first group's number is `first`."""
        logp_NT, mask_NT = self._policy.log_probs(states, actions)
        groups = len(states) // self._group_size
        return Rollouts(
            group_N=first + torch.arange(groups, device=logp_NT.device).repeat_interleave(self._group_size),
            mask_NT=mask_NT,
            old_logp_NT=logp_NT.detach(),
            reward_N=self._rewards(states, actions, logp_NT),
        )

    def _next(self) -> Sequence[Any]:
        if self._states is None:
            raise ValueError("a step needs states: train([[state, …], …]), step([state, …]) or GRPOTrainer(states=[…])")
        total = len(self._states)
        chosen = [self._states[(self._cursor + i) % total] for i in range(min(self._groups_per_step, total))]
        self._cursor += len(chosen)
        return chosen

    def _check_groups(self, groups: Any, starts: int) -> None:
        size = self._group_size
        if not isinstance(groups, Sequence) or isinstance(groups, str) or len(groups) != starts:
            count = len(groups) if isinstance(groups, Sized) else type(groups).__name__
            raise ValueError(
                f"policy.generate_actions returned {count} groups for {starts} states; expected one a state"
            )
        for i, group in enumerate(groups):
            if not isinstance(group, Sized) or isinstance(group, str) or len(group) != size:
                count = len(group) if isinstance(group, Sized) else type(group).__name__
                raise ValueError(f"policy.generate_actions: group {i} has {count} actions; expected group_size={size}")

    def _rewards(self, states: list[Any], actions: list[Any], like: Tensor) -> Tensor:
        given = self._reward.compute_rewards(list(states), list(actions))
        name = f"{type(self._reward).__name__}.compute_rewards"
        if given is None:
            raise ValueError(f"{name} returned None; expected {len(states)} numbers")
        given = list(given) if isinstance(given, Iterator) else given
        try:
            reward_N = torch.as_tensor(given).detach().to(device=like.device, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            kinds = (
                sorted({type(item).__name__ for item in given})
                if isinstance(given, Iterable)
                else [type(given).__name__]
            )
            raise TypeError(f"{name} must return numbers, got {', '.join(kinds)}") from error
        if tuple(reward_N.shape) != (len(states),):
            shapes = f"{tuple(reward_N.shape)} for {len(states)} (state, action) pairs; expected ({len(states)},)"
            raise ValueError(f"{name} returned shape {shapes}")
        bad = (~torch.isfinite(reward_N)).nonzero().flatten().tolist()
        if bad:
            pairs = f"row {bad[0]} (state {states[bad[0]]!r:.60}, action {actions[bad[0]]!r:.60})"
            wrong = f"{float(given[bad[0]])}; rewards must be finite, in float32 too ({len(bad)} are not)"
            raise ValueError(f"{name}: {pairs} is {wrong}")
        return reward_N

    def state(self) -> State:
        """The cursor into the given states."""
        return State({"cursor": self._cursor}, {})

    def load_state(self, state: State) -> None:
        """Go on where that left off."""
        self._cursor = int(state.values["cursor"])

    def metrics(self) -> Mapping[str, float | None]:
        """Nothing of its own to report."""
        return {}

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """State and action of each row, as text."""
        pairs = zip(rows.inputs["states"], rows.inputs["actions"], strict=True)
        return [{"state": str(state), "action": str(action)} for state, action in pairs]

    def close(self) -> None:
        """Nothing to close."""


def _expect_same_draws(drawn: Sequence[str]) -> None:
    """Raise where a rank's states or actions are not the chief's."""
    for rank, mine in enumerate(drawn):
        if mine != drawn[0]:
            raise RanksDiffer(
                f"rank {rank} has other states or actions than rank 0; give every rank the same states, and draw from "
                "torch's, NumPy's or Python's own generators, which are seeded alike before each step"
            )


def digest(tree: Any) -> str:
    """A fingerprint of states or actions: of tensors and arrays their bytes, of other things what they print."""
    if isinstance(tree, Tensor):
        tree = tree.detach().cpu().numpy()
    if isinstance(tree, np.ndarray):
        told = f"{tree.dtype}{tree.shape}".encode() + np.ascontiguousarray(tree).tobytes()
    elif isinstance(tree, list | tuple):
        told = "".join(map(digest, tree)).encode()
    elif isinstance(tree, Mapping):
        told = "".join(f"{key}{digest(value)}" for key, value in tree.items()).encode()
    else:
        told = re.sub(r" at 0x[0-9a-f]+", "", repr(tree)).encode()
    return hashlib.sha256(told).hexdigest()[:16]
