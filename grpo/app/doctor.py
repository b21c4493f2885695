"""`grpo doctor`: what is here, what is missing, and the command that fixes it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from grpo import __version__
from grpo.app.arguments import columns, hanging
from grpo.errors import install

if TYPE_CHECKING:
    from grpo.app.settings import Resolved

EXTRAS = {
    "language": ("transformers", "datasets", "peft", "accelerate", "gguf", "math_verify"),
    "vision": ("transformers", "PIL"),
    "control": ("gymnasium", "gymnasium_robotics", "pygame", "mujoco", "Box2D", "minigrid", "imageio_ffmpeg"),
    "atari": ("ale_py",),
    "dm-control": ("dm_control", "shimmy"),
    "envpool": ("envpool",),
    "view": ("starlette", "uvicorn"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "sweep": ("optuna",),
    "ray": ("ray",),
    "jax": ("jax",),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow",),
    "swanlab": ("swanlab",),
    "comet": ("comet_ml",),
}
"""Optional parts and the packages they need."""

ENOUGH_DISK = 2 * 1024**3


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    value: str
    level: str = "ok"
    """ok, note (an optional part is missing) or problem (a run would fail)."""
    remedy: str = ""


def findings(folder: Path = Path("runs")) -> list[Finding]:
    """Everything that is looked at, in the order it is shown."""
    found = [Finding("anygrpo", __version__), *_namesake(), _python()]
    found += [_package(name) for name in ("numpy", "torch", "pydantic", "safetensors", "rich", "yaml", "matplotlib")]
    found += [_device(), *_folder(folder)]
    for extra, packages in EXTRAS.items():
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        remedy = install(extra) if missing else ""
        text = f"missing {', '.join(missing)}" if missing else "installed"
        found.append(Finding(f"extra {extra}", text, "note" if missing else "ok", remedy))
    exact = "bit-exact on the CPU, same versions; correct but not bit-exact on other devices"
    found.append(Finding("resume", exact))
    return found


def _namesake() -> list[Finding]:
    """The other distribution, which is called grpo and brings a package of the same name; one hides the other."""
    try:
        version = metadata.version("grpo")
    except metadata.PackageNotFoundError:
        return []
    remedy = "pip uninstall grpo, then pip install --force-reinstall --no-deps anygrpo (in a checkout: .)"
    return [Finding("grpo", f"{version} is somebody else's package of the same name", "problem", remedy)]


def _python() -> Finding:
    version = platform.python_version()
    old = sys.version_info < (3, 11)
    return Finding("python", version, "problem" if old else "ok", "use Python 3.11 or newer" if old else "")


def _package(module: str) -> Finding:
    name = {"yaml": "PyYAML"}.get(module, module)
    if importlib.util.find_spec(module) is None:
        return Finding(name, "missing", "problem", "pip install --force-reinstall anygrpo")
    return Finding(name, metadata.version(name))


def _device() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "none without torch", "problem", "pip install torch")
    import torch

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 1024**3
        return Finding("device", f"cuda: {torch.cuda.get_device_name(0)}, {memory:.0f} GiB")
    if torch.backends.mps.is_available():
        return Finding("device", "mps")
    return Finding("device", f"cpu, {os.cpu_count()} cores")


def _folder(folder: Path) -> list[Finding]:
    place = folder
    while not place.exists():
        place = place.parent
    writable = place.is_dir() and os.access(place, os.W_OK)
    remedy = "" if writable else "choose another folder with --logdir"
    free = shutil.disk_usage(place).free
    full = free < ENOUGH_DISK
    return [
        Finding("run folder", f"{folder.absolute()}: {'writable' if writable else 'not writable'}",
                "ok" if writable else "problem", remedy),
        Finding("free disk", f"{free / 1024**3:.1f} GiB", "problem" if full else "ok",
                "free at least 2 GiB, or lower run.keep_last" if full else ""),
    ]  # fmt: skip


def report(found: list[Finding]) -> str:
    """The findings as lines, problems marked."""
    width = max(len(item.what) for item in found)
    marks = {"ok": " ", "note": "·", "problem": "✗"}
    lines = []
    for item in found:
        said = f"{item.value}   → {item.remedy}" if item.remedy else item.value
        lines.append(hanging(f"{marks[item.level]} {item.what.ljust(width)}  ", said, columns()))
    return "\n".join(lines)


def preflight(resolved: Resolved) -> tuple[bool, str]:
    """Whether a planned run looks sound to its room, and what was found; its trainer is built for it."""
    from grpo.app.builders import TASKS  # here: the rest must work, and say so, where torch is missing
    from grpo.capabilities import Preflights
    from grpo.config import ConfigError
    from grpo.run.progress import told

    trainer = TASKS[resolved.task].trainer(resolved.config)
    try:
        if not isinstance(trainer, Preflights):
            raise ConfigError(f"the task {resolved.task} has no pre-flight; `grpo config` shows its settings")
        found = trainer.preflight()
    finally:
        trainer.source.close()
    marks = {"note": "·", "warning": "!", "problem": "✗"}
    lines = [f"{marks[item.level]} {item.what}" + (f"   → {item.remedy}" if item.remedy else "") for item in found]
    sound = not any(item.level == "problem" for item in found)
    return sound, told("\n".join([*lines, "ready" if sound else "not ready: mend what is marked ✗ first"]))
