"""Every field of TRL 1.16's GRPOConfig, its own and those it inherits: implemented, mapped, accepted, or refused.

The words and their conversion live in `grpo.language.compat.dialect`; this table adds the fields that are ours by the
same name. `docs/trl.md` is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo.dialects import COMMON, Spelling
from grpo.language.compat.dialect import FIELDS as SPELLED
from grpo.run.dialect import RUN


@dataclass(frozen=True)
class Field:
    """What became of one of TRL's fields."""

    verdict: Literal["implemented", "mapped", "accepted", "refused"]
    ours: str
    """Our name; empty where nothing needs to be said, or nothing can be."""
    note: str
    """How our default or meaning differs, or the reason for refusing it."""


OWN_NAME = {
    "learning_rate": "", "weight_decay": "", "adam_beta1": "", "adam_beta2": "", "adam_epsilon": "",
    "tf32": "", "data_seed": "", "eval_delay": "", "full_determinism": "on a CPU runs repeat bit for bit anyway",
    "load_best_model_at_end": "the folder's model is the best one anyway",
    "max_grad_norm": "", "gradient_checkpointing": "ours false", "torch_compile": "", "seed": "ours 0",
    "eval_on_start": "reported as before/…",
    "project": "ours WANDB_PROJECT, TRACKIO_PROJECT or grpo",
    "num_train_epochs": "",
    "push_to_hub": "once, when training ends", "hub_model_id": "none: the run's name", "trust_remote_code": "",
    "max_completion_length": "ours 256", "temperature": "", "top_p": "", "repetition_penalty": "",
    "beta": "", "num_iterations": "", "epsilon": "", "delta": "",
    "epsilon_high": "none: epsilon; loss_type cispo has a cap of 5 here unless it is given",
    "vespo_k_pos": "", "vespo_lambda_pos": "", "vespo_k_neg": "", "vespo_lambda_neg": "",
    "reward_weights": "", "entropy_coef": "", "entropy_target": "",
    "use_adaptive_entropy": "its weight moves once a step",
    "entropy_coef_min": "", "entropy_coef_max": "", "entropy_coef_delta": "", "log_completions": "",
    "num_completions_to_print": "", "log_unique_prompts": "", "log_multimodal": "thumbnails of samples, too",
}  # fmt: skip
"""Fields that are ours by the same name and in the same sense, with what differs."""

SHARED = (
    "num_generations", "scale_rewards", "importance_sampling_level", "top_entropy_quantile",
    "off_policy_mask_threshold", "mask_truncated_completions", "use_bias_correction_kl", "sapo_temperature_pos",
    "sapo_temperature_neg",
)  # fmt: skip
"""Fields whose words other systems share."""

OF_THE_RUN = (
    "output_dir", "run_name", "max_steps", "save_steps", "save_strategy", "save_total_limit", "eval_steps",
    "eval_strategy", "logging_steps", "logging_strategy", "report_to", "metric_for_best_model", "greater_is_better",
)  # fmt: skip
"""Fields that say how the run is carried out."""


def _spelled(spelling: Spelling, block: str = "") -> Field:
    names = [name.strip() for name in spelling.becomes.split(",") if name.strip()]
    unread = "refused" if spelling.refused else "accepted" if spelling.accepted else None
    verdict: Any = unread or ("implemented" if spelling.key in names else "mapped")
    return Field(verdict, ", ".join(block + name for name in names), spelling.default)


FIELDS: dict[str, Field] = {
    **{name: Field("implemented", name, note) for name, note in OWN_NAME.items()},
    **{item.key: _spelled(item) for item in COMMON if item.key in SHARED},
    **{item.key: _spelled(item, "run.") for item in RUN if item.key in OF_THE_RUN},
    **{item.key: _spelled(item) for item in SPELLED},
}
"""TRL's fields by name."""


def table_markdown(defaults: Mapping[str, Any]) -> str:
    """A page's worth: a table for each verdict; `defaults`: TRL's own, by field, in its order."""
    titles = {
        "implemented": "Implemented: the same name",
        "mapped": "Mapped: another name, or always so",
        "accepted": "Accepted: the outcome is the same, and a line says why",
        "refused": "Refused, with the reason",
    }
    lines: list[str] = []
    for verdict, title in titles.items():
        names = [name for name in defaults if FIELDS[name].verdict == verdict]
        lines += [f"## {title} ({len(names)})", ""]
        short = verdict in ("accepted", "refused")
        head = ("field", "TRL's default", "reason") if short else ("field", "TRL's default", "ours", "note")
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for name in names:
            field = FIELDS[name]
            ours = ", ".join(f"`{word.strip()}`" for word in field.ours.split(",") if word.strip()) or "always so"
            cells = [f"`{name}`", f"`{defaults[name]!r}`", *([] if short else [ours]), field.note]
            lines.append("| " + " | ".join(cells).rstrip() + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
