"""Starts that are kept on the disk: what a run's first step needs, so that the next one like it makes nothing anew.

    a run by command ─► weights before its first step · states that are evaluated · names of its two programs in
                        JAX's cache ─► one file, called by everything that these depend on

Whoever finds the file needs neither PyTorch, Gymnasium nor JAX, and traces, lowers and compiles nothing. A file that
lacks something, was changed or belongs to somebody else is as good as none: then the start is made, and the file
written again. Programs stay where JAX put them; nothing here is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from grpo.control.config import ControlConfig

MOST = 256
"""Starts that are kept, of some 40 kB each; the oldest go first."""
LIBRARIES = ("torch", "numpy", "jax", "jaxlib", "gymnasium")
SPEAKS = ("JAX_", "XLA_")
"""What variables begin with that change what is compiled."""
WHOLE = "sha256"
HERE = Path(__file__).parents[2]
SOURCES = (".", "core", "core/surrogates", "control", "control/baselines", "control/compiled", "envs", "envs/functions")
"""Folders of the package whose code a start or its programs come of."""


@dataclass(frozen=True)
class Start:
    """What is kept: plain values, and arrays by name."""

    values: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


def cached() -> Path:
    """The user's own cache: XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anygrpo"


def programs() -> Path:
    """Where JAX keeps compiled code: where the user says, or beside the starts."""
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cached() / "jax")


def key(config: ControlConfig) -> str:
    """What a start is called: everything that its numbers and programs depend on."""
    return _digest({"settings": config.model_dump(mode="json"), "here": here()})


def program_name(what: str, program: Iterable[Any]) -> str:
    """What a function is called that JAX compiles and keeps: by what it computes, so its file is found untraced."""
    return f"{what}_{_digest({'program': repr(tuple(program)), 'here': here()})[:32]}"


@cache
def here() -> Mapping[str, Any]:
    """This machine, its libraries and our own code, as far as numbers or machine code depend on them."""
    told = {name: metadata.version(name) for name in LIBRARIES}
    told |= {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    said = {name: value for name, value in os.environ.items() if name.startswith(SPEAKS)}
    return {**told, "processor": _processor(), "said": said, "code": _code()}


def _processor() -> str:
    """What it can do, and so what code for it may contain."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))})
        return hashlib.sha256("\n".join(told).encode()).hexdigest()
    return platform.processor()


def _code() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((HERE / folder).glob("*.py")):
            digest.update(f"{folder}/{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=dict).encode()).hexdigest()


# --- files ----------------------------------------------------------------------------------------------------------


def _place(name: str) -> Path:
    return cached() / "starts" / f"{name}.safetensors"


def write(name: str, start: Start) -> None:
    """Keep it, in one go; what cannot be written is made again next time."""
    place = _place(name)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        arrays = {"values": np.frombuffer(json.dumps(start.values).encode(), np.uint8), **start.arrays}
        data = save({name: np.array(x, order="C") for name, x in arrays.items()})
        written = place.with_name(f".{place.name}.{os.getpid()}")
        written.write_bytes(hashlib.sha256(data).digest() + data)
        written.replace(place)
        for old in sorted(place.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)[:-MOST]:
            old.unlink()


def read(name: str) -> Start | None:
    """What was kept; None: nothing, or nothing that can be relied on."""
    data = own_bytes(_place(name))
    if data is None or hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    arrays = load(data[32:])
    return Start(json.loads(arrays.pop("values").tobytes()), arrays)


def compiled(name: str) -> Mapping[str, str] | None:
    """The file that JAX's cache has of a function, and its hash; None: it has none, or several."""
    found = [path for path in programs().glob(f"jit_{name}-*") if path.name.endswith("-cache")]
    data = own_bytes(found[0]) if len(found) == 1 else None
    return None if data is None else {"file": found[0].name, WHOLE: hashlib.sha256(data).hexdigest()}


def expect_bytes(told: Mapping[str, str]) -> bytes:
    """That file as it was, or an error where it is another now."""
    data = own_bytes(programs() / told["file"])
    if data is None or hashlib.sha256(data).hexdigest() != told[WHOLE]:
        raise OSError(f"{programs() / told['file']} is not what it was")
    return data


def own_bytes(path: Path) -> bytes | None:
    """A file that is the user's, and that not everybody may write, in a folder of which the same is true."""
    try:
        for place in (path.parent, path):
            about = place.stat()
            if about.st_uid != os.getuid() or about.st_mode & stat.S_IWOTH:
                return None
        return path.read_bytes()
    except OSError:
        return None
