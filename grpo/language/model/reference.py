"""The policy the KL is measured to: a frozen copy, the weights without their adapter, or a second, frozen adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo.config import ConfigError
from grpo.language.scoring.modes import mode_of
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.scoring.probe import make_scorer
from grpo.rollouts import Rollouts

NAME = "reference"
"""Of the second adapter."""


class FrozenCopy:
    """A module of its own, which can follow the policy."""

    def __init__(self, policy: LanguagePolicy, model: Any = None) -> None:
        made = copy.deepcopy(policy.model) if model is None else model
        self.model = made.requires_grad_(False).eval()
        mine = policy.scorer
        self._policy = policy
        packing = mine.packing if model is None else "auto"  # another architecture may need another
        self.scorer = make_scorer(made, mine.temperature, packing, mine.set_budget, mine.pad, mine.autocast)
        self._parameters = {name: p for name, p in made.named_parameters() if name in policy.parameters()}

    def score(self, rows: Rollouts) -> Tensor:
        """Its log-probs of the sampled tokens."""
        with self._policy.precision():
            return self.scorer.in_parts(rows.inputs, int(rows.mask_NT.shape[1])).logp_NT

    def active(self) -> AbstractContextManager[Any]:
        """Within it `scorer` reads with these weights: as it always does."""
        return nullcontext()

    @torch.no_grad()
    def sync(self, policy: Mapping[str, Tensor], alpha: float) -> None:
        """reference ← α·policy + (1−α)·reference."""
        for name, mine in self._parameters.items():
            mine.lerp_(policy[name].detach().to(mine), alpha)

    def parameters(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps of it."""
        return self._parameters


class AdapterOff:
    """The policy's own weights with the adapter switched off: no memory of its own."""

    def __init__(self, policy: LanguagePolicy) -> None:
        self._policy = policy

    def score(self, rows: Rollouts) -> Tensor:
        """The base model's log-probs of the sampled tokens."""
        model = self._policy.model
        with mode_of(model, False), model.disable_adapter(), self._policy.precision():
            return self._policy.scorer.in_parts(rows.inputs, int(rows.mask_NT.shape[1])).logp_NT

    def sync(self, policy: Mapping[str, Tensor], alpha: float) -> None:
        """The base weights cannot follow an adapter."""
        raise ConfigError(
            "a reference without adapter cannot follow the policy; use grpo.language.model.reference.make"
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """Nothing that the policy does not keep."""
        return {}


class FrozenAdapter:
    """A second adapter on the same base weights, frozen at what the first was, which can follow it."""

    def __init__(self, policy: LanguagePolicy, name: str = NAME) -> None:
        self._policy, self._name, model = policy, name, policy.model
        self.scorer = policy.scorer
        self._active = model.active_adapter
        if name not in model.peft_config:
            model.add_adapter(name, copy.deepcopy(model.peft_config[self._active]))
            model.set_adapter(self._active)
        every = dict(model.named_parameters())
        self._pairs = {name: self._counterpart(every, name) for name in policy.parameters()}
        for mine in self._pairs.values():
            mine.requires_grad_(False)
        self.sync(policy.parameters(), 1.0)

    def _counterpart(self, every: Mapping[str, Tensor], name: str) -> Tensor:
        mine = every.get(name.replace(f".{self._active}.", f".{self._name}."))
        if mine is None or mine is every[name]:
            raise ConfigError(
                f"{name} is trained beside the adapter (modules_to_save, bias): a second adapter has no copy of it; "
                "leave ref_sync_steps out, or train without an adapter"
            )
        return mine

    def score(self, rows: Rollouts) -> Tensor:
        """The second adapter's log-probs of the sampled tokens."""
        with self.active(), mode_of(self._policy.model, False), self._policy.precision():
            return self.scorer.in_parts(rows.inputs, int(rows.mask_NT.shape[1])).logp_NT

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it `scorer`, the policy's own, reads with this adapter."""
        model = self._policy.model
        trained = {name: p.requires_grad for name, p in model.named_parameters()}
        try:
            model.set_adapter(self._name)
            yield
        finally:
            model.set_adapter(self._active)  # which also says what is trained: as it was
            for name, p in model.named_parameters():
                p.requires_grad_(trained[name])

    @torch.no_grad()
    def sync(self, policy: Mapping[str, Tensor], alpha: float) -> None:
        """reference ← α·policy + (1−α)·reference, adapter by adapter."""
        for name, mine in self._pairs.items():
            mine.lerp_(policy[name].detach().to(mine), alpha)

    def parameters(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps of it."""
        return self._pairs


def make(policy: LanguagePolicy, synced: bool, fresh: bool = True) -> FrozenCopy | AdapterOff | FrozenAdapter:
    """The smallest reference that does what is asked.

    synced: it will follow the policy. fresh: the adapter begins as nothing, so that the base weights are its start.
    """
    if not hasattr(policy.model, "disable_adapter"):
        return FrozenCopy(policy)
    return AdapterOff(policy) if fresh and not synced else FrozenAdapter(policy)
