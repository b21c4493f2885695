"""Other systems' words one by one: what each is called here, what it means, where the two differ.

`grpo config --dialects NAME` prints a system's table; the pages "Coming from …" are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grpo.app.explain import meanings
from grpo.app.words import EVERY
from grpo.dialects import COMMON, Spelling
from grpo.errors import ConfigError, nearest
from grpo.language.compat.dialect import OTHERS
from grpo.language.compat.easydel_dialect import EASYDEL
from grpo.run.dialect import RUN


@dataclass(frozen=True)
class System:
    """Whose words, and where they are understood."""

    title: str
    rooms: tuple[str | None, ...]
    """Tasks that understand them; None: what all share."""
    words: tuple[Spelling, ...] = ()
    """Its own."""
    shared: tuple[str, ...] = ()
    """Words of its users that others have, too: settings of ours by the same name, or spellings that are common."""


_EASYDEL_PAGE = (
    "model_name", "save_directory", "learning_rate", "max_prompt_length", "max_completion_length", "beta",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "dataset_num_proc", "skip_apply_chat_template",
    "total_batch_size", "num_train_epochs", "use_wandb", "num_return_sequences", "temperature", "top_p", "top_k",
    "repetition_penalty", "xml_reward", "correctness_reward", "max_training_steps", "log_steps", "report_steps",
    "evaluation_steps", "save_steps", "save_interval_minutes", "save_total_limit", "wandb_name", "warmup_steps",
    "weight_decay", "epsilon", "epsilon_high", "num_iterations", "loss_type", "importance_sampling_level",
    "scale_rewards", "reward_weights", "num_generations", "min_p", "generation_kwargs", "chat_template_kwargs",
    "mask_truncated_completions", "top_entropy_quantile", "gradient_accumulation_steps",
)  # fmt: skip

SYSTEMS = {
    "dreamer": System(
        "DreamerV3 with GRPO",
        ("worldmodel",),
        EVERY["dreamer"],
        (
            "beta", "epsilon", "epsilon_high", "num_generations", "scale_rewards", "loss_type", "num_iterations",
            "train_ratio", "logdir", "seed",
        ),
    ),
    "grpo": System(
        "a protocol-based GRPO",
        (None,),
        EVERY["grpo"],
        (
            "group_size", "num_epochs_per_update", "clip_epsilon", "kl_coeff", "entropy_coeff", "learning_rate",
            "max_grad_norm",
        ),
    ),
    "tutorial": System(
        "the tutorial with an environment, an actor and an optimizer",
        ("control",),
        EVERY["tutorial"],
        ("clip_ratio", "beta", "gamma", "epochs", "group_size"),
    ),
    "rlinf": System(
        "RLinf",
        ("language", "control"),
        EVERY["rlinf"],
        (
            "group_size", "kl_beta", "kl_penalty_type", "loss_agg_func", "early_stop_imp_ratio", "update_epoch",
            "reward_type", "logprob_type", "entropy_type",
        ),
    ),
    "easydel": System(
        "EasyDeL",
        ("language",),
        (*(spelling for spelling in OTHERS if "EasyDeL" in spelling.default), *EASYDEL),
        _EASYDEL_PAGE,
    ),
}  # fmt: skip
"""By the name that `--dialects` takes."""


def rows(name: str) -> Iterator[tuple[str, str, str, str]]:
    """(their word, ours, what it means, where it differs) of every word of a system."""
    if name not in SYSTEMS:
        known = ", ".join(SYSTEMS)
        raise ConfigError(f'there is no table for "{name}"{nearest(name, list(SYSTEMS))}; known: {known}')
    system = SYSTEMS[name]
    about: dict[str, str] = {}
    for room in reversed(system.rooms):
        about |= meanings(room)
    further = EVERY["trl"] if system.rooms == ("language",) else ()
    common = {spelling.key: (spelling, "") for spelling in (*COMMON, *further)}
    common |= {spelling.key: (spelling, "run.") for spelling in RUN}
    for word in system.shared:
        spelling, block = common.get(word, (Spelling(word, word), ""))
        yield _row(spelling, block if word in common else "run." * (f"run.{word}" in about), about)
    shown = set(system.shared)
    for spelling in system.words:
        if spelling.key not in shown:
            yield _row(spelling, "", about)


def _row(spelling: Spelling, block: str, about: Mapping[str, str]) -> tuple[str, str, str, str]:
    names = [block + name.strip() for name in spelling.becomes.split(",") if name.strip()]
    ours = ", ".join(names) or ("refused" if spelling.refused else "nothing to set")
    meaning = "; ".join(dict.fromkeys(_short(about.get(name, "")) for name in names[:2] if about.get(name)))
    return spelling.key, "the same" if names == [spelling.key] else ours, meaning, spelling.default


def _short(meaning: str) -> str:
    """Its first clause, without the stop."""
    return re.split(r"\. |; | · ", " ".join(meaning.split()))[0].rstrip(".")


def text(name: str) -> str:
    """The table for a terminal: a word a line, its meaning and difference below it."""
    lines = [f"{SYSTEMS[name].title}: their word → ours" if name in SYSTEMS else ""]
    for word, ours, meaning, differs in rows(name):
        lines.append(f"{word} → {ours}" + (f": {meaning}" if meaning else ""))
        lines += [f"    there: {differs}"] if differs else []
    return "\n".join(lines)


def markdown(name: str) -> str:
    """The table for a page."""
    lines = ["| theirs | ours | meaning | there, and where it differs |", "|---|---|---|---|"]
    for word, ours, meaning, differs in rows(name):
        named = ours if ours in ("the same", "refused", "nothing to set") else f"`{ours.replace(', ', '`, `')}`"
        cells = [f"`{word}`", named, meaning, differs]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells).rstrip() + " |")
    return "\n".join(lines)
