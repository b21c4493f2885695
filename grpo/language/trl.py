"""TRL's door with TRL's own defaults: what a script does not say is as it is there, and steps are counted as there.

    from grpo.language.trl import GRPOConfig, GRPOTrainer

`grpo.language` takes the same words with defaults of our own; `docs/trl.md` has both, and what differs all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from grpo.dialects import key_of, translate
from grpo.language.compat.arguments import updates
from grpo.language.compat.strategies import apart, evaluated
from grpo.language.config import LanguageConfig
from grpo.language.trainer import GRPOTrainer as LanguageTrainer
from grpo.run.dialect import translate_run

__all__ = ["GRPOConfig", "GRPOTrainer"]

THEIRS: Mapping[str, tuple[Any, str]] = {
    "output_dir": ("trainer_output", "logdir"),
    "seed": (42, "seed"),
    "loss_type": ("dapo", "loss_type"),
    "max_completion_length": (512, "max_completion_length"),
    "max_prompt_length": (None, "max_prompt_length"),
    "per_device_train_batch_size": (8, "groups_per_step"),
    "lr_scheduler_type": ("linear", "lr_schedule"),
    "report_entropy": (True, "report_entropy"),
    "logging_steps": (10, "log_every"),
    "save_steps": (500, "checkpoint_every"),
    "save_total_limit": (None, "keep_last"),
}
"""TRL's words with its defaults, where ours are others, and our setting that each becomes."""
COUNTED = ("max_steps", "save_steps", "eval_steps", "logging_steps", "warmup_steps")
"""Words that count updates there, and samplings here."""


class GRPOConfig(LanguageConfig):
    """Settings with TRL's defaults; `max_steps` and its like count updates, as in TRL."""

    def __init__(self, output_dir: str | None = None, *, _dialect: str = "trl", **settings: Any) -> None:
        words = settings if output_dir is None else {"output_dir": output_dir, **settings}
        if _dialect != "trl":  # another system's words, or ours from a run's folder
            super().__init__(_dialect=_dialect, **words)
            return
        whole = _completed(words)
        times = updates(LanguageConfig(**whole))
        counted = {key: _fewer(whole[key], times) for key in COUNTED if key in whole}
        super().__init__(_dialect=_dialect, **whole | counted)
        self._words = words


def _completed(words: Mapping[str, Any]) -> dict[str, Any]:
    """With TRL's defaults for what nobody said in any word."""
    said: dict[str, Any] = {key_of(key): value for key, value in words.items()}
    ours: dict[str, Any] = {}
    with suppress(ValueError):  # whoever builds the settings tells what is wrong
        rest, run, _ = translate_run(apart(evaluated(said))[0])
        ours = run | translate(rest, "trl", LanguageConfig.words)[0]
    whole = {key: value for key, (value, name) in THEIRS.items() if name not in ours and key not in said} | said
    if "eval_samples" not in ours:
        whole["num_generations_eval"] = ours.get("group_size", 8)
    if ours.get("beta") and "kl_importance" not in ours:
        whole["use_bias_correction_kl"] = True
    return whole


def _fewer(value: Any, times: int) -> Any:
    """So many updates as samplings; a share of the run stays one."""
    counts = isinstance(value, int | float) and value >= 1
    return math.ceil(value / times) if counts else value


class GRPOTrainer(LanguageTrainer):
    """The trainer with these settings; prompts that are bare text get no chat template, as in TRL."""

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: LanguageConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        **given: Any,
    ) -> None:
        config = args or GRPOConfig()
        told = {"skip_apply_chat_template", "chat_template_kwargs"} & config.model_fields_set
        if not told and _is_bare(train_dataset):
            config = config.but(skip_apply_chat_template=True)
        super().__init__(model, reward_funcs, config, train_dataset, *more, **given)


def _is_bare(rows: Any) -> bool:
    """Whether prompts are text, not messages; rows that can be read once alone are left alone."""
    if isinstance(rows, str) or not (isinstance(rows, Sequence) or hasattr(rows, "column_names")):
        return False
    first = next(iter(rows), None)
    return isinstance(first, Mapping) and isinstance(first.get("prompt"), str)
