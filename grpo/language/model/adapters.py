"""Adapters (PEFT): put on, taken up again, merged for export."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from grpo.config import ConfigError
from grpo.errors import install
from grpo.language.config import LanguageConfig
from grpo.language.model.damage import told


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError:
        raise ConfigError(f"an adapter needs peft: {install('language')}") from None
    return peft


def with_adapter(
    model: Any, config: LanguageConfig, peft_config: Any = None, left_out: Sequence[str] = ()
) -> tuple[Any, bool]:
    """The model as it is trained, and whether its adapter begins as nothing (the base model is then its start).

    A model that has an adapter already goes on with it. left_out: parts that get none.
    """
    learned = [peft_config, *(model.peft_config.values() if is_adapted(model) else ())]
    if any(getattr(one, "is_prompt_learning", False) for one in learned):
        raise ConfigError(
            "prompt-learning adapters put tokens of their own before the prompt, which scoring here knows nothing of; "
            "use LoRA (LoraConfig)"
        )
    if is_adapted(model):
        if peft_config is not None or config.lora_rank or config.adapter:
            raise ConfigError("the model has an adapter already; leave peft_config, lora_rank and adapter out")
        return model, False
    if config.adapter:
        if peft_config is not None:
            raise ConfigError("adapter goes on with a trained adapter, peft_config makes a new one; give one of them")
        with told("adapter", config.adapter), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # they would begin anew
            return _peft().PeftModel.from_pretrained(model, config.adapter, is_trainable=True), False
    if peft_config is None and not config.lora_rank:
        return model, True
    if peft_config is None:
        targets = config.lora_targets if isinstance(config.lora_targets, str) else list(config.lora_targets)
        peft_config = _peft().LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha or 2 * config.lora_rank,
            target_modules=targets,
            exclude_modules=rf"(.*\.)?({'|'.join(left_out)})\..*" if left_out else None,
            task_type="CAUSAL_LM",
        )
    if config.quantize != "none":
        model = _peft().prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    try:
        return _peft().get_peft_model(model, copy.deepcopy(peft_config)), True
    except ValueError as error:
        raise ConfigError(f"the adapter does not fit {type(model).__name__}: {error}") from None


def is_adapted(model: Any) -> bool:
    """Whether PEFT has put an adapter on it."""
    return hasattr(model, "disable_adapter") and hasattr(model, "peft_config")


def merged(model: Any) -> nn.Module:
    """A copy of the base model with the adapter worked into its weights; the trained one stays as it is."""
    if not is_adapted(model):
        return model
    made: nn.Module = copy.deepcopy(model).merge_and_unload()
    return made
