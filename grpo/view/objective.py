"""What was minimised, in words and numbers, from the settings that the run folder holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo.run.folder import Row
from grpo.view.files import finite

_KL = {
    "k1": "p − q",
    "k2": "(p − q)² / 2",
    "k3": "exp(q − p) − (q − p) − 1",
    "abs": "|p − q|",
    "exact": "Σ π·(log π − log other)",
}
"""p = log π, q = log of the other policy."""
_BASELINE = {
    "group_mean": "reward − mean",
    "leave_one_out": "reward − mean of the others",
    "length_weighted": "reward − length-weighted mean",
    "best_of_group": "reward − best of the others",
    "entropic": "exp(β·reward) / mean of the others' − 1",
    "optimal_token": "reward to go − energy-weighted mean at the same decision",
    "greedy": "reward to go − reward of the likeliest answer",
    "role_mean": "reward − running mean of its role",
    "optimal_value": "reward − value of the best policy near the start",
    "given": "reward to go − baseline of the room",
    "none": "reward",
}
_BEFORE = {
    "geometric": "−A·exp(mean of the row's clipped log-ratios)",
    "cispo": "−stop(clip(r, {bounds}))·A·log π",
    "sapo": "−A·σ(τ(r − 1))·4/τ, τ by the sign of A",
    "vespo": "−stop(W^k·exp(λ(1 − W)))·A·log π, W the product of the row's ratios",
    "dppo_tv": "−stop(r)·A·log π inside the trust region, 0 outside",
    "dppo_kl": "−stop(r)·A·log π inside the trust region, 0 outside",
    "dro": "−(A·log π − {dro_beta}/2·(log r)²)",
    "unclipped": "−r·A",
    "policy_gradient": "−A·log π",
}
"""Formulas of folders that do not bring their own."""
_SCALE = {"group_std": "std", "batch_std": "std of the batch", "group_mean": "mean"}


def describe(columns: Mapping[str, Any]) -> Row:
    """The objective as the page shows it; `columns` are the recipe's, by name."""
    c = columns
    if not isinstance(c.get("surrogate"), str):
        return {
            "known": False,
            "formula": None,
            "advantage_formula": None,
            "kl_formula": None,
            "ratio_low": None,
            "ratio_high": None,
            "beta": None,
            "surrogate": None,
            "when_held": None,
            "loss_type": c.get("name"),
        }
    low, high = limits(c)
    names = (
        "surrogate",
        "ratio",
        "beta",
        "kl_estimator",
        "kl_to",
        "kl_in",
        "kl_direction",
        "kl_importance",
        "baseline",
        "scale",
        "credit",
        "reduction",
        "whiten",
        "entropy_coef",
        "entropy_over",
        "teacher_coef",
        "teacher_in",
    )
    return {
        "known": True,
        "loss_type": c.get("name"),
        **{name: c.get(name) for name in names},
        "epsilon_low": finite(c.get("epsilon")),
        "epsilon_high": _high(c),
        "ratio_low": low,
        "ratio_high": high,
        "formula": _text(c.get("formula")) or _formula(c, low, high),
        "when_held": _text(c.get("when_held")) or "held there",
        "advantage_formula": _advantage(c),
        "kl_formula": _KL.get(str(c.get("kl_estimator"))) if c.get("beta") else None,
    }


def limits(columns: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Between which ratios a decision is not held; None where nothing is clipped."""
    if "limits" in columns:
        told = columns["limits"] if isinstance(columns["limits"], list) else []
        both = [finite(value) for value in told]
        return (both[0], both[1]) if len(both) == 2 and None not in both else (None, None)
    low, high, surrogate = finite(columns.get("epsilon")), _high(columns), columns.get("surrogate")
    if low is None or high is None:
        return None, None
    if surrogate == "geometric":
        return math.exp(-min(max(low, -50.0), 50.0)), math.exp(min(max(high, -50.0), 50.0))
    if surrogate == "cispo" and columns.get("bounds") == "absolute":
        return 0.0, high
    return (1.0 - low, 1.0 + high) if surrogate in ("clip", "cispo") else (None, None)


def held(ratio_T: np.ndarray, advantage_T: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
    """−1 where a decision is held at the lower bound, 1 at the upper one, else 0."""
    if low is None or high is None:
        return np.zeros(len(ratio_T), int)
    return ((ratio_T > high) & (advantage_T > 0)).astype(int) - ((ratio_T < low) & (advantage_T < 0)).astype(int)


def kl_of(logp_T: np.ndarray, other_T: np.ndarray, columns: Mapping[str, Any]) -> np.ndarray:
    """By the recipe's estimator; k3 where it names none that samples can tell."""
    gap_T = np.clip(logp_T - other_T, -20.0, 20.0)
    known = {"k1": gap_T, "k2": gap_T**2 / 2, "abs": np.abs(gap_T)}
    return np.asarray(known.get(str(columns.get("kl_estimator")), np.expm1(-gap_T) + gap_T))


def _high(c: Mapping[str, Any]) -> float | None:
    return finite(c.get("epsilon") if c.get("epsilon_high") is None else c["epsilon_high"])


def _text(told: object) -> str | None:
    return told[:500] if isinstance(told, str) else None


def _formula(c: Mapping[str, Any], low: float | None, high: float | None) -> str | None:
    bounds = f"{low:.4g}, {high:.4g}" if low is not None and high is not None else ""
    if c["surrogate"] != "clip":
        known = _BEFORE.get(c["surrogate"])
        return None if known is None else known.format(bounds=bounds, dro_beta=c.get("dro_beta"))
    free = "r·A" if c.get("delta") is None else f"min(r, {c['delta']})·A"
    text = f"−min({free}, clip(r, {bounds})·A)"
    return text if c.get("dual_clip") is None else f"{text}, at most {c['dual_clip']}·|A| where A < 0"


def _advantage(c: Mapping[str, Any]) -> str:
    value = _BASELINE.get(str(c.get("baseline")), "reward")
    if c.get("credit") == "reward_to_go":
        value = value.replace("reward", "reward to go", 1) if "reward to go" not in value else value
    scale = _SCALE.get(str(c.get("scale")))
    if scale is None:
        return value
    eps = finite(c.get("scale_eps"))
    return f"({value}) / ({scale} + {eps:g})" if eps else f"({value}) / {scale}"
