"""Surrogates without a clip: the formula, then the record that carries its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from grpo.core.arrays import EXP_LIMIT, Array, clip, expect_shape, namespace, row_sum, stop_gradient, zeros
from grpo.core.ratios import log_weight
from grpo.core.surrogates.base import Decisions, Surrogate

_LOG_TINY = -18.420680743952367
"""ln 1e-8, the smallest trajectory log-weight VESPO distinguishes."""


def unclipped(ratio_NT: Array, advantage_NT: Array) -> Array:
    """−r·A: the importance-weighted policy gradient without a trust region."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    return -ratio_NT * advantage_NT


@dataclass(frozen=True)
class Unclipped(Surrogate):
    """The importance-weighted policy gradient."""

    kind: ClassVar[str] = "unclipped"
    still_without_advantage: ClassVar[bool] = True

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        return unclipped(ratio_NT, d.advantage)

    @property
    def formula(self) -> str:
        return "−r·A"


def policy_gradient(logp_NT: Array, advantage_NT: Array) -> Array:
    """−A·log π. REINFORCE (Williams 1992); GPG, arXiv:2504.02546."""
    expect_shape(tuple(logp_NT.shape), advantage=advantage_NT)
    return -advantage_NT * logp_NT


@dataclass(frozen=True)
class PolicyGradient(Surrogate):
    """REINFORCE: without a ratio."""

    kind: ClassVar[str] = "policy_gradient"
    still_without_advantage: ClassVar[bool] = True

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        return policy_gradient(d.logp, d.advantage)

    @property
    def formula(self) -> str:
        return "−A·log π"


def topr(ratio_NT: Array, advantage_NT: Array, logp_NT: Array) -> Array:
    """−A·log π where A > 0; else −sg(min(r, 1))·A·log π: what is bad and has become rare counts little.

    TOPR, arXiv:2503.14286 (eq. 8).
    """
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT, logp=logp_NT)
    tapered_NT = stop_gradient(clip(ratio_NT, None, 1.0))
    weight_NT = namespace(ratio_NT).where(advantage_NT > 0, tapered_NT * 0 + 1, tapered_NT)
    return -weight_NT * advantage_NT * logp_NT


@dataclass(frozen=True)
class Topr(Surrogate):
    """TOPR: no ratio for what is good, one up to 1 for what is bad."""

    kind: ClassVar[str] = "topr"
    still_without_advantage: ClassVar[bool] = True

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        return topr(ratio_NT, d.advantage, d.logp)

    @property
    def formula(self) -> str:
        return "−A·log π where A > 0, else −stop(min(r, 1))·A·log π"


def sapo(ratio_NT: Array, advantage_NT: Array, tau_pos: float, tau_neg: float) -> Array:
    """−A·σ(τ(r−1))·4/τ with τ by the sign of A: a soft gate instead of a clip. SAPO, arXiv:2511.20347."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    xp = namespace(ratio_NT)
    tau_NT = xp.where(advantage_NT > 0, zeros((), ratio_NT, tau_pos), zeros((), ratio_NT, tau_neg))
    gate_NT = 1.0 / (1.0 + xp.exp(-clip(tau_NT * (ratio_NT - 1.0), -EXP_LIMIT, EXP_LIMIT * 4)))
    return -advantage_NT * gate_NT * 4.0 / tau_NT


@dataclass(frozen=True)
class Sapo(Surrogate):
    """SAPO: a soft gate instead of a clip."""

    kind: ClassVar[str] = "sapo"
    still_without_advantage: ClassVar[bool] = True
    tau_pos: float = 1.0
    """Temperature where A > 0."""
    tau_neg: float = 1.05
    """Temperature elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_positive("tau_pos", "tau_neg")

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        return sapo(ratio_NT, d.advantage, self.tau_pos, self.tau_neg)

    @property
    def formula(self) -> str:
        return f"−A·σ(τ(r − 1))·4/τ, τ = {self.tau_pos:g} where A > 0, else {self.tau_neg:g}"


def vespo(
    log_ratio_NT: Array,
    advantage_NT: Array,
    logp_NT: Array,
    mask_NT: Array,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
    log_weight_NT: Array | None = None,
) -> Array:
    """−sg(W^k·exp(λ(1−W)))·A·log π, W the product of a row's ratios; k, λ by the sign of A. VESPO, arXiv:2602.10693.

    `log_weight_NT`: log of the sampler-mismatch weight of each decision; VESPO takes it into W.
    """
    expect_shape(
        tuple(log_ratio_NT.shape), advantage=advantage_NT, logp=logp_NT, mask=mask_NT, log_weight=log_weight_NT
    )
    xp = namespace(log_ratio_NT)
    log_w_N1 = row_sum(clip(log_ratio_NT, -EXP_LIMIT, EXP_LIMIT), mask_NT)
    if log_weight_NT is not None:
        log_w_N1 = log_w_N1 + row_sum(clip(log_weight_NT, _LOG_TINY, EXP_LIMIT), mask_NT)
    log_w_N1 = clip(stop_gradient(log_w_N1), _LOG_TINY, EXP_LIMIT)
    positive_NT = advantage_NT >= 0
    k_NT = xp.where(positive_NT, zeros((), log_w_N1, k_pos), zeros((), log_w_N1, k_neg))
    lam_NT = xp.where(positive_NT, zeros((), log_w_N1, lambda_pos), zeros((), log_w_N1, lambda_neg))
    return -xp.exp(lam_NT + k_NT * log_w_N1 - lam_NT * xp.exp(log_w_N1)) * advantage_NT * logp_NT


@dataclass(frozen=True)
class Vespo(Surrogate):
    """VESPO: a smooth weight from the product of a row's ratios, the sampler's mismatch among them."""

    kind: ClassVar[str] = "vespo"
    still_without_advantage: ClassVar[bool] = True
    prefix: ClassVar[str] = "vespo_"
    whole_rows: ClassVar[bool] = True
    goes_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "ratio": ("token", "sequence", "sequence_token"),
        "mismatch_level": ("token",),
    }
    k_pos: float = 2.0
    """Exponent k where A ≥ 0."""
    lambda_pos: float = 3.0
    """Decay λ where A ≥ 0."""
    k_neg: float = 3.0
    """Exponent k where A < 0."""
    lambda_neg: float = 2.0
    """Decay λ where A < 0."""

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        shape = (self.k_pos, self.lambda_pos, self.k_neg, self.lambda_neg)
        log_weight_NT = None if d.mismatch is None else log_weight(d.mismatch)
        return vespo(d.log_ratio, d.advantage, d.logp, d.mask, *shape, log_weight_NT)

    def mismatch(self, d: Decisions) -> None:
        return None

    @property
    def formula(self) -> str:
        return "−stop(W^k·exp(λ(1 − W)))·A·log π, W the product of the row's ratios and mismatch weights"


def dro(log_ratio_NT: Array, advantage_NT: Array, logp_NT: Array, beta: float) -> Array:
    """−(A·log π − β/2·(log π − log π_old)²): policy gradient with a quadratic leash. DRO, arXiv:2405.19107."""
    expect_shape(tuple(log_ratio_NT.shape), advantage=advantage_NT, logp=logp_NT)
    return -(logp_NT * advantage_NT - 0.5 * beta * log_ratio_NT**2)


@dataclass(frozen=True)
class Dro(Surrogate):
    """DRO: policy gradient with a quadratic leash to the sampler."""

    kind: ClassVar[str] = "dro"
    prefix: ClassVar[str] = "dro_"
    beta: float = 0.5
    """Weight of the leash."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_positive("beta", or_zero=True)

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        return dro(d.log_ratio, d.advantage, d.logp, self.beta)

    @property
    def formula(self) -> str:
        return f"−(A·log π − {self.beta}/2·(log r)²)"
