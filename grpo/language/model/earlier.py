"""An earlier run as a model that only reads: the weights of one of its checkpoints.

Of the run's settings only those count that say what the weights belong to. Its rewards, tools and environments are not
looked at, and no code that comes with a model runs, whatever the run or the student allows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from grpo.config import ConfigError
from grpo.keeping import copy_into
from grpo.language.config import LanguageConfig
from grpo.language.model import loading
from grpo.language.model.adapters import with_adapter
from grpo.language.tasks import TINY, built_in
from grpo.models import device_of
from grpo.protocols import part
from grpo.run import checkpoint
from grpo.run.files import FolderError, read_json
from grpo.run.folder import RunFolder

OF_THE_MODEL = ("model", "revision", "tokenizer", "dataset", "seed", "quantize", "lora_rank", "lora_alpha",
                "lora_targets", "adapter")  # fmt: skip
"""Settings that say what the weights belong to; `dataset` and `seed` of a model made from scratch."""


def checkpoint_at(place: str) -> Path | None:
    """The checkpoint that is named (RUN/checkpoints/step-40), or the newest of a run that left no whole model."""
    path = Path(place)
    named = re.fullmatch(r"step-(\d+)", path.name)
    if named and path.parent.name == "checkpoints":
        return path.with_name(f"step-{int(named[1]):08d}")
    if not (path / "run.json").is_file():
        return None
    try:
        there = checkpoint.steps(RunFolder.open(path))
    except FolderError as error:
        raise ConfigError(f"teacher={place}: {error}") from None
    return there[-1] if there else None


def settings_of(path: Path, config: LanguageConfig) -> LanguageConfig:
    """What the weights of a checkpoint belong to: the model that the run left, else the one that it began with."""
    run = path.parents[1]
    try:
        saved = read_json(path / "manifest.json").get("settings", {})
    except (FolderError, OSError):
        there = ", ".join(sorted(one.name for one in path.parent.glob("step-*"))) or "none"
        raise ConfigError(f"teacher={config.teacher}: there is no such checkpoint; there: {there}") from None
    if "model" not in saved:
        raise ConfigError(f"teacher={config.teacher}: {run} is no run of a language model")
    known = LanguageConfig.model_fields
    own = {name: saved[name] for name in OF_THE_MODEL if name in saved and saved[name] != known[name].default}
    if (run / "model" / "config.json").is_file():
        own = {"model": str(run / "model")}
    elif not own.get("model"):
        raise ConfigError(
            f"teacher={config.teacher}: the run's model was handed over in Python, so that nothing here says what it "
            "is; save it (trainer.save_model) and name that folder"
        )
    return LanguageConfig(device=config.device, dtype=config.dtype, attention=config.attention, **own)


def tokenizer_of(named: LanguageConfig) -> Any:
    """Of the model that these settings name."""
    return built_in(named.dataset).tiny(named.seed)[1] if named.model == TINY else loading.load_tokenizer(named)


def load(named: LanguageConfig, path: Path) -> Any:
    """The module that `settings_of` names with the weights of the checkpoint."""
    try:
        weights = part(checkpoint.load(path).state.arrays, "policy")
    except FolderError as error:
        raise ConfigError(f"teacher={path}: {error}") from None
    if named.model == TINY:
        made = built_in(named.dataset).tiny(named.seed)[0].to(device_of(named.device))
    else:
        made = loading.load_model(named, trained_whole=False)
    model, _ = with_adapter(made, named)
    every = dict(model.named_parameters())
    try:
        with torch.no_grad():
            copy_into({name: every[name] for name in weights if name in every}, weights, "policy")
    except ValueError as error:
        raise ConfigError(f"teacher={path}: {error}; save the run's model and name that folder") from None
    return model
