"""From presets, files and flags to one resolved configuration that knows where each setting came from.

Order: defaults < presets and files from left to right < command line. Each layer is translated from its own dialect
first: an `algorithm:` block speaks RLinf's, everything else the common words; `dialect:` names another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo.app.files import parse_settings, read_settings
from grpo.config import COLUMNS, ConfigError, GRPOConfig, one_line
from grpo.dialects import spellings, translate
from grpo.recipes import RECIPES, nearest

ALGORITHM_DIALECT = "rlinf"
"""What an `algorithm:` block is written in unless it says otherwise."""
PLAIN_DIALECT = "dreamer"
"""What flags and keys outside a block are written in."""


class RunConfig(BaseModel):
    """How a run is carried out: nothing here changes what is learned."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    steps: int = Field(100, ge=1)
    """Rollout-and-update steps in all."""
    logdir: str = "runs/{name}-{timestamp}"
    """The run's folder; {name} (of the preset, or the environment), {task}, {timestamp} and {seed} are filled in."""
    checkpoint_every: int = Field(25, ge=1)
    """Steps between checkpoints."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    keep_best: int = Field(1, ge=0)
    """Best checkpoints that are kept beside them."""
    best_by: str = "reward"
    """The metric that decides which is best: the highest, or with a leading minus the lowest."""
    evaluate_every: int | None = Field(None, ge=1)
    """Steps between evaluations, where the task has one; None: never."""
    stop_at: float | None = None
    """Ends the run once `best_by` reaches this."""
    env_steps: int | None = Field(None, ge=1)
    """Ends the run after so many environment steps, where the task counts them."""
    sample_every: int = Field(10, ge=1)
    """Steps between samples of what was tried and how it was judged."""
    trackers: tuple[str, ...] = ()
    """Mirrors of the metrics: tensorboard, wandb, trackio. The run folder always has them."""
    project: str | None = None
    """The project's name at wandb or trackio; None: WANDB_PROJECT, TRACKIO_PROJECT, or grpo."""


@dataclass(frozen=True)
class Layer:
    """Settings from one place, in our names."""

    origin: str
    settings: dict[str, Any]
    """Algorithm and task settings."""
    run: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    spelled: dict[str, str] = field(default_factory=dict)
    """Our name → the foreign key it was given as."""
    firm: bool = True
    """Given by the user: a setting without effect is an error. A preset's is left out instead."""


@dataclass(frozen=True)
class Resolved:
    """Everything a run needs, and where each setting came from."""

    task: str
    config: GRPOConfig
    run: RunConfig
    origins: Mapping[str, str]

    @property
    def name(self) -> str:
        """What a person would call it: the preset that chose the task, or the environment, or the task."""
        own_env = not self.origins.get("env", "preset").startswith("preset")
        preset = self.origins.get("task", "")
        word = getattr(self.config, "env", "") if own_env else preset.removeprefix("preset ")
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", word).strip("-.") or self.task

    def table(self) -> list[tuple[str, str, Any, str]]:
        """(block, name, value, origin) of every setting in force."""
        rows: list[tuple[str, str, Any, str]] = []
        for name in type(self.config).model_fields:
            if name != "recipe":
                rows.append(("task", name, getattr(self.config, name), self.origins.get(name, "default")))
        for name in COLUMNS:
            default = f"recipe {self.config.loss_type}"
            rows.append(("algorithm", name, getattr(self.config, name), self.origins.get(name, default)))
        for name in RunConfig.model_fields:
            rows.append(("run", name, getattr(self.run, name), self.origins.get(f"run.{name}", "default")))
        return rows

    def document(self) -> dict[str, Any]:
        """What `grpo train FILE` would need to do the same again."""
        given = {name: value for _, name, value, origin in self.table() if origin != "default" and "." not in name}
        own = {n: v for n, v in given.items() if n in type(self.config).model_fields or n in self.config.recipe}
        return {"task": self.task, **_plain(own), "run": _plain(self.run.model_dump())}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as lists, so that YAML and JSON can hold them."""

    def plain(value: Any) -> Any:
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return {name: plain(value) for name, value in settings.items()}


# --- presets --------------------------------------------------------------------------------------------------------


def preset_names() -> dict[str, str]:
    """Every preset with one line about it: files in the package, then a variation for each recipe."""
    folder = resources.files("grpo.app") / "presets"
    found = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".yaml"):
            name = entry.name.removesuffix(".yaml")
            found[name] = str(parse_settings(entry.read_text(encoding="utf-8"), entry.name).get("description", ""))
    return found | {name: f"loss_type={name}: {row.paper}" for name, row in RECIPES.items() if name not in found}


def preset_layer(name: str) -> Layer:
    """A preset by name."""
    entry = resources.files("grpo.app") / "presets" / f"{name}.yaml"
    if entry.is_file():
        raw = parse_settings(entry.read_text(encoding="utf-8"), f"preset {name}")
        return layer(raw, f"preset {name}", firm=False)
    if name in RECIPES:
        return Layer(f"preset {name}", {"loss_type": name}, firm=False)
    known = list(preset_names())
    raise ConfigError(f"there is no preset or file {name!r}{nearest(name, known)}; `grpo presets` lists them")


def file_layer(path: Path) -> Layer:
    """A user's YAML file."""
    return layer(read_settings(path), str(path))


def flag_layer(flags: Iterable[tuple[str, Any]]) -> Layer:
    """Settings from the command line, as (key, value); keys may name a block: `run.steps`, `algorithm.kl_beta`."""
    raw: dict[str, Any] = {}
    for key, value in flags:
        block, _, name = key.replace("-", "_").rpartition(".")
        target = raw if not block else raw.setdefault(block, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{key}: {block} is a value, not a block")
        inside = bool(block) and block not in ("run", "algorithm")  # a free block: nobody else knows the types
        listed = isinstance(value, str) and (value[:1] in ("[", "{") or inside)
        target[name] = parse_settings(f"value: {value}", key)["value"] if listed else value
    return layer(raw, "command line")


def layer(raw: dict[str, Any], origin: str, firm: bool = True) -> Layer:
    """Settings as written, sorted into blocks and translated."""
    raw = dict(raw)
    raw.pop("description", None)
    task, dialect = raw.pop("task", None), raw.pop("dialect", None)
    for name, word in (("task", task), ("dialect", dialect)):
        if word is not None and not isinstance(word, str):
            raise ConfigError(f"{origin}: {name} must be a word, found {word!r}")
    run, algorithm = raw.pop("run", None) or {}, raw.pop("algorithm", None) or {}
    for name, block in (("run", run), ("algorithm", algorithm)):
        if not isinstance(block, dict):
            raise ConfigError(f"{origin}: {name} must be a block of `key: value`, found {block!r}")
    own = RunConfig.model_fields
    run = {**run, **{key: raw.pop(key) for key in [k for k in raw if k in own]}}
    unknown = [key for key in run if key not in own]
    if unknown:
        raise ConfigError(f"{origin}: unknown setting 'run.{unknown[0]}'{nearest(unknown[0], list(own))}")
    settings: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for block, language in ((raw, dialect or PLAIN_DIALECT), (algorithm, dialect or ALGORITHM_DIALECT)):
        try:
            ours, translations = translate(block, language)
        except ValueError as error:
            raise ConfigError(f"{origin}: {error}") from None
        settings |= ours
        spelled |= {name: item.key for item in translations for name in item.settings}
    return Layer(origin, settings, run, task, spelled, firm)


# --- resolving ------------------------------------------------------------------------------------------------------


def resolve(layers: Sequence[Layer], configs: Mapping[str, Callable[[], type[GRPOConfig]]]) -> Resolved:
    """One configuration from all layers; `configs` gives the settings class of each task."""
    task = next((layer.task for layer in reversed(layers) if layer.task), None)
    if task is None:
        raise ConfigError(
            f"no task was named; give one of {', '.join(configs)} first, e.g. `grpo train {next(iter(configs))}`"
        )
    if task not in configs:
        raise ConfigError(f"unknown task {task!r}{nearest(task, list(configs))}; known: {', '.join(configs)}")
    settings: dict[str, Any] = {}
    run: dict[str, Any] = {}
    origins: dict[str, str] = {}
    firm: set[str] = set()
    for layer in layers:
        for name, value in layer.settings.items():
            settings[name] = value
            key = layer.spelled.get(name, name)
            origins[name] = layer.origin if key == name else f"{layer.origin} ({key})"
            firm = firm | {name} if layer.firm else firm - {name}
        if layer.task:
            origins["task"] = layer.origin
        run |= layer.run
        origins |= {f"run.{name}": layer.origin for name in layer.run}
    model = configs[task]()
    _expect_known(settings, model, origins)
    return Resolved(task, _made(model, settings, firm, origins), _run_config(run), origins)


def _expect_known(settings: Mapping[str, Any], model: type[GRPOConfig], origins: Mapping[str, str]) -> None:
    known = [name for name in model.model_fields if name != "recipe"] + list(COLUMNS)
    words = known + list(spellings(PLAIN_DIALECT)) + [f"run.{name}" for name in RunConfig.model_fields]
    for name in settings:
        if name not in known:
            raise ConfigError(f"{origins[name]}: unknown setting {name!r}{nearest(name, words)}")


def _made(model: type[GRPOConfig], settings: dict[str, Any], firm: set[str], origins: dict[str, str]) -> GRPOConfig:
    """The task's configuration; what a preset brought and another layer made idle or impossible is left out."""
    try:
        return model(**settings)
    except ConfigError as error:
        soft = [name for name in settings if name not in firm]
        idle = [
            name for name in soft if f"{name} has no effect" in str(error) or str(error).startswith(f"{name} takes")
        ]
        if not idle:
            raise
    for name in idle:
        origins.pop(name)
    return _made(model, {name: value for name, value in settings.items() if name not in idle}, firm, origins)


def _run_config(run: dict[str, Any]) -> RunConfig:
    run = dict(run)
    if isinstance(run.get("trackers"), str):
        run["trackers"] = tuple(word.strip() for word in run["trackers"].split(",") if word.strip())
    try:
        return RunConfig(**run)
    except ValidationError as error:
        raise ConfigError("run." + one_line(error)) from None
