"""Trainers of runs that are only looked at: nothing is learned, nobody teaches, and no server is asked.

A run's servers may be gone, or be somebody else's whose folder was sent: its model is here and samples here.
"""

from __future__ import annotations

from typing import Any

from grpo.language.config import LanguageConfig
from grpo.language.model.teacher import NoTeacher
from grpo.language.rewards.builtin import BUILTIN
from grpo.language.rewards.lookup import Unloaded
from grpo.language.trainer import GRPOTrainer


def make_judged(config: LanguageConfig, **given: Any) -> GRPOTrainer:
    """For answers that are judged; given: a model that no name leads to."""
    return GRPOTrainer(args=sampling_here(config), teacher_model=_no_teacher(config), **given)


def make_speaker(config: LanguageConfig, **given: Any) -> GRPOTrainer:
    """For a model that is only talked to or saved: rewards are named, none of their code is loaded."""
    words = config.rewards or ("reward",)  # one that a script gave
    rewards = [word if word.partition(":")[0] in BUILTIN else Unloaded(word) for word in words]
    if not config.dataset:  # the script's own rows
        given["train_dataset"] = [{config.prompt_column or "prompt": "?", config.answer_column or "answer": ""}]
    told = sampling_here(config).but(rewards=())
    return GRPOTrainer(args=told, reward_funcs=rewards, teacher_model=_no_teacher(config), **given)


def sampling_here(config: LanguageConfig) -> LanguageConfig:
    """The settings without servers, and without a copy that samples ahead."""
    given: dict[str, Any] = dict(config.engine_kwargs)
    if config.servers or "base_url" in given:
        return config.but(servers=[], staleness=0.0, engine="auto", engine_kwargs={})
    if not config.staleness:
        return config
    given.pop("sampler_device", None)
    return config.but(staleness=0.0, engine_kwargs=given)


def _no_teacher(config: LanguageConfig) -> NoTeacher | None:
    return NoTeacher() if config.recipe.teacher_coef else None
