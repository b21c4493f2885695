"""Image-text models: what of them reads images, kept as it is unless the settings say otherwise; their processors."""

from __future__ import annotations

import importlib.util
from typing import Any

from grpo.errors import ConfigError
from grpo.language.pictures.processor import without_videos
from grpo.language.pictures.reading import pillow


def reads_images(shape: Any, asked: bool = False) -> bool:
    """Whether a configuration is one of an image-text model that is loaded as such.

    One that also makes a causal language model (Gemma 3) reads text alone, as it did, unless images are `asked` for.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    pictured: Any = AutoModelForImageTextToText._model_mapping
    causal: Any = AutoModelForCausalLM._model_mapping
    if type(shape) not in pictured:
        return False
    return asked or type(shape) not in causal


def load_processor(place: str, shape: Any, **how: Any) -> Any:
    """The processor that belongs to a model's folder or hub id; `shape`: its configuration."""
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    auto: Any = AutoProcessor
    kind = PROCESSOR_MAPPING.get(type(shape), None)
    if kind is None or importlib.util.find_spec("torchvision") is not None:
        return auto.from_pretrained(place, **how)
    pillow()
    return without_videos(kind).from_pretrained(place, **how)


def tokenizer_of(processor: Any) -> Any:
    """The processor's tokenizer, with the chat template that may lie with the processor alone."""
    tokenizer = processor.tokenizer
    if not getattr(tokenizer, "chat_template", None) and getattr(processor, "chat_template", None):
        tokenizer.chat_template = processor.chat_template
    return tokenizer


def readers(model: Any) -> list[str]:
    """Names of an image-text model's parts that are neither its decoder nor its head: vision tower, projector, …"""
    kept = (model.get_decoder(), model.get_output_embeddings())
    if kept[0] is model.base_model:
        raise ConfigError(f"{type(model).__name__} does not tell its decoder from what reads images; set train_vision")
    return [name for name, part in model.base_model.named_children() if not any(part is one for one in kept)]


def freeze(model: Any) -> list[str]:
    """Train the decoder alone; the names of the parts that are kept as they are."""
    frozen = readers(model)
    kept = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)
    return frozen
