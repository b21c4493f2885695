"""The models that are measured: SmolLM2-135M with its real weights, other shapes with random ones.

As a script it writes a model's folder, which every library loads: bfloat16 weights (float32 for a CPU) and a tokenizer.
Its end-of-sequence token is one that is never sampled, so that all rows run to their limit without a word to anyone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from cells import job
from floor import Shape
from shapes import SHAPES, TINY
from transformers import AutoConfig, AutoModelForCausalLM

NEVER = "<empty_output>"
"""A token of SmolLM2's that stands between the cells of a notebook."""


def random_model(shape: dict[str, Any], dtype: str, device: str) -> Any:
    """A model of that shape; the same weights every time on the same device."""
    further = {name: value for name, value in shape.items() if name not in ("model_type", "rope_theta")}
    if "rope_theta" in shape:
        further["rope_parameters"] = {"rope_type": "default", "rope_theta": shape["rope_theta"]}
    config = AutoConfig.for_model(shape["model_type"], **further)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def load(asked: dict[str, Any]) -> Any:
    """The model of a job: from its folder where there is one, else made here."""
    if (Path(asked["folder"]) / "config.json").exists():
        loaded: Any = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=getattr(torch, asked["dtype"]))
        return loaded.to(asked["device"]).eval()
    return random_model(shape_of(asked), asked["dtype"], asked["device"])


def counted(model: Any) -> Shape:
    """What of a model the floor is computed from."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    return Shape(
        weights=weights,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        bytes_each=next(model.parameters()).element_size(),
    )


def shape_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Of random weights."""
    return TINY if asked["tiny"] else SHAPES[asked["model"]]


def words(size: int) -> Any:
    """A tokenizer of so many words: w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    last = f"w{size - 1}"
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", pad_token="w0", eos_token=last)


def _smollm(asked: dict[str, Any]) -> tuple[Any, Any]:
    """The real weights, and a tokenizer that ends nothing."""
    from grpo.language.config import LanguageConfig
    from grpo.language.model import loading

    settings = LanguageConfig(model=asked["source"], device="cpu", dtype=asked["dtype"])
    model, tokenizer = loading.load_model(settings, False), loading.load_tokenizer(settings)
    if NEVER not in tokenizer.get_vocab():
        raise SystemExit(f"{asked['source']}: its tokenizer has no {NEVER}; give --model a SmolLM2")
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = NEVER, "<|endoftext|>", None
    return model, tokenizer


def main() -> None:
    asked = job()
    folder = Path(asked["folder"])
    if asked["model"] == "smollm" and not asked["tiny"]:
        model, tokenizer = _smollm(asked)
    else:
        model = random_model(shape_of(asked), asked["dtype"], asked["device"])
        tokenizer = words(model.config.vocab_size)
    for holder in (model.config, model.generation_config):
        holder.eos_token_id, holder.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        holder.bos_token_id = None
    model.config.quantization_config = None
    del model.config.quantization_config  # of the file it came from; the weights are plain now
    beside = folder.with_suffix(".part")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.replace(folder)


if __name__ == "__main__":
    main()
