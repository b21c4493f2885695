"""Models that are damaged or not whole: which file or tensor it is, what is wrong with it, and what to do."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.errors import line
from grpo.run.files import parse_json

NAMED = 3
"""Tensors that a message names; the others are counted."""
OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json")
"""Files of a model that hold one JSON object each."""
PICKLES = ("pytorch_model", "adapter_model")
"""How the names of pickled weights begin; what else is pickled there is not read."""
AWAY = ("couldn't connect", "offline", "connection", "cannot find the requested files", "max retries", "resolve")
"""Words of the hub's errors when it cannot be reached."""


@contextmanager
def told(what: str, name: str, place: str = "") -> Iterator[None]:
    """Whatever libraries raise over files that they cannot read, as one line; `place`: where those are."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged bytes make of a decoder whatever they like
        raise ConfigError(unloadable(what, name, error, place)) from error


def unloadable(what: str, name: str, error: Exception, place: str = "") -> str:
    """One line on why something could not be loaded, with the remedy."""
    flaw = flaw_in(Path(place or name), opaque=type(error).__name__ == "UnpicklingError")
    if flaw is not None:
        return f"{what}={name} cannot be loaded: {flaw}"
    text = " ".join(str(error).split())
    here = Path(place or name)
    if (here / "adapter_config.json").is_file() and not (here / "config.json").is_file() and what != "adapter":
        return f"{what}={name} holds an adapter without its model; give its base as model, and adapter={name}"
    written_as_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1  # a hub id has one slash at most
    if written_as_a_path and not here.expanduser().exists():
        return f"{what}={name}: there is no such file or folder"
    is_path = name.startswith((".", "/", "~")) or Path(name).exists()
    if any(word in text.lower() for word in AWAY) and not is_path:
        return (
            f"{what}={name}: it is no local folder, and the hub cannot be reached; check the name and the connection, "
            "or give a local folder"
        )
    if isinstance(error, OSError | ValueError | ImportError):
        return f"{what}={name} cannot be loaded: {text[:300]}"
    config = Path(place or name) / "config.json"
    remedy = f"; {config} may not say what its weights are" if config.exists() else ""
    return f"{what}={name} cannot be loaded: {line(error)}{remedy}"


def flaw_in(place: Path, opaque: bool = False) -> str | None:
    """The first file of a model that cannot be read and what is wrong with it; `opaque`: a pickle was refused."""
    files = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
    for path in files:
        try:
            wrong = _wrong(path, opaque) if path.is_file() else None
        except Exception as error:  # as above
            wrong = f"it is damaged, or was not written whole ({line(error)}); get it again"
        if wrong is not None:
            return f"{path}: {wrong}"
    return None


def _wrong(path: Path, opaque: bool) -> str | None:
    """What is wrong with one file, as far as it can be told; the readers raise where it is damaged."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS and not the file itself; fetch that with `git lfs pull`"
    if path.name in OBJECTS or path.name.endswith(".index.json"):
        found = parse_json(path.read_bytes())
        whole = isinstance(found, dict) and isinstance(found.get("weight_map", {}), dict)
        return None if whole else "it is no JSON object of the kind that belongs there; get it again"
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as tensors:
            tensors.keys()
    if path.suffix == ".gguf":
        from gguf import GGUFReader

        GGUFReader(path)
    pickled = path.suffix == ".bin" and path.name.startswith(PICKLES)
    if pickled and (opaque or not (zipfile.is_zipfile(path) or head[:1] == b"\x80")):
        return "it is damaged, or holds more than weights, which could run code and is not read; use safetensors"
    return None


# --- tensors ----------------------------------------------------------------------------------------------------------


def expect_whole(what: str, name: str, info: Mapping[str, Any], remedy: str) -> None:
    """Refuse weights that would stay random, going by what from_pretrained says of them."""
    missing = sorted(map(str, info["missing_keys"]))
    found = sorted(info["mismatched_keys"], key=lambda item: str(item[0]))
    wrong = [f"{key}: {tuple(there)} in the file, {tuple(here)} by its config" for key, there, here in found]
    said = [f"{len(names)} of its tensors {how} ({_some(names)})" for how, names in
            (("missing", missing), ("of another shape", wrong)) if names]  # fmt: skip
    if said:
        raise ConfigError(f"{what}={name}: {' and '.join(said)}; they would be random numbers. {remedy}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
