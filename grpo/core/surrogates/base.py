"""What every surrogate carries, and how one is chosen from settings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, get_type_hints

from grpo.core.arrays import Array


class Decisions(NamedTuple):
    """What the objective sees of each decision: (N, T), or fewer columns where chunks or trajectories decide."""

    mask: Array
    logp: Array
    log_ratio: Array
    advantage: Array
    kl: Array | None
    entropy: Array | None
    weight: Array | None
    """The room's float weight (continuation)."""
    mismatch: Array | None
    kept: Array | None
    """False where the off-policy gate closed."""
    selected: Array | None
    """False where the entropy gate closed."""
    teacher: Array | None = None
    """Divergence to the teacher, where it is a term of the loss."""


SURROGATES: dict[str, type[Surrogate]] = {}
"""Every surrogate by its kind."""


@dataclass(frozen=True)
class Surrogate(ABC):
    """How ratio and advantage become a loss, with the numbers that belong to this way alone."""

    kind: ClassVar[str]
    """Its name in settings and tables."""
    prefix: ClassVar[str] = ""
    """Stands before its numbers' names among all other settings: `vespo_k_pos`."""
    whole_rows: ClassVar[bool] = False
    """A decision's loss depends on others of its trajectory."""
    selects: ClassVar[bool] = False
    """Takes the entropy gate into its term, instead of being gated by it."""
    still_without_advantage: ClassVar[bool] = False
    """Where the advantage is 0 the gradient is 0, too: such decisions need no backward pass."""
    goes_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Axes of a recipe on which only some choices have a meaning here, the usual one first."""
    when_held: ClassVar[str] = "held there: no gradient"
    """What becomes of a decision beyond `limits`, in words."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            SURROGATES[cls.kind] = cls

    def __post_init__(self) -> None:
        for item in fields(self):
            value = vars(self)[item.name]
            number = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
            if "float" in str(item.type) and value is not None and not number:
                raise ValueError(f"{self.prefix}{item.name} must be a finite number, got {value!r}")

    @abstractmethod
    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        """The policy term of each decision."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The loss in words, its numbers filled in: r the ratio, A the advantage."""

    @property
    def limits(self) -> tuple[float, float] | None:
        """Between which ratios a decision is not held; None where nothing is clipped."""
        return None

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 a ratio counts as unclipped for the gates; PPO's where the term has no clip."""
        return 0.2, 0.2

    @property
    def label(self) -> str:
        """Its kind and what a table should show of its numbers."""
        return self.kind

    @property
    def idle(self) -> Mapping[str, str]:
        """Numbers of its own that cannot change anything beside the others, each with what it would need."""
        return {}

    @property
    def carried(self) -> Mapping[str, Any]:
        """Numbers that mean the same in another surrogate that has them."""
        return self.settings()

    def mismatch(self, d: Decisions) -> Array | None:
        """The factor that corrects the term for a sampler that is not the policy; None: none, or it is in the term."""
        return d.mismatch

    def settings(self) -> dict[str, Any]:
        """Its numbers by their names among all settings."""
        return {self.prefix + name: value for name, value in vars(self).items()}

    def but(self, numbers: Mapping[str, Any]) -> Surrogate:
        """This one with some numbers changed, by their names among all settings."""
        return replace(self, **{name.removeprefix(self.prefix): value for name, value in numbers.items()})

    def expect_positive(self, *names: str, or_zero: bool = False) -> None:
        """Raise where one of these numbers is given and is below 0, or 0."""
        for name in names:
            value = vars(self)[name]
            if value is not None and (value < 0 or (value == 0 and not or_zero)):
                must = "must not be negative" if or_zero else "must be positive"
                raise ValueError(f"{self.prefix}{name} {must}, got {value!r}")


def chosen(now: Surrogate, kind: str | Surrogate | None = None, **numbers: Any) -> Surrogate:
    """`now`, or the surrogate asked for, with these numbers; one chosen by name takes over those that both have."""
    if isinstance(kind, str) and kind != now.kind:
        own = SURROGATES[kind]
        kept = {name: value for name, value in now.carried.items() if name in names(own)}
        return own(**{name.removeprefix(own.prefix): value for name, value in (kept | numbers).items()})
    return (kind if isinstance(kind, Surrogate) else now).but(numbers)


def names(own: type[Surrogate]) -> list[str]:
    """A surrogate's numbers by their names among all settings."""
    return [own.prefix + item.name for item in fields(own)]


def owners() -> dict[str, list[str]]:
    """Every surrogate's numbers, each with the kinds that have it."""
    found: dict[str, list[str]] = {}
    for kind, own in SURROGATES.items():
        for name in names(own):
            found.setdefault(name, []).append(kind)
    return found


_hints = cache(get_type_hints)
"""Worked out of text once for every class: a configuration asks for all of them."""


def types() -> dict[str, Any]:
    """What each of these numbers may be."""
    found: dict[str, Any] = {}
    for own in SURROGATES.values():
        hints = _hints(own)
        found |= {own.prefix + item.name: hints[item.name] for item in fields(own)}
    return found


def flattened(block: Mapping[str, Any]) -> dict[str, Any]:
    """The block `{kind: vespo, k_pos: 1}` as `{surrogate: vespo, vespo_k_pos: 1}`."""
    full = {item.name: own.prefix + item.name for own in SURROGATES.values() for item in fields(own)}
    return {"surrogate" if name == "kind" else full.get(name, name): value for name, value in block.items()}
