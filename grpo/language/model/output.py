"""What a run leaves for others: a folder that `from_pretrained` (or PEFT) loads, with a card written from the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.language.config import LanguageConfig
from grpo.language.model.adapters import is_adapted, merged
from grpo.language.model.bars import without_bars
from grpo.language.model.reference import NAME
from grpo.run.files import write_atomic
from grpo.run.inside import expect_no_links
from grpo.run.redaction import Redactor

SHOWN = ("reward", "reward_std", "completions/mean_length", "kl", "eval/accuracy")
"""Metrics that the card tells, where they were measured."""


def save_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    config: LanguageConfig,
    *,
    merge: bool = False,
    step: int = 0,
    metrics: Mapping[str, float | None] | None = None,
    rewards: tuple[str, ...] = (),
    data: str = "",
    name: str | None = None,
) -> Path:
    """Weights (an adapter alone, unless `merge`), tokenizer with its template, generation settings, model card."""
    path.mkdir(parents=True, exist_ok=True)
    expect_no_links(path)
    kept: Any = merged(model) if merge else model
    generation = getattr(kept, "generation_config", None)
    if generation is not None:
        _remember_sampling(generation, config)
    if is_adapted(kept):
        kept.save_pretrained(path, selected_adapters=[n for n in kept.peft_config if n != NAME])
        if generation is not None:
            generation.save_pretrained(path)
    else:
        with without_bars():
            kept.save_pretrained(path)
    tokenizer.save_pretrained(path)
    write_card(
        path, model, config, adapter=is_adapted(kept), step=step, metrics=metrics, rewards=rewards, data=data, name=name
    )
    return path


def write_card(
    path: Path,
    model: Any,
    config: LanguageConfig,
    *,
    adapter: bool | None = None,
    step: int = 0,
    metrics: Mapping[str, float | None] | None = None,
    rewards: tuple[str, ...] = (),
    data: str = "",
    name: str | None = None,
    tags: Sequence[str] = (),
) -> None:
    """README.md, without secrets."""
    adapter = is_adapted(model) if adapter is None else adapter
    card = _card(config, _base(model, config), adapter, step, metrics or {}, rewards, data, name, tags)
    known = Redactor(config.model_dump(mode="json"), sys.argv, os.environ)
    write_atomic(path / "README.md", known.text(card))


def _remember_sampling(generation: Any, config: LanguageConfig) -> None:
    """The settings that the policy was trained to be sampled with."""
    generation.do_sample = True
    generation.temperature, generation.top_p = config.temperature, config.top_p
    generation.top_k = config.top_k or None
    generation.repetition_penalty = config.repetition_penalty
    generation.max_new_tokens = config.max_completion_length


def _base(model: Any, config: LanguageConfig) -> str:
    name = str(config.model or getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return "" if Path(name).is_absolute() or name.startswith((".", "~")) else name


def _card(
    config: LanguageConfig,
    base: str,
    adapter: bool,
    step: int,
    metrics: Mapping[str, float | None],
    rewards: tuple[str, ...],
    data: str,
    name: str | None,
    tags: Sequence[str] = (),
) -> str:
    """A model card: how it was trained, and what was measured."""
    recipe = config.recipe
    hub = base and ":" not in base and base != "tiny"
    head = ["---", "library_name: peft" if adapter else "library_name: transformers", "tags:", "- grpo", "- anygrpo"]
    head += [f"- {tag}" for tag in tags]
    head += [f"base_model: {base}"] if hub else []
    kind = "An adapter" if adapter else "A model"
    settings = {
        "recipe": f"{config.loss_type} ({recipe.paper})",
        "prompts a step × completions each": f"{config.groups_per_step} × {config.group_size}",
        "steps": step,
        "learning rate": f"{config.learning_rate:g} ({config.lr_schedule})",
        "KL weight β": f"{recipe.beta:g}",
        "sampling": f"temperature {config.temperature:g}, top-p {config.top_p:g}, top-k {config.top_k}",
        "longest completion": f"{config.max_completion_length} tokens",
        "rewards": ", ".join(rewards) or "from the environment",
        "data": data or "given in Python",
        "seed": config.seed,
    }
    told = {metric: metrics[metric] for metric in SHOWN if metrics.get(metric) is not None}
    lines = [
        *head,
        "---",
        "",
        f"# {name or (Path(base).name if base else 'A model')} trained with GRPO",
        "",
        f"{kind} trained with [anygrpo](https://pypi.org/project/anygrpo){f' from `{base}`' if base else ''}.",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {setting} | {value} |" for setting, value in settings.items()),
    ]
    if told:
        rows = [f"| {metric} | {value:.4g} |" for metric, value in told.items()]
        lines += ["", f"Measured at step {step}:", "", "| metric | value |", "|---|---|", *rows]
    return "\n".join([*lines, ""])
