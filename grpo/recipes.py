"""The algorithm as a table: one row a published variant, one column an axis.

A recipe chooses a function of `grpo.core` on every axis and the numbers that go with it. Adding a variant is one pure
function in core (if none fits) and one row here; a surrogate with numbers of its own brings them in its class.
`grpo presets --recipes` prints the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, get_type_hints

from grpo.core import surrogates, teachers
from grpo.core.surrogates import (
    Cispo,
    Clip,
    DppoTotalVariation,
    Dro,
    Geometric,
    PolicyGradient,
    Sapo,
    Surrogate,
    Topr,
    Unclipped,
    Vespo,
)
from grpo.errors import ConfigError, nearest

CHOICES: dict[str, tuple[str, ...]] = {
    "credit": ("trajectory", "reward_to_go", "per_reward"),
    "baseline": (
        "group_mean",
        "leave_one_out",
        "length_weighted",
        "best_of_group",
        "entropic",
        "optimal_token",
        "greedy",
        "role_mean",
        "optimal_value",
        "given",
        "none",
    ),
    "scale": ("group_std", "batch_std", "group_mean", "signal_share", "none"),
    "whiten": ("rows", "decisions", "none"),
    "ratio": ("token", "chunk", "sequence", "sequence_token", "trajectory"),
    "surrogate": tuple(surrogates.SURROGATES),
    "reduction": ("sequence_mean", "token_mean", "sequence_sum", "fixed_length"),
    "kl_in": ("loss", "reward"),
    "kl_to": ("reference", "old"),
    "kl_direction": ("current_other", "other_current"),
    "kl_estimator": ("k1", "k2", "k3", "abs", "exact"),
    "kl_gradient": ("auto", "own", "k1", "k2", "k3", "abs"),
    "entropy_over": ("tokens", "loss"),
    "mismatch": ("none", "truncate", "mask"),
    "mismatch_level": ("token", "sequence"),
    "teacher_in": ("advantage", "loss"),
    "teacher_kl": teachers.KINDS,
    "teacher_over": ("sampled", "top_k"),
    "teacher_sees": ("prompt", "answer", "success"),
}
"""The axes and the values each may take."""


@dataclass(frozen=True)
class Recipe:
    """One row of the table: every choice and number the objective needs, checked when made."""

    name: str
    paper: str = ""
    follows: str = ""
    """Whose definition this is, where peers differ."""

    # --- advantage: rewards → advantage_NT
    credit: str = "trajectory"
    """trajectory: one number for all its decisions · reward_to_go: against the group at the same step ·
    per_reward: each reward normalised on its own, then summed."""
    gamma: float = 1.0
    """Discount a decision, for reward_to_go; a turn, for turn_coef."""
    turn_coef: float = 0.0
    """Weight of a second comparison beside that of trajectories: turns that answered the same; 0: none."""
    baseline: str = "group_mean"
    """What a try is compared with."""
    baseline_decay: float = 0.95
    """Of role_mean: how much of the mean stays at each reward."""
    value_beta: float = 0.5
    """Of optimal_value: what the best policy pays for a nat away from the start; towards 0 the best of its tries."""
    scale: str = "group_std"
    """What the difference is measured in."""
    scale_ddof: float = 1.0
    """Degrees of freedom taken off in the standard deviation."""
    scale_eps: float = 1e-4
    """Added to the scale before dividing."""
    whiten: str = "none"
    """A second normalisation over the whole batch: its rows, or its decisions. Moves groups without signal off 0."""
    whiten_ddof: float = 1.0
    """Degrees of freedom taken off in the whitening variance."""
    whiten_eps: float = 1e-8
    """Added to the whitening variance (or to the deviation, see whiten_root)."""
    whiten_root: bool = True
    """True: / √(var + eps). False: / (std + eps)."""
    reward_clip: tuple[float, float] | None = None
    """Limits of the combined reward."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward part; None: all 1."""

    # --- policy term: ratio, surrogate
    ratio: str = "token"
    """Of one decision · of chunk_size decisions · mean of the sequence (gradient through the mean, or each decision
    its own: sequence_token) · product over the trajectory."""
    chunk_size: int = 1
    """Decisions a chunk, for ratio=chunk."""
    log_ratio_low: float = -20.0
    """Lower limit of log π − log π_old before it is exponentiated."""
    log_ratio_high: float = 20.0
    """Upper limit; e^20 is finite in float32."""
    surrogate: Surrogate = field(default_factory=Clip)
    """How ratio and advantage become a loss."""

    # --- reduction
    reduction: str = "sequence_mean"
    """How per-decision losses become one number."""
    count_empty_rows: bool = True
    """Whether a fully masked row counts in a mean over rows."""
    length: float | None = None
    """The constant of fixed_length: the longest a trajectory may be. Needed unless trajectories are one decision."""

    # --- KL and entropy
    beta: float = 0.0
    """Weight of the KL term; 0: no reference is needed."""
    kl_in: str = "loss"
    """The KL is a term of the loss, or is taken off the reward."""
    kl_to: str = "reference"
    """The other policy: the reference, or the one that sampled."""
    kl_direction: str = "current_other"
    """KL(π‖other), or KL(other‖π)."""
    kl_estimator: str = "k3"
    """The value. exact needs a policy that gives it."""
    kl_gradient: str = "auto"
    """The gradient. auto: the estimator's own where its expectation is right, else the one that has it (k2's for k1,
    whose own is zero on average) · own: literally."""
    kl_cap: float | None = None
    """Limit of the KL of one decision; its own gradient is zero beyond."""
    kl_importance: bool = False
    """Multiply the KL by the ratio, gradient included: unbiased for KL(π‖other) off-policy too (arXiv:2512.02556)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    entropy_over: str = "tokens"
    """The bonus is a mean over decisions, or reduced as the loss is."""

    # --- gates
    mask_truncated: bool = False
    """Truncated trajectories do not teach."""
    drop_no_signal: bool = False
    """Groups of equal rewards leave the batch and its denominators; a trainer may refill them."""
    top_entropy: float = 1.0
    """Share of decisions, by entropy, that teach."""
    off_policy_threshold: float | None = None
    """Rows with A < 0 stop teaching once mean(log μ − log π) passes this."""
    mismatch: str = "none"
    """Weight decisions by π_old/μ when a foreign engine sampled: truncate the weight, or mask outside its bounds."""
    mismatch_level: str = "token"
    """One weight a decision, or one a row (the product)."""
    mismatch_low: float | None = None
    """Lower bound of the mismatch weight; None: open."""
    mismatch_high: float | None = 2.0
    """Upper bound of the mismatch weight; None: open."""
    m2_limit: float | None = None
    """Decisions farthest from the sampler stop teaching until the mean of (log π/π_old)² is below this."""
    clip_cov: float = 0.0
    """Share of decisions, drawn among those with covariance in the band below, whose gradient is cut."""
    clip_cov_low: float = 1.0
    """Lower end of the covariance band."""
    clip_cov_high: float = 5.0
    """Upper end of the covariance band."""
    kl_cov: float = 0.0
    """Share of decisions, by covariance, that pay a penalty |log π − log π_old|."""
    kl_cov_coef: float = 1.0
    """Weight of that penalty."""

    # --- a teacher
    teacher_coef: float = 0.0
    """Weight of what a teacher says of each decision; 0: there is none."""
    outcome_coef: float = 1.0
    """Weight of the rewards' advantages beside it; 0: the teacher alone teaches."""
    teacher_in: str = "advantage"
    """It is added to the advantages, as log τ − log π_old of each decision, or is a term of the loss."""
    teacher_kl: str = "reverse"
    """The term: KL(π‖τ) · forward: KL(τ‖π) · js: between them, Jensen–Shannon's generalised."""
    teacher_mix: float = 0.5
    """The teacher's share in the mixture of js; towards 0 forward, towards 1 reverse."""
    teacher_over: str = "sampled"
    """The term looks at the sampled decision alone, or at the teacher's likeliest choices and all others as one."""
    teacher_top_k: int = 64
    """So many of those; as many as there are choices: all of them, exactly."""
    teacher_gamma: float = 0.0
    """Discount of what the decisions that follow gain by the teacher; 0: each has its own."""
    teacher_drift: float = 0.0
    """How much more a decision counts whose predecessors were the teacher's; 0: all alike."""
    teacher_clip: float | None = None
    """The term is weighted by π/π_old, at most this; None: not weighted."""
    teacher_sees: str = "prompt"
    """The teacher reads the same prompt · with the row's answer in it · with a try of the group that succeeded. One
    that sees more is the policy itself where none is named."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = vars(self)[item.name]
            number = "float" in str(item.type) and item.name not in ("reward_clip", "reward_weights")
            if number and value is not None and not _finite(value):
                raise ValueError(f'recipe "{self.name}": {item.name} must be a finite number, got {value!r}')
        if not isinstance(self.surrogate, Surrogate):
            remedy = "give a record of grpo.core.surrogates, Clip(epsilon=0.2) say"
            raise ValueError(f'recipe "{self.name}": surrogate={self.surrogate!r} is no surrogate; {remedy}')
        for axis, choices in CHOICES.items():
            if axis != "surrogate":
                self._expect_known(axis, vars(self)[axis], choices)
        for rule, remedy in _conflicts(self):
            if rule:
                raise ValueError(f'recipe "{self.name}": {remedy}')
        for name, (rule, needs) in _unused(self).items():
            if rule:
                raise ConfigError(f'recipe "{self.name}": {name} has no effect without {needs}', {name: needs})

    @property
    def kl_gradient_estimator(self) -> str | None:
        """Which estimator's gradient the KL term follows; None: its own."""
        if self.kl_gradient == "auto":
            if self.kl_importance or self.kl_estimator == "exact":
                return None
            if self.kl_direction == "other_current":
                return "k3" if self.kl_to == "reference" else None
            return "k2" if self.kl_estimator == "k1" else None
        forward = self.kl_direction == "other_current" and self.kl_to == "reference"
        own = "forward" if forward else self.kl_estimator
        return None if self.kl_gradient in ("own", own) else self.kl_gradient

    @property
    def still_without_advantage(self) -> bool:
        """Whether decisions without an advantage leave the policy as it is: no other term pulls at them."""
        kl = self.beta and self.kl_in == "loss"
        teacher = self.teacher_coef and self.teacher_in == "loss"
        return self.surrogate.still_without_advantage and not (kl or teacher or self.entropy_coef or self.kl_cov)

    def fold_size(self, steps: int) -> int:
        """How many decisions of the record make one decision of the objective."""
        return {"chunk": self.chunk_size, "trajectory": steps}.get(self.ratio, 1)

    def notices(self) -> list[str]:
        """What was resolved on the user's behalf, in words."""
        if self.beta and self.kl_in == "loss" and self.kl_gradient == "auto" and self.kl_gradient_estimator == "k2":
            return [
                "kl_estimator=k1 in the loss has an expected gradient of zero on-policy; the value stays k1 and the "
                "gradient is k2's. kl_gradient=own gives the literal form."
            ]
        return []

    def but(self, **changes: Any) -> Recipe:
        """This recipe with some choices changed, the surrogate's numbers too; an unknown name says which was meant."""
        owners = surrogates.owners()
        known = [*(f.name for f in fields(self)), *owners]
        for key in changes:
            if key not in known:
                raise ValueError(f'recipe "{self.name}" has no setting {key!r}{nearest(key, known)}')
        numbers = {name: changes.pop(name) for name in list(changes) if name in owners}
        if numbers or "surrogate" in changes:
            changes["surrogate"] = self._surrogate(changes.get("surrogate", self.surrogate), numbers)
        return replace(self, **changes)

    def _surrogate(self, to: Surrogate | str, numbers: dict[str, Any]) -> Surrogate:
        """The surrogate asked for, with these numbers."""
        kind = to.kind if isinstance(to, Surrogate) else to
        self._expect_known("surrogate", kind, tuple(surrogates.SURROGATES))
        alien = foreign(kind, numbers)
        for name, needs in alien.items():
            if not says_nothing(numbers[name]):
                told = f'recipe "{self.name}": {name}={numbers[name]} has no effect here: {needs}'
                raise ConfigError(told, {name: needs})
        try:
            own = {name: value for name, value in numbers.items() if name not in alien}
            return surrogates.chosen(self.surrogate, to, **own)
        except ValueError as error:
            raise ValueError(f'recipe "{self.name}": {error}') from None

    def columns(self) -> dict[str, Any]:
        """Every choice and number by the name it has among the settings."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            found |= {name: value.kind, **value.settings()} if isinstance(value, Surrogate) else {name: value}
        return found

    def told(self) -> dict[str, Any]:
        """The same with what the surrogate says of itself, for a page that knows no surrogates."""
        own = self.surrogate
        return self.columns() | {"formula": own.formula, "limits": own.limits, "when_held": own.when_held}

    def _expect_known(self, axis: str, value: object, choices: Sequence[str]) -> None:
        if value not in choices:
            known = ", ".join(choices)
            raise ValueError(f'recipe "{self.name}": {axis}={value!r} is not one of {known}{nearest(value, choices)}')


COLUMNS = tuple(f.name for f in fields(Recipe) if f.name not in ("name", "paper", "follows"))
"""Settings that belong to every recipe; beside them stand the numbers of its surrogate."""


def column_types() -> dict[str, Any]:
    """Every setting of some recipe, surrogates' numbers among them, with what it may be."""
    hints = _hints(Recipe)
    return {name: hints[name] for name in COLUMNS} | {"surrogate": str} | surrogates.types()


_hints = cache(get_type_hints)


def foreign(kind: str, settings: Iterable[str]) -> dict[str, str]:
    """Those of these settings that are numbers of surrogates of another kind, each with what it would need."""
    owners = surrogates.owners()
    alien = (name for name in settings if kind not in owners.get(name, [kind]))
    return {name: f"it needs surrogate={' or '.join(owners[name])}" for name in alien}


def says_nothing(value: object) -> bool:
    """Whether a number of another surrogate asks for what is so without it."""
    return value in (None, "relative")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _conflicts(r: Recipe) -> list[tuple[bool, str]]:
    """Combinations that have no meaning, each with its remedy."""
    per_step, folds = r.credit == "reward_to_go", r.ratio in ("chunk", "trajectory")
    picks = bool(r.top_entropy < 1 or r.clip_cov or r.kl_cov or r.m2_limit)
    exact = r.kl_estimator == "exact"
    low = -math.inf if r.mismatch_low is None else r.mismatch_low
    high = math.inf if r.mismatch_high is None else r.mismatch_high
    above = (r.chunk_size, r.length, r.kl_cap)
    least = (r.beta, r.scale_eps, r.whiten_eps, r.kl_cov_coef)
    positive = all(value is None or value > 0 for value in above) and all(value >= 0 for value in least)
    to_reference = r.kl_direction == "other_current" and r.kl_to == "reference"
    alone = [
        (vars(r)[axis] not in choices, f"surrogate={r.surrogate.kind} looks at whole rows; use {axis}={choices[0]}")
        for axis, choices in r.surrogate.goes_with.items()
    ]
    return [
        *alone,
        (per_step and r.baseline == "length_weighted", "baseline=length_weighted needs credit=trajectory"),
        *_baseline_conflicts(r),
        (per_step and r.whiten == "rows", "whiten=rows needs credit=trajectory; use whiten=decisions"),
        (r.credit == "per_reward" and r.baseline == "given", "baseline=given needs credit=trajectory or reward_to_go"),
        (not isinstance(r.chunk_size, int), "chunk_size must be a whole number"),
        (
            folds and picks,
            f"top_entropy, m2_limit, clip_cov and kl_cov pick single decisions; ratio={r.ratio} has none to pick",
        ),
        (r.kl_in == "reward" and r.kl_to == "old", "kl_in=reward to the old policy is zero; use kl_to=reference"),
        (r.kl_in == "reward" and r.kl_estimator == "exact", "kl_in=reward needs kl_estimator k1, k2, k3 or abs"),
        (to_reference and r.kl_estimator not in ("k3", "exact"), "KL(reference‖π) needs kl_estimator k3 or exact"),
        (r.credit == "per_reward" and bool(r.beta) and r.kl_in == "reward", "kl_in=reward needs another credit"),
        (r.credit == "per_reward" and r.reward_clip is not None, "reward_clip needs one reward: another credit"),
        (per_step and r.drop_no_signal, "drop_no_signal looks at whole trajectories; it needs credit=trajectory"),
        (r.kl_importance and r.kl_direction == "other_current", "kl_importance is for kl_direction=current_other"),
        (r.kl_importance and r.kl_gradient not in ("auto", "own"), "kl_importance has the right gradient already"),
        (exact and r.kl_gradient not in ("auto", "own"), "kl_estimator=exact has its own gradient; leave kl_gradient"),
        (exact and r.kl_cap is not None, "kl_cap is for sampled estimators, not kl_estimator=exact"),
        (
            not positive,
            "chunk_size, length and kl_cap must be positive, beta and other weights not negative",
        ),
        *_teacher_conflicts(r),
        (r.m2_limit is not None and r.m2_limit <= 0, "m2_limit must be positive"),
        (low > high, "mismatch_low must not be above mismatch_high"),
        (not 0 <= r.clip_cov <= 1 or not 0 <= r.kl_cov <= 1, "clip_cov and kl_cov are shares in [0, 1]"),
        (not 0 < r.top_entropy <= 1, "top_entropy is a share in (0, 1]"),
        (not 0 <= r.gamma <= 1, "gamma is in [0, 1]"),
        (r.log_ratio_low >= 0 or r.log_ratio_high <= 0, "log_ratio_low must be below 0 and log_ratio_high above"),
    ]


def _baseline_conflicts(r: Recipe) -> list[tuple[bool, str]]:
    energetic = r.baseline == "optimal_token"
    return [
        (r.baseline == "entropic" and r.scale != "none", "baseline=entropic is weighted already; set scale=none"),
        (energetic and r.credit != "reward_to_go", "baseline=optimal_token is of each decision: credit=reward_to_go"),
        (energetic and r.scale != "none", "baseline=optimal_token is compared already; set scale=none"),
        (
            r.credit == "per_reward" and r.baseline in ("greedy", "role_mean", "optimal_value"),
            f"baseline={r.baseline} needs another credit",
        ),
        (not 0 <= r.baseline_decay < 1, "baseline_decay is in [0, 1)"),
        (r.value_beta <= 0, "value_beta must be positive"),
        (r.turn_coef < 0, "turn_coef must not be negative"),
        (bool(r.turn_coef) and r.credit != "trajectory", "turn_coef stands beside credit=trajectory"),
        (
            bool(r.turn_coef) and r.baseline not in ("group_mean", "leave_one_out"),
            "turn_coef compares with a mean: baseline=group_mean or leave_one_out",
        ),
    ]


def _teacher_conflicts(r: Recipe) -> list[tuple[bool, str]]:
    return [
        (r.teacher_coef < 0 or r.outcome_coef < 0, "teacher_coef and outcome_coef must not be negative"),
        (
            r.teacher_coef > 0
            and r.teacher_in == "advantage"
            and (r.teacher_kl != "reverse" or r.teacher_over != "sampled"),
            "teacher_in=advantage is KL(π‖τ) of the sampled decision; teacher_kl and teacher_over need teacher_in=loss",
        ),
        (not 0 < r.teacher_mix < 1, "teacher_mix is in (0, 1); its ends are teacher_kl=forward and reverse"),
        (not 0 <= r.teacher_gamma <= 1 or r.teacher_drift < 0, "teacher_gamma is in [0, 1], teacher_drift not below 0"),
        (r.teacher_top_k < 1, "teacher_top_k must be 1 or more"),
        (r.teacher_clip is not None and r.teacher_clip <= 0, "teacher_clip must be positive"),
        (
            not r.outcome_coef and r.drop_no_signal,
            "drop_no_signal looks at rewards, which teach nothing here (outcome_coef=0); set no_signal=keep",
        ),
    ]


def _unused(r: Recipe) -> dict[str, tuple[bool, str]]:
    """Numbers that nothing would read, each with what it needs."""
    return {
        "chunk_size": (r.ratio != "chunk" and r.chunk_size != 1, "ratio=chunk"),
        "length": (r.length is not None and r.reduction != "fixed_length", "reduction=fixed_length"),
        "outcome_coef": (r.outcome_coef != 1 and not r.teacher_coef, "teacher_coef > 0"),
    }


def without_effect(r: Recipe, settings: Iterable[str]) -> dict[str, str]:
    """Those of these settings that cannot change anything in this recipe, each with what it would need."""
    needs = {name: remedy for name, (rule, remedy) in _NEEDS.items() if not rule(r)} | dict(r.surrogate.idle)
    return {name: needs[name] for name in settings if name in needs}


def _kl(r: Recipe) -> bool:
    return r.beta > 0


def _taught(r: Recipe) -> bool:
    return r.teacher_coef > 0


_TEACHER = "it needs teacher_coef > 0"
_GAINS = "it needs teacher_coef > 0 and teacher_in=advantage"
_NEEDS: dict[str, tuple[Callable[[Recipe], bool], str]] = {
    "gamma": (lambda r: r.credit == "reward_to_go" or r.turn_coef > 0, "it needs credit=reward_to_go or turn_coef"),
    "baseline_decay": (lambda r: r.baseline == "role_mean", "it needs baseline=role_mean"),
    "value_beta": (lambda r: r.baseline == "optimal_value", "it needs baseline=optimal_value"),
    "scale_ddof": (lambda r: r.scale in ("group_std", "batch_std"), "it needs scale=group_std or batch_std"),
    "scale_eps": (lambda r: r.scale in ("group_std", "batch_std", "group_mean"), "it needs a scale to divide by"),
    "whiten_ddof": (lambda r: r.whiten != "none", "it needs whiten=rows or decisions"),
    "whiten_eps": (lambda r: r.whiten != "none", "it needs whiten=rows or decisions"),
    "whiten_root": (lambda r: r.whiten != "none", "it needs whiten=rows or decisions"),
    "kl_in": (_kl, "it needs beta > 0"),
    "kl_to": (_kl, "it needs beta > 0"),
    "kl_direction": (_kl, "it needs beta > 0"),
    "kl_gradient": (lambda r: _kl(r) and r.kl_in == "loss", "it needs beta > 0 and kl_in=loss"),
    "kl_cap": (_kl, "it needs beta > 0"),
    "kl_importance": (lambda r: _kl(r) and r.kl_in == "loss", "it needs beta > 0 and kl_in=loss"),
    "entropy_over": (lambda r: r.entropy_coef != 0, "it needs entropy_coef"),
    "mismatch_level": (lambda r: r.mismatch != "none", "it needs mismatch=truncate or mask"),
    "mismatch_low": (lambda r: r.mismatch != "none", "it needs mismatch=truncate or mask"),
    "mismatch_high": (lambda r: r.mismatch != "none", "it needs mismatch=truncate or mask"),
    "clip_cov_low": (lambda r: r.clip_cov > 0, "it needs clip_cov > 0"),
    "clip_cov_high": (lambda r: r.clip_cov > 0, "it needs clip_cov > 0"),
    "kl_cov_coef": (lambda r: r.kl_cov > 0, "it needs kl_cov > 0"),
    "teacher_in": (_taught, _TEACHER),
    "teacher_kl": (lambda r: _taught(r) and r.teacher_in == "loss", "it needs teacher_coef > 0 and teacher_in=loss"),
    "teacher_over": (lambda r: _taught(r) and r.teacher_in == "loss", "it needs teacher_coef > 0 and teacher_in=loss"),
    "teacher_mix": (lambda r: _taught(r) and r.teacher_kl == "js", "it needs teacher_coef > 0 and teacher_kl=js"),
    "teacher_top_k": (lambda r: _taught(r) and r.teacher_over == "top_k", "it needs teacher_over=top_k"),
    "teacher_gamma": (lambda r: _taught(r) and r.teacher_in == "advantage", _GAINS),
    "teacher_drift": (lambda r: _taught(r) and r.teacher_in == "advantage", _GAINS),
    "teacher_clip": (lambda r: _taught(r) and r.teacher_in == "loss", "it needs teacher_coef > 0 and teacher_in=loss"),
    "teacher_sees": (_taught, _TEACHER),
}


_ROWS = (
    Recipe(
        "plain",
        "GRPO without the standard deviation, arXiv:2402.03300",
        "CarlosArguilar/GRPO, the default of grpo.GRPOConfig: A = r − group mean, KL k1. Its literal k1 pulls nowhere "
        "(kl_gradient=own); here the gradient is k2's.",
        scale="none",
        beta=0.04,
        kl_estimator="k1",
        kl_gradient="k2",
    ),
    Recipe(
        "grpo",
        "DeepSeekMath, arXiv:2402.03300",
        "TRL: std with ddof 1 and eps 1e-4; a fully masked row counts as 0. verl: eps 1e-6, such rows not counted, "
        "dual clip 3.",
    ),
    Recipe(
        "bnpo",
        "TRL loss_type=bnpo (name from BNPO, arXiv:2506.02864)",
        "TRL: GRPO with a token mean. The paper's Beta normalisation of binary rewards is another method.",
        reduction="token_mean",
    ),
    Recipe(
        "dr_grpo",
        "Understanding R1-Zero-Like Training, arXiv:2503.20783",
        "The paper: no std, constant length. TRL's loss_type=dr_grpo changes the reduction alone; add "
        "scale_rewards=none there.",
        scale="none",
        reduction="fixed_length",
    ),
    Recipe(
        "dapo",
        "DAPO, arXiv:2503.14476",
        "The paper, with overlong filtering and no-signal groups dropped; token mean over the whole minibatch. TRL's "
        "loss_type=dapo is the token mean alone.",
        surrogate=Clip(epsilon_high=0.28),
        reduction="token_mean",
        mask_truncated=True,
        drop_no_signal=True,
    ),
    Recipe(
        "gspo",
        "GSPO, arXiv:2507.18071",
        "The paper and TRL: gradient through the mean of log-ratios. verl and tunix: straight-through "
        "(ratio=sequence_token).",
        ratio="sequence",
        surrogate=Clip(3e-4, 4e-4),
    ),
    Recipe(
        "gmpo",
        "GMPO, arXiv:2507.20673",
        "The paper, TRL and verl agree: clipped in log space before the geometric mean.",
        surrogate=Geometric(0.4),
    ),
    Recipe(
        "cispo",
        "MiniMax-M1, arXiv:2506.13585",
        "TRL: an absolute cap of 5 on the ratio and no floor (as ScaleRL, arXiv:2510.13786). verl: clip to 1 ± eps "
        "(bounds=relative).",
        surrogate=Cispo(epsilon_high=5.0, bounds="absolute"),
        reduction="token_mean",
    ),
    Recipe(
        "sapo",
        "SAPO, arXiv:2511.20347",
        "TRL: empty rows count. verl: they do not. Otherwise they agree.",
        surrogate=Sapo(),
    ),
    Recipe(
        "luspo",
        "LUSPO, arXiv:2602.05261",
        "The paper's setting of TRL's loss_type=luspo: sequence ratio times length.",
        ratio="sequence",
        surrogate=Clip(2e-3, 2.5e-3),
        reduction="sequence_sum",
    ),
    Recipe(
        "vespo",
        "VESPO, arXiv:2602.10693",
        "TRL: product of ratios, sampler mismatch inside the weight, token mean.",
        surrogate=Vespo(),
        reduction="token_mean",
        mismatch="truncate",
    ),
    Recipe(
        "dppo",
        "DPPO, arXiv:2602.04879",
        "verl dppo_tv with cap 20 (binary total variation). dppo_kl: surrogate=dppo_kl.",
        surrogate=DppoTotalVariation(dual_clip=20.0),
        reduction="token_mean",
    ),
    Recipe(
        "gpg",
        "GPG, arXiv:2504.02546",
        "The paper: scaled up by the share of samples in groups with signal. verl counts non-zero rewards instead.",
        surrogate=PolicyGradient(),
        scale="signal_share",
        reduction="token_mean",
    ),
    Recipe(
        "rloo",
        "Back to Basics, arXiv:2402.14740",
        "TRL's RLOOTrainer: trajectory as one action, KL (k1) in the reward, clipped product ratio.",
        baseline="leave_one_out",
        scale="none",
        ratio="trajectory",
        kl_in="reward",
        kl_estimator="k1",
    ),
    Recipe(
        "reinforce++",
        "REINFORCE++, arXiv:2501.03262",
        "verl: returns with KL in the reward, whitened over all decisions; no group.",
        credit="reward_to_go",
        baseline="none",
        scale="none",
        whiten="decisions",
        kl_in="reward",
        kl_estimator="k1",
        reduction="token_mean",
    ),
    Recipe(
        "reinforce++_baseline",
        "REINFORCE++, arXiv:2501.03262",
        "verl: group mean taken off, then whitened over all decisions; KL (k2 gradient) in the loss.",
        scale="none",
        whiten="decisions",
        kl_estimator="k2",
        reduction="token_mean",
    ),
    Recipe(
        "maxrl",
        "MaxRL, arXiv:2602.02710",
        "The paper: (r − mean)/mean for rewards ≥ 0, no std; the policy term is GRPO's with a token mean.",
        scale="group_mean",
        scale_eps=1e-6,
        reduction="token_mean",
    ),
    Recipe(
        "gdpo",
        "GDPO, arXiv:2601.05242",
        "TRL (normalize_then_sum): whitened over rows, / (std + 1e-4). verl: over decisions, / √(var + 1e-8).",
        credit="per_reward",
        whiten="rows",
        whiten_eps=1e-4,
        whiten_root=False,
    ),
    Recipe(
        "opo",
        "OPO, arXiv:2505.23585",
        "verl's baseline. The paper is strictly on-policy: one pass, where the ratio is 1 and nothing is clipped.",
        baseline="length_weighted",
        scale="none",
        reduction="token_mean",
    ),
    Recipe(
        "lite_ppo",
        "Tricks or Traps, arXiv:2508.08221",
        "TRL: group mean, standard deviation of the batch's rewards, token mean.",
        scale="batch_std",
        reduction="token_mean",
    ),
    Recipe(
        "pass_at_k",
        "Pass@k training, arXiv:2503.19595",
        "verl grpo_passk: only a unique best try is reinforced, by its lead.",
        baseline="best_of_group",
        scale_eps=1e-6,
    ),
    Recipe(
        "clip_cov",
        "Entropy Mechanism of RL, arXiv:2505.22617",
        "verl, with the draw given by a seeded generator.",
        surrogate=Clip(epsilon_high=0.28),
        reduction="token_mean",
        clip_cov=2e-4,
    ),
    Recipe(
        "kl_cov",
        "Entropy Mechanism of RL, arXiv:2505.22617",
        "verl: unclipped ratio, penalty on the highest covariances.",
        surrogate=Unclipped(),
        reduction="token_mean",
        kl_cov=2e-4,
    ),
    Recipe(
        "dro",
        "DRO, arXiv:2405.19107",
        "verl: policy gradient with a quadratic leash to the sampler.",
        surrogate=Dro(),
        reduction="token_mean",
    ),
    Recipe(
        "m2po",
        "M2PO, arXiv:2510.01161",
        "AReaL: tokens farthest from the sampler are masked until the second moment of the log-ratio is below 0.04; no "
        "clip. The minibatch's ratio at its beginning decides.",
        surrogate=Unclipped(),
        reduction="token_mean",
        m2_limit=0.04,
    ),
    Recipe(
        "topr",
        "TOPR, arXiv:2503.14286",
        "ROLL: ratios a token, up to 1, for what is bad, none for what is good; here the sign of A decides, not that "
        "of the reward. The paper's ratio is of the whole trajectory (ratio=trajectory).",
        surrogate=Topr(),
        scale="none",
        reduction="token_mean",
    ),
    Recipe(
        "scalerl",
        "ScaleRL, arXiv:2510.13786",
        "TRL's paper index (cispo with a cap of 5, the batch's deviation), and groups without signal dropped. The "
        "paper's mean over prompts is a token mean here; logits are float32 anyway.",
        surrogate=Cispo(epsilon_high=5.0, bounds="absolute"),
        scale="batch_std",
        reduction="token_mean",
        drop_no_signal=True,
    ),
    Recipe(
        "discover",
        "TTT-Discover, arXiv:2601.16175",
        "The authors' entropic_adaptive_beta: towards the best of the group, not its mean; for one problem whose best "
        "answer is wanted. Their search over states is not part of it.",
        baseline="entropic",
        scale="none",
        surrogate=Unclipped(),
        reduction="token_mean",
    ),
    Recipe(
        "otb",
        "Optimal Token Baseline, arXiv:2602.07078",
        "verl: each token against the group's returns at it, weighted by the energy 1 − 2π + Σπ² spent so far; "
        "decisions are counted without tool output (its tir_ form). Needs Σπ² of every token: one pass more a step.",
        credit="reward_to_go",
        baseline="optimal_token",
        scale="none",
        reduction="token_mean",
    ),
    Recipe(
        "remax",
        "ReMax, arXiv:2310.10505",
        "verl: the reward of the likeliest answer is the baseline, one answer more a prompt. The paper samples one try "
        "a prompt, here a group of them has that baseline.",
        credit="reward_to_go",
        baseline="greedy",
        scale="none",
        reduction="token_mean",
    ),
    Recipe(
        "rae",
        "SPIRAL, arXiv:2506.24119",
        "SPIRAL's code and prime-rl's: against the running mean of the own role (role_column), 0 at first, as it was "
        "before the try; kept in checkpoints, which theirs are not. Without roles it is REINFORCE with a running mean.",
        baseline="role_mean",
        scale="none",
        reduction="token_mean",
    ),
    Recipe(
        "a_star_po",
        "A*-PO, arXiv:2505.20686",
        "The authors' code and TRL's A2POTrainer: (β·log π/π_start − (r − V*))², V* = value_beta·log mean "
        "exp(r/value_beta) of value_samples answers to every prompt before the first step; its gradient / 2β, by KL in "
        "the reward and dro's leash: beta and dro_beta are the paper's β₂. TRL leaves out prompts without any success, "
        "here they stay.",
        baseline="optimal_value",
        scale="none",
        ratio="trajectory",
        surrogate=Dro(beta=1e-3),
        beta=1e-3,
        kl_in="reward",
        kl_estimator="k1",
    ),
    Recipe(
        "gigpo",
        "GiGPO, arXiv:2505.10978",
        "ROLL: a conversation against its group, and each turn against those of the group that were told the same, by "
        "what came of it, 0.95 a turn. Rewards count at a conversation's end.",
        scale_eps=1e-6,
        gamma=0.95,
        turn_coef=1.0,
    ),
    Recipe(
        "opd",
        "On-Policy Distillation, Thinking Machines 2025 (after MiniLLM, arXiv:2306.08543)",
        "tinker-cookbook: log τ − log π of each sampled token is its advantage, importance-weighted, no reward. "
        "prime-rl takes the current log π instead of the sampler's and drops tokens that fell by 0.2 in probability.",
        surrogate=Unclipped(),
        reduction="token_mean",
        scale="none",
        teacher_coef=1.0,
        outcome_coef=0.0,
    ),
    Recipe(
        "iw_opd",
        "On the Position Bias of On-Policy Distillation, arXiv:2606.22600",
        "TRL's IWOPDTrainer: opd with more weight on tokens that come before student and teacher disagree.",
        surrogate=Unclipped(),
        reduction="token_mean",
        scale="none",
        teacher_coef=1.0,
        outcome_coef=0.0,
        teacher_drift=0.5,
    ),
    Recipe(
        "gkd",
        "GKD, arXiv:2306.13649",
        "TRL's GKDTrainer with lmbda=1 (all tokens are the student's), a token mean; the vocabulary beyond the "
        "teacher's 64 likeliest tokens counts as one (teacher_top_k of its size: exactly TRL's).",
        surrogate=Unclipped(),
        reduction="token_mean",
        scale="none",
        teacher_coef=1.0,
        outcome_coef=0.0,
        teacher_in="loss",
        teacher_kl="js",
        teacher_over="top_k",
    ),
    Recipe(
        "opsd",
        "Self-Distillation Enables Continual Learning (SDFT), arXiv:2601.19897",
        "prime-rl's opsd: opd whose teacher is the policy itself with the answer in its prompt. TRL's SDFTTrainer: the "
        "divergence over its 100 likeliest tokens (teacher_in=loss, teacher_kl=js, teacher_over=top_k).",
        surrogate=Unclipped(),
        reduction="token_mean",
        scale="none",
        teacher_coef=1.0,
        outcome_coef=0.0,
        teacher_sees="answer",
    ),
    Recipe(
        "sdpo",
        "Self-Distilled Policy Optimization, arXiv:2601.20802",
        "TRL's SDPOTrainer: sampled tokens, KL(π‖τ) weighted by π/π_old up to 2; the teacher is the policy itself with "
        "a try of the group that succeeded in its prompt; teacher_decay=0.95 has an average of past weights, as TRL's.",
        surrogate=Unclipped(),
        scale="none",
        teacher_coef=1.0,
        outcome_coef=0.0,
        teacher_in="loss",
        teacher_clip=2.0,
        teacher_sees="success",
    ),
    Recipe(
        "control",
        "GRPO for step-wise rewards: policy gradient with a group baseline, PPO's clip (arXiv:1707.06347)",
        "This project's control room: reward-to-go, batch std, every decision counts alike; its advantage=linear "
        "puts a fitted baseline in place of the group's mean at the same step.",
        credit="reward_to_go",
        scale="batch_std",
        scale_eps=1e-8,
        reduction="token_mean",
    ),
    Recipe(
        "window",
        "DeepSeekMath, arXiv:2402.03300, as a widely copied control tutorial writes it: a window of steps is the group",
        "The tutorial: z-scored returns (ddof 1, eps 1e-8), clip 0.2, β·KL(old‖π); grpo.control takes that KL exactly.",
        credit="reward_to_go",
        gamma=0.99,
        scale_eps=1e-8,
        reduction="token_mean",
        beta=0.001,
        kl_to="old",
        kl_direction="other_current",
    ),
)

RECIPES: dict[str, Recipe] = {row.name: row for row in _ROWS}
"""Every named variant."""


def recipe(name: str, **changes: Any) -> Recipe:
    """A named recipe, optionally with some choices changed."""
    if name not in RECIPES:
        raise ValueError(f'unknown recipe "{name}"{nearest(name, list(RECIPES)) or "."} Known: {", ".join(RECIPES)}')
    return RECIPES[name].but(**changes) if changes else RECIPES[name]


# --- the table in words ---------------------------------------------------------------------------------------------

HEADINGS = (
    "recipe", "credit", "baseline", "scale", "ratio", "surrogate", "reduction", "KL", "gates", "teacher", "paper",
)  # fmt: skip


def _row(r: Recipe) -> tuple[str, ...]:
    scale = r.scale if r.whiten == "none" else f"{r.scale}, whiten {r.whiten}"
    kl = f"{r.kl_estimator} in {r.kl_in}"
    gates = [
        "truncated" if r.mask_truncated else "",
        "no signal" if r.drop_no_signal else "",
        f"mismatch {r.mismatch} {r.mismatch_level}" if r.mismatch != "none" else "",
        f"clip-cov {r.clip_cov:g}" if r.clip_cov else "",
        f"kl-cov {r.kl_cov:g}" if r.kl_cov else "",
        f"second moment {r.m2_limit:g}" if r.m2_limit else "",
        f"top entropy {r.top_entropy:g}" if r.top_entropy < 1 else "",
    ]
    return (
        r.name,
        r.credit + f" + turns × {r.turn_coef:g}" * bool(r.turn_coef),
        r.baseline,
        scale,
        r.ratio,
        r.surrogate.label,
        r.reduction,
        kl,
        ", ".join(g for g in gates if g) or "–",
        _teacher(r),
        r.paper,
    )


def _teacher(r: Recipe) -> str:
    if not r.teacher_coef:
        return "–"
    over = "" if r.teacher_over == "sampled" else f", top {r.teacher_top_k}"
    sees = {"prompt": "", "answer": ", itself with the answer", "success": ", itself with a success"}[r.teacher_sees]
    alone = "" if r.outcome_coef else ", no reward"
    return f"{r.teacher_kl} in {r.teacher_in}{over}{sees}{alone}"


def _surrogates() -> list[tuple[str, str, str]]:
    """Kind, formula and settings of every surrogate, as it is when none of them is given."""
    made = [own() for own in surrogates.SURROGATES.values()]
    return [(s.kind, s.formula, ", ".join(f"{n}={v}" for n, v in s.settings().items())) for s in made]


def table_text(names: Sequence[str] = ()) -> str:
    """The table for a terminal: a recipe a row, its peers' differences below it."""
    chosen = [recipe(name) for name in names] or list(RECIPES.values())
    rows = [HEADINGS, *(_row(r) for r in chosen)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    notes = [f"{r.name}: {r.follows}" for r in chosen]
    kinds = {r.surrogate.kind for r in chosen} if names else surrogates.SURROGATES
    terms = [f"{kind}: {formula}" + f"; {own}" * bool(own) for kind, formula, own in _surrogates() if kind in kinds]
    lines += [
        "",
        "Whose definition each follows:",
        *notes,
        "",
        "Surrogates and the settings that only they have:",
        *terms,
    ]
    return "\n".join(lines)


def table_markdown() -> str:
    """The same table as a page."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join([f"`{row[0]}`", *row[1:]]) + " |" for row in map(_row, RECIPES.values())]
    lines += ["", "## Whose definition each follows", ""]
    lines += [f"- `{r.name}`: {r.follows}" for r in RECIPES.values()]
    lines += ["", "## Surrogates", ""]
    lines += [
        "The numbers in a formula are those it has by itself. Settings of its own are given by name, or in a block",
        "(`--surrogate.k_pos 2`, `surrogate: {kind: vespo, k_pos: 2}`), in Python as a record of",
        "`grpo.core.surrogates` (`surrogate=Vespo(k_pos=2)`).",
        "",
    ]
    lines += ["| surrogate | minimised | settings of its own |", "|---|---|---|"]
    lines += [f"| `{kind}` | {formula.replace('|', '∣')} | {own or '–'} |" for kind, formula, own in _surrogates()]
    return "\n".join(lines) + "\n"
