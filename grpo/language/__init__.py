"""Language models: prompts in, better answers out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.language.compat.easydel import vInference
    from grpo.language.config import LanguageConfig
    from grpo.language.config import LanguageConfig as GRPOConfig
    from grpo.language.trainer import GRPOTrainer, make_trainer

__all__ = ["GRPOConfig", "GRPOTrainer", "LanguageConfig", "make_trainer", "vInference"]

_HOMES = {
    "GRPOConfig": ("grpo.language.config", "LanguageConfig"),  # the name TRL's and EasyDeL's users know
    "LanguageConfig": ("grpo.language.config", "LanguageConfig"),
    "GRPOTrainer": ("grpo.language.trainer", "GRPOTrainer"),
    "make_trainer": ("grpo.language.trainer", "make_trainer"),
    "vInference": ("grpo.language.compat.easydel", "vInference"),
}


def __getattr__(name: str) -> Any:
    """Settings load without transformers; the trainer brings it along."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, its_name = _HOMES[name]
    return getattr(import_module(module), its_name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
