"""Surrogates with a clip or a trust region: the formula, then the record that carries its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo.core.arrays import Array, astype, clip, expect_shape, masked, namespace, row_mean, stop_gradient, wide
from grpo.core.ratios import log_weight
from grpo.core.surrogates.base import Decisions, Surrogate


@dataclass(frozen=True)
class Clipping(Surrogate):
    """What surrogates with a clip share."""

    epsilon: float = 0.2
    """Lower clip: the ratio may fall to 1 − epsilon."""
    epsilon_high: float | None = None
    """Upper clip: the ratio may rise to 1 + epsilon_high; None: epsilon."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_positive("epsilon", "epsilon_high", or_zero=True)

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def label(self) -> str:
        low, high = self.clip_range
        return f"{self.kind} {low:g}" + (f"/{high:g}" if high != low else "")


def _between(limits: tuple[float, float]) -> str:
    return f"{limits[0]:.4g}, {limits[1]:.4g}"


def clipped(ratio_NT: Array, advantage_NT: Array, low: float, high: float, delta: float | None = None) -> Array:
    """−min(r·A, clip(r, 1−low, 1+high)·A). PPO, arXiv:1707.06347; clip-higher, arXiv:2503.14476.

    `delta` also caps the unclipped ratio (two-sided clip, arXiv:2505.07291): it bounds the loss where A < 0.
    """
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT)
    free_NT = clip(ratio_NT, None, delta) * advantage_NT
    return -namespace(ratio_NT).minimum(free_NT, clip(ratio_NT, 1.0 - low, 1.0 + high) * advantage_NT)


def dual_clipped(loss_NT: Array, advantage_NT: Array, bound: float) -> Array:
    """min(loss, c·|A|) where A < 0: a decision that became likely again cannot dominate. arXiv:1912.09729."""
    expect_shape(tuple(loss_NT.shape), advantage=advantage_NT)
    xp = namespace(loss_NT)
    return xp.where(advantage_NT < 0, xp.minimum(loss_NT, -advantage_NT * bound), loss_NT)


@dataclass(frozen=True)
class Clip(Clipping):
    """PPO's clip, two-sided or dual where asked for."""

    kind: ClassVar[str] = "clip"
    still_without_advantage: ClassVar[bool] = True
    delta: float | None = None
    """Cap on the unclipped ratio (two-sided clip)."""
    dual_clip: float | None = None
    """Bound c of the dual clip, where A < 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_positive("delta", "dual_clip")

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        loss_NT = clipped(ratio_NT, d.advantage, *self.clip_range, self.delta)
        return loss_NT if self.dual_clip is None else dual_clipped(loss_NT, d.advantage, self.dual_clip)

    @property
    def limits(self) -> tuple[float, float]:
        low, high = self.clip_range
        return 1.0 - low, 1.0 + high

    @property
    def formula(self) -> str:
        free = "r·A" if self.delta is None else f"min(r, {self.delta})·A"
        text = f"−min({free}, clip(r, {_between(self.limits)})·A)"
        return text if self.dual_clip is None else f"{text}, at most {self.dual_clip}·|A| where A < 0"


def geometric(
    log_ratio_NT: Array, advantage_NT: Array, mask_NT: Array, low: float, high: float, chosen_NT: Array | None = None
) -> Array:
    """−A·exp(mean_t of the clipped d_t), the same for every decision of the row. GMPO, arXiv:2507.20673 (eq. 4).

    d is clipped to [−low, high] in log space, on the side the advantage pushes to. `chosen_NT`: only these decisions
    enter the mean (entropy gate). A is the row's mean advantage.
    """
    expect_shape(tuple(log_ratio_NT.shape), advantage=advantage_NT, mask=mask_NT, chosen=chosen_NT)
    xp = namespace(log_ratio_NT)
    inside_NT = clip(log_ratio_NT, -low, high)
    held_NT = xp.where(advantage_NT > 0, xp.minimum(log_ratio_NT, inside_NT), xp.maximum(log_ratio_NT, inside_NT))
    mean_N1 = row_mean(held_NT, mask_NT if chosen_NT is None else mask_NT & chosen_NT)
    loss_N1 = -row_mean(advantage_NT, mask_NT) * xp.exp(mean_N1)
    return loss_N1 * astype(mask_NT, loss_N1)


@dataclass(frozen=True)
class Geometric(Clipping):
    """GMPO: the geometric mean of a row's clipped ratios."""

    kind: ClassVar[str] = "geometric"
    still_without_advantage: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    goes_with: ClassVar[Mapping[str, tuple[str, ...]]] = {"ratio": ("token",)}

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        return geometric(d.log_ratio, d.advantage, d.mask, *self.clip_range, d.selected)

    def mismatch(self, d: Decisions) -> Array | None:
        """The row's geometric mean, as of its ratios."""
        if d.mismatch is None:
            return None
        mean_N1 = namespace(d.mismatch).exp(row_mean(log_weight(d.mismatch), d.mask))
        return mean_N1 * (d.mismatch * 0 + 1)

    @property
    def limits(self) -> tuple[float, float]:
        low, high = self.clip_range
        return math.exp(-low), math.exp(high)

    @property
    def formula(self) -> str:
        return "−A·exp(mean of the row's clipped log-ratios)"


def cispo(ratio_NT: Array, advantage_NT: Array, logp_NT: Array, floor: float | None, cap: float | None) -> Array:
    """−sg(clip(r, floor, cap))·A·log π: the weight is clipped, never the gradient. CISPO, arXiv:2506.13585 (eq. 4)."""
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT, logp=logp_NT)
    return -stop_gradient(clip(ratio_NT, floor, cap)) * advantage_NT * logp_NT


@dataclass(frozen=True)
class Cispo(Clipping):
    """CISPO: the weight is clipped, never the gradient."""

    kind: ClassVar[str] = "cispo"
    still_without_advantage: ClassVar[bool] = True
    when_held: ClassVar[str] = "its weight is held, its gradient stays"
    bounds: str = "relative"
    """relative: clip to [1 − epsilon, 1 + epsilon_high] · absolute: cap at epsilon_high, no floor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bounds not in ("relative", "absolute"):
            raise ValueError(f"bounds={self.bounds!r} is not one of relative, absolute")
        if self.bounds == "absolute" and self.epsilon_high is None:
            raise ValueError("bounds=absolute needs epsilon_high, the cap on the ratio")

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        floor, cap = self.limits
        return cispo(ratio_NT, d.advantage, d.logp, None if self.bounds == "absolute" else floor, cap)

    @property
    def limits(self) -> tuple[float, float]:
        low, high = self.clip_range
        return (0.0, high) if self.bounds == "absolute" else (1.0 - low, 1.0 + high)

    @property
    def label(self) -> str:
        low, high = self.clip_range
        return f"{self.kind} ≤{high:g}" if self.bounds == "absolute" else f"{self.kind} 1−{low:g}/1+{high:g}"

    @property
    def idle(self) -> Mapping[str, str]:
        return {"epsilon": "bounds=absolute has no floor"} if self.bounds == "absolute" else {}

    @property
    def carried(self) -> Mapping[str, Any]:
        """A cap on the ratio is no distance from 1."""
        return {} if self.bounds == "absolute" else self.settings()

    @property
    def formula(self) -> str:
        return f"−stop(clip(r, {_between(self.limits)}))·A·log π"


def inside_total_variation(
    logp_NT: Array, old_logp_NT: Array, advantage_NT: Array, mask_NT: Array, low: float, high: float
) -> Array:
    """A > 0: π(a) − π_old(a) ≤ high; else ≥ −low. DPPO-Binary-TV, arXiv:2602.04879."""
    expect_shape(tuple(logp_NT.shape), old_logp=old_logp_NT, advantage=advantage_NT, mask=mask_NT)
    xp = namespace(logp_NT)
    p_NT = xp.exp(masked(stop_gradient(wide(logp_NT)), mask_NT))
    shift_NT = p_NT - xp.exp(masked(stop_gradient(wide(old_logp_NT)), mask_NT))
    return xp.where(advantage_NT > 0, shift_NT <= high, shift_NT >= -low)


def inside_binary_kl(
    logp_NT: Array, old_logp_NT: Array, advantage_NT: Array, mask_NT: Array, low: float, high: float, eps: float = 1e-8
) -> Array:
    """KL(π_old‖π) of "this decision or another" ≤ high (A > 0) or low, or moving back. DPPO-KL, arXiv:2602.04879."""
    expect_shape(tuple(logp_NT.shape), old_logp=old_logp_NT, advantage=advantage_NT, mask=mask_NT)
    xp = namespace(logp_NT)
    logp_NT = masked(stop_gradient(wide(logp_NT)), mask_NT)
    old_NT = masked(stop_gradient(wide(old_logp_NT)), mask_NT)
    p_NT, q_NT = xp.exp(logp_NT), xp.exp(old_NT)
    other_NT = xp.log((clip(1.0 - q_NT, 0.0, None) + eps) / (clip(1.0 - p_NT, 0.0, None) + eps))
    kl_NT = q_NT * (old_NT - logp_NT) + (1.0 - q_NT) * other_NT
    return xp.where(advantage_NT > 0, (kl_NT <= high) | (p_NT <= q_NT), (kl_NT <= low) | (p_NT >= q_NT))


def dppo(ratio_NT: Array, advantage_NT: Array, logp_NT: Array, inside_NT: Array, cap: float | None) -> Array:
    """−sg(min(r, cap))·A·log π inside the trust region, 0 outside. DPPO, arXiv:2602.04879.

    `inside_NT` comes from `inside_total_variation` or `inside_binary_kl`.
    """
    expect_shape(tuple(ratio_NT.shape), advantage=advantage_NT, logp=logp_NT, inside=inside_NT)
    return masked(cispo(ratio_NT, advantage_NT, logp_NT, None, cap), inside_NT)


@dataclass(frozen=True)
class DppoTotalVariation(Clipping):
    """DPPO: nothing is learned outside a trust region, here in total variation."""

    kind: ClassVar[str] = "dppo_tv"
    still_without_advantage: ClassVar[bool] = True
    inside: ClassVar[Callable[..., Array]] = staticmethod(inside_total_variation)
    dual_clip: float | None = None
    """Cap on the ratio."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_positive("dual_clip")

    def loss(self, ratio_NT: Array, d: Decisions) -> Array:
        inside_NT = self.inside(d.logp, d.logp - d.log_ratio, d.advantage, d.mask, *self.clip_range)
        return dppo(ratio_NT, d.advantage, d.logp, inside_NT, self.dual_clip)

    @property
    def formula(self) -> str:
        weight = "r" if self.dual_clip is None else f"min(r, {self.dual_clip:g})"
        return f"−stop({weight})·A·log π inside the trust region, 0 outside"


@dataclass(frozen=True)
class DppoBinaryKL(DppoTotalVariation):
    """The same with the region in KL of "this decision or another"."""

    kind: ClassVar[str] = "dppo_kl"
    inside: ClassVar[Callable[..., Array]] = staticmethod(inside_binary_kl)
