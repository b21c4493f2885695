"""Other systems' spellings → our names, in one place.

Most words mean one thing everywhere (`COMMON`). Some do not: `batch_size` counts states in one system and decisions in
another. Those belong to a system, chosen by the front door or block a setting comes from, or named (`dialect: rlinf`).
`grpo config --dialects` prints this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.recipes import nearest


@dataclass(frozen=True)
class Spelling:
    """One foreign key: what it becomes, and how its system's default compares with ours."""

    key: str
    becomes: str
    default: str = ""
    """That system's default, and why ours departs from it where it does."""
    convert: Callable[[Any], dict[str, Any]] | None = None
    """From the foreign value to our settings; None: the value as it is, under the name `becomes`."""


@dataclass(frozen=True)
class Translation:
    """What happened to one key."""

    key: str
    value: Any
    settings: dict[str, Any]


def truth(value: Any) -> bool:
    """A yes/no setting, also as text from a file or a command line."""
    text = str(value).strip().lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", "none"):
        return False
    raise ValueError(f"expected true or false, got {value!r}")


def _choice(table: Mapping[str, dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    def convert(value: Any) -> dict[str, Any]:
        word = str(value).strip().lower()
        if word not in table:
            raise ValueError(f"{value!r} is not one of {', '.join(table)}{nearest(word, list(table))}")
        return table[word]

    return convert


_KL_NAMES = {
    "low_var_kl": "k3",
    "kl": "k1",
    "mse": "k2",
    "mse_kl": "k2",
    "abs": "abs",
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
}
_kl_estimator = _choice({name: {"kl_estimator": ours} for name, ours in _KL_NAMES.items()})
_reduction = _choice(
    {
        "token-mean": {"reduction": "token_mean"},
        "seq-mean-token-sum": {"reduction": "sequence_sum"},
        "seq-mean-token-mean": {"reduction": "sequence_mean"},
        "seq-mean-token-sum-norm": {"reduction": "fixed_length"},
    }
)
_scale = _choice(
    {
        "group": {"scale": "group_std"},
        "true": {"scale": "group_std"},
        "batch": {"scale": "batch_std"},
        "none": {"scale": "none"},
        "false": {"scale": "none"},
    }
)
_level = _choice(
    {"token": {"ratio": "token"}, "sequence": {"ratio": "sequence"}, "sequence_token": {"ratio": "sequence_token"}}
)

COMMON = (
    Spelling("num_generations", "group_size", "TRL 8, EasyDeL 4"),
    Spelling("num_return_sequences", "group_size", "EasyDeL 4"),
    Spelling("clip_epsilon", "epsilon", "0.2"),
    Spelling("clip_ratio", "epsilon", "0.2"),
    Spelling("ratio_clip_eps", "epsilon", "0.2"),
    Spelling("kl_coeff", "beta", "0.04"),
    Spelling("kl_beta", "beta", "RLinf 0"),
    Spelling("kl_penalty_type", "kl_estimator", "low_var_kl", _kl_estimator),
    Spelling("entropy_coeff", "entropy_coef", "0"),
    Spelling("entropy_bonus", "entropy_coef", "0"),
    Spelling("num_epochs_per_update", "num_iterations", "1"),
    Spelling("update_epoch", "num_iterations", "1"),
    Spelling("epochs", "num_iterations", "tutorial 10"),
    Spelling("scale_rewards", "scale", "TRL group; grpo.GRPOConfig none", _scale),
    Spelling("loss_agg_func", "reduction", "token-mean", _reduction),
    Spelling("loss_agg_mode", "reduction", "token-mean", _reduction),
    Spelling("importance_sampling_level", "ratio", "token", _level),
    Spelling("early_stop_imp_ratio", "max_ratio", "5; ours: off unless set"),
    Spelling("top_entropy_quantile", "top_entropy", "1"),
    Spelling("off_policy_mask_threshold", "off_policy_threshold", "off"),
    Spelling("mask_truncated_completions", "mask_truncated", "false"),
    Spelling("use_bias_correction_kl", "kl_importance", "TRL true; ours false, as in the GRPO paper"),
    Spelling("sapo_temperature_pos", "tau_pos", "1.0"),
    Spelling("sapo_temperature_neg", "tau_neg", "1.05"),
    Spelling("clip_ratio_low", "epsilon", "0.2"),
    Spelling("clip_ratio_high", "epsilon_high", "0.2"),
    Spelling("clip_ratio_c", "dual_clip", "verl 3; ours: off unless set"),
    Spelling("ref_model_sync_steps", "ref_sync_steps", "TRL 512, EasyDeL 64"),
    Spelling("ref_model_mixup_alpha", "ref_mixup_alpha", "TRL 0.6, EasyDeL 0.9"),
    Spelling("starts", "groups_per_step", "8; control 2"),
    Spelling("total_batch_size", "groups_per_step", "EasyDeL 32 prompts"),
    Spelling("sync_ref_model", "ref_sync_steps", "false: the other two ref_model keys are then not read"),
)
"""Words with one meaning."""

SYSTEMS: dict[str, tuple[Spelling, ...]] = {
    "grpo": (
        Spelling("batch_size", "groups_per_minibatch", "1024 states an optimiser step; ours: all that were given"),
        Spelling(
            "normalize_advantages",
            "whiten",
            "true (batch std); ours false: A = r − mean, as its own document says",
            lambda value: (
                {"whiten": "rows", "whiten_ddof": 0.0, "whiten_eps": 1e-8, "whiten_root": False}
                if truth(value)
                else {"whiten": "none"}
            ),
        ),
        Spelling("advantage_epsilon", "whiten_eps", "1e-8"),
        Spelling("reference_update_freq", "ref_sync_steps", "1: the reference is overwritten every step; ours: never"),
    ),
    "rlinf": (
        Spelling(
            "normalize_advantages",
            "whiten",
            "true: a second normalisation over all decisions",
            lambda value: (
                {"whiten": "decisions", "whiten_ddof": 0.0, "whiten_eps": 1e-5, "whiten_root": False}
                if truth(value)
                else {"whiten": "none"}
            ),
        ),
        Spelling(
            "adv_type",
            "baseline, scale",
            "grpo",
            _choice(
                {
                    "grpo": {"baseline": "group_mean", "scale": "group_std", "scale_eps": 1e-6},
                    "raw": {"baseline": "none", "scale": "none"},
                }
            ),
        ),
        Spelling(
            "loss_type",
            "surrogate",
            "actor: the clipped surrogate; any other word names a recipe",
            lambda value: {"surrogate": "clip"} if value == "actor" else {"loss_type": value},
        ),
        Spelling(
            "calculate_entropy",
            "entropy_coef",
            "false: no bonus",
            lambda value: {} if truth(value) else {"entropy_coef": 0.0},
        ),
        Spelling(
            "use_valid_token_scale",
            "reduction",
            "false; true: token mean over the global batch, which ours always is",
            lambda value: {"reduction": "token_mean"} if truth(value) else {},
        ),
    ),
    "tutorial": (Spelling("batch_size", "decisions_per_minibatch", "32 decisions"),),
    "trl": (),
    "dreamer": (),
}
"""Words that mean something else elsewhere, by system."""


def spellings(system: str) -> dict[str, Spelling]:
    """Every foreign key that this system's settings may use."""
    if system not in SYSTEMS:
        known = ", ".join(SYSTEMS)
        raise ValueError(f'unknown dialect "{system}"{nearest(system, list(SYSTEMS))}; known: {known}')
    return {spelling.key: spelling for spelling in (*COMMON, *SYSTEMS[system])}


def translate(settings: Mapping[str, Any], system: str = "grpo") -> tuple[dict[str, Any], list[Translation]]:
    """Settings in our names, and what each foreign key became. Two keys that end in one setting must agree."""
    known = spellings(system)
    ours: dict[str, Any] = {}
    done: list[Translation] = []
    source: dict[str, str] = {}
    unread = _unread(settings)
    for raw, value in settings.items():
        key = raw.replace("-", "_")
        if key in unread:
            done.append(Translation(raw, value, {}))
            continue
        spelling = known.get(key)
        if spelling is None:
            became = {key: value}
        elif spelling.convert is None:
            became = {spelling.becomes: value}
        else:
            try:
                became = spelling.convert(value)
            except ValueError as error:
                raise ValueError(f"{raw}: {error}") from None
        for name, setting in became.items():
            if name in ours and ours[name] != setting:
                raise ValueError(f"{raw}={value!r} and {source[name]} both set {name}; keep one of them")
            ours[name], source[name] = setting, raw
        if spelling is not None:
            done.append(Translation(raw, value, became))
    return ours, done


def _unread(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """sync_ref_model is a switch: off, the keys beside it mean nothing; on, it adds nothing to them."""
    if "sync_ref_model" not in settings:
        return ()
    if truth(settings["sync_ref_model"]):
        if "ref_model_sync_steps" not in settings:
            raise ValueError("sync_ref_model=true needs ref_model_sync_steps: every how many steps")
        return ("sync_ref_model",)
    return ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")


def table_text() -> str:
    """Every foreign key, its system, what it becomes, and that system's default."""
    rows = [("key", "system", "becomes", "default there")]
    rows += [(s.key, "any", s.becomes, s.default) for s in COMMON]
    rows += [(s.key, system, s.becomes, s.default) for system, some in SYSTEMS.items() for s in some]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in rows]
    return "\n".join(lines)
