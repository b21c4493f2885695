"""Language models: prompts in, better answers out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo.lazy import lazily

if TYPE_CHECKING:
    from grpo.language.compat.easydel import vInference
    from grpo.language.config import LanguageConfig
    from grpo.language.config import LanguageConfig as GRPOConfig
    from grpo.language.trainer import GRPOTrainer, make_trainer

__all__ = ["GRPOConfig", "GRPOTrainer", "LanguageConfig", "make_trainer", "vInference"]

_HOME = {
    "GRPOConfig": "grpo.language.config:LanguageConfig",  # the name TRL's and EasyDeL's users know
    "LanguageConfig": "grpo.language.config",
    "GRPOTrainer": "grpo.language.trainer",
    "make_trainer": "grpo.language.trainer",
    "vInference": "grpo.language.compat.easydel",
}

__getattr__, __dir__ = lazily(__name__, _HOME, "language")
