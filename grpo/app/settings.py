"""From presets, files and flags to one resolved configuration that knows where each setting came from.

Order: defaults < presets and files from left to right < command line. Once it is known which task they are for, layers
are translated: an `algorithm:` block speaks RLinf's dialect, everything else the task's; `dialect:` names another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, get_args, get_origin

from grpo.app.files import parse_settings, read_settings
from grpo.app.words import EVERY
from grpo.blocks import DIALECT_BLOCKS, Leaf, as_it_is, unfolded
from grpo.config import ConfigError, GRPOConfig
from grpo.core.surrogates import flattened
from grpo.dialects import OWN, Spelling, Translation, joined, key_of, read, spellings
from grpo.dialects.values import Bare
from grpo.errors import nearest
from grpo.recipes import RECIPES, column_types
from grpo.run.config import RunConfig
from grpo.run.dialect import RUN, run_config, translate_run
from grpo.run.inside import FolderError, open_regular
from grpo.worldmodel.dialect import NOT_HERE, environment

ALGORITHM_DIALECT = "rlinf"
"""What an `algorithm:` block is written in unless it says otherwise."""

COMMAND_LINE = "command line"
"""Where flags come from."""
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")


class Room(Protocol):
    """What a task must say for its settings to be read."""

    @property
    def dialect(self) -> str:
        """What flags and keys outside a block are written in."""
        ...

    def settings(self) -> type[GRPOConfig]:
        """Its settings class."""
        ...


class Repeated(list[Any]):
    """The values of a flag that was given several times."""


@dataclass(frozen=True)
class Layer:
    """Settings from one place, as they are written there; those of the run are in our names already."""

    origin: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the algorithm and the task."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """Those in an `algorithm:` block."""
    run: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    dialect: str | None = None
    """What both are written in; None: see above."""
    spelled: dict[str, Translation] = field(default_factory=dict)
    """Our name of a run's setting → the foreign key it was given as."""
    firm: bool = True
    """Given by the user: a setting without effect is an error. A preset's is left out instead."""
    leaf: Leaf = as_it_is
    """How words of a command line become values where no schema knows the type."""
    in_run: dict[str, Any] = field(default_factory=dict)
    """Those in a `run:` block that are not about the run: a task's own, if it says so."""


@dataclass(frozen=True)
class Resolved:
    """Everything a run needs, and where each setting came from."""

    task: str
    config: GRPOConfig
    run: RunConfig
    origins: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    """Choices that were made for the user."""

    @property
    def name(self) -> str:
        """What a person would call it: as asked for, or the preset, environment, data or model that it is about."""
        origin = self.origins.get("task", "")
        preset = origin.removeprefix("preset ")
        given = {name for name, its in self.origins.items() if not its.startswith("preset")}
        own = preset if origin.startswith("preset ") and preset != self.task else ""
        word = self.run.name or self.config.title(given, own) or preset
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", word).strip("-.") or self.task

    def table(self) -> list[tuple[str, str, Any, str]]:
        """(block, name, value, origin) of every setting in force."""
        rows: list[tuple[str, str, Any, str]] = []
        for name in type(self.config).model_fields:
            if name != "changed":
                rows.append(("task", name, getattr(self.config, name), self.origins.get(name, "default")))
        known, default = column_types(), f"recipe {self.config.loss_type}"
        for name, value in self.config.algorithm.columns().items():
            if name in known:
                rows.append(("algorithm", name, value, self.origins.get(name, default)))
        for name in RunConfig.model_fields:
            rows.append(("run", name, getattr(self.run, name), self.origins.get(f"run.{name}", "default")))
        return rows

    def document(self) -> dict[str, Any]:
        """What `grpo train FILE` would need to do the same again."""
        given = {name: value for _, name, value, origin in self.table() if origin != "default" and "." not in name}
        own = {n: v for n, v in given.items() if n in type(self.config).model_fields or n in self.config.changed}
        return {"task": self.task, "dialect": OWN, **_plain(own), "run": _plain(self.run.model_dump())}


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
        return Layer(f"preset {name}", {"loss_type": name}, dialect=OWN, firm=False)
    if name in NOT_HERE:
        raise ConfigError(f"there is no preset {name}: {NOT_HERE[name]}")
    known = list(preset_names())
    raise ConfigError(f"there is no preset or file {name!r}{nearest(name, known)}; `grpo presets` lists them")


def file_layer(path: Path) -> Layer:
    """A user's YAML file."""
    return layer(read_settings(path), str(path))


def data_layer(path: Path) -> Layer:
    """A data set by its file: prompts for a language model."""
    try:
        open_regular(path).close()
    except FolderError as error:
        raise ConfigError(str(error)) from None
    return Layer(str(path), {"dataset": str(path)}, task="language", dialect=OWN)


def flag_layer(flags: Iterable[tuple[str, Any]]) -> Layer:
    """Settings from the command line, as (key, value); keys may name a block: `run.steps`, `model.lora_rank`."""
    raw: dict[str, Any] = {}
    for key, value in flags:
        target, name = raw, key_of(key)
        block, _, inside = name.partition(".")
        if block in DIALECT_BLOCKS and inside:
            target, name = raw.setdefault(block, {}), inside
        elif block == "surrogate" and inside:  # its numbers are settings like any other
            name = next(iter(flattened({inside: value})))
        if not isinstance(target, dict):
            raise ConfigError(f"{key}: {block} is a value, not a block")
        made = _structured(key, value) if isinstance(value, str) and value[:1] in ("[", "{") else value
        before = target.get(name)
        target[name] = made if name not in target else Repeated([*_several(before), *_several(made)])
    return replace(layer(raw, COMMAND_LINE), leaf=typed)


def _structured(key: str, word: str) -> Any:
    """A list or a block; a text that only begins like one stays, such as a template that begins with its {prompt}."""
    try:
        return typed(key, word)
    except ConfigError:
        if word[-1:] == {"[": "]", "{": "}"}[word[0]] and word.count(word[0]) == 1:
            raise  # meant as one, and mistyped
        return word


def typed(key: str, word: Any) -> Any:
    """A word of the command line with the type that YAML gives it: for places where no schema knows one."""
    if isinstance(word, Repeated):
        return [typed(key, item) for item in word]
    return parse_settings(f"value: {word}", key)["value"] if isinstance(word, str) else word


def layer(raw: dict[str, Any], origin: str, firm: bool = True) -> Layer:
    """Settings as written, sorted into blocks and translated."""
    raw = dict(raw)
    raw.pop("description", None)
    task, dialect = raw.pop("task", None), raw.pop("dialect", None)
    for name, word in (("task", task), ("dialect", dialect)):
        if word is not None and not isinstance(word, str):
            raise ConfigError(f"{origin}: {name} must be a word, found {word!r}")
    if isinstance(raw.get("surrogate"), dict):
        raw |= flattened(raw.pop("surrogate"))
    task = _of_a_suite(raw, task, origin)
    run, algorithm = raw.pop("run", None) or {}, raw.pop("algorithm", None) or {}
    for name, block in (("run", run), ("algorithm", algorithm)):
        if not isinstance(block, dict):
            raise ConfigError(f"{origin}: {name} must be a block of `key: value`, found {block!r}")
    try:
        rest, loose, done = translate_run(raw)
        unknown, inside, more = translate_run(run)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{origin}: {error}") from None
    inside |= {"name": unknown.pop("name")} if "name" in unknown else {}
    spelled = {name: item for item in (*more, *done) for name in item.settings}
    return Layer(origin, rest, algorithm, inside | loose, task, dialect, spelled, firm, in_run=unknown)


def _of_a_suite(raw: dict[str, Any], task: str | None, origin: str) -> str | None:
    """The task that is meant; DreamerV3 calls its environments so, and `raw` then gets the environment."""
    try:
        env = None if task is None else environment(task)
    except ValueError as error:
        raise ConfigError(f"{origin}: task {error}") from None
    if env is None:
        return task
    if raw.get("env", env) != env:
        raise ConfigError(
            f"{origin}: task {task} is the environment {env}, and env says {raw['env']}; keep one of them"
        )
    raw["env"] = env
    return "worldmodel"


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --- resolving ------------------------------------------------------------------------------------------------------


def task_of(layers: Sequence[Layer]) -> str | None:
    """The task that was named last."""
    return next((layer.task for layer in reversed(layers) if layer.task), None)


def resolve(layers: Sequence[Layer], rooms: Mapping[str, Room]) -> Resolved:
    """One configuration from all layers; `rooms`: every task by name."""
    task = task_of(layers)
    if task is None:
        raise ConfigError(
            f"no task was named; give one of {', '.join(rooms)} first, or a preset: `grpo train cartpole`; "
            "`grpo presets` lists them"
        )
    if task not in rooms:
        raise ConfigError(f"unknown task {task!r}{nearest(task, list(rooms))}; known: {', '.join(rooms)}")
    model, dialect = rooms[task].settings(), rooms[task].dialect
    settings: dict[str, Any] = {}
    run: dict[str, Any] = {}
    origins: dict[str, str] = {}
    said: dict[str, str] = {}
    firm: set[str] = set()
    yielding: dict[str, tuple[str, dict[str, Any]]] = {}
    for layer in (_for_task(layer, task, model, dialect) for layer in layers):
        ours, along, spelled = _translated(layer, dialect, model, settings)
        yielding = {key: item for key, item in yielding.items() if key not in ours} | along
        for name in _outdated(ours, settings, model):
            if name not in firm:
                settings.pop(name, None)
        for name, value in ours.items():
            settings[name] = value
            origins[name], said[name] = _from(layer, spelled.get(name), name)
            firm = firm | {name} if layer.firm else firm - {name}
        if layer.task:
            origins["task"] = layer.origin
        for asked, instead in (("steps", "num_train_epochs"), ("num_train_epochs", "steps")):
            if layer.run.get(asked) is not None and layer.run.get(instead) is None:
                run.pop(instead, None)
                origins.pop(f"run.{instead}", None)
        run |= layer.run
        for name in layer.run:
            origins[f"run.{name}"], said[f"run.{name}"] = _from(layer, layer.spelled.get(name), f"run.{name}")
    for key, (origin, along_with) in yielding.items():
        for name in [name for name in along_with if name not in settings]:
            settings[name], origins[name] = along_with[name], f"{origin} ({key})"
    origins = {name: value for name, value in origins.items() if name in settings or name == "task" or "." in name}
    try:
        config = _made(model, settings, firm, origins)
        return Resolved(task, config, run_config(run), origins, tuple(_remarks(layers, task, config, origins)))
    except ConfigError as error:
        raise error.calling(said) from None


def _remarks(layers: Sequence[Layer], task: str, config: GRPOConfig, origins: Mapping[str, str]) -> Iterator[str]:
    """What was chosen without being asked for: one of several tasks, the environment where none is named."""
    about = [name for name in ("env", "dataset") if name in type(config).model_fields]
    tasks = [layer for layer in layers if layer.task and not layer.firm]
    names = ", ".join(layer.origin.removeprefix("preset ") for layer in tasks)
    chosen = ", ".join(f"{name} {getattr(config, name)}" for name in about)
    several = [{str(layer.settings[name]) for layer in tasks if name in layer.settings} for name in about]
    if len({layer.task for layer in tasks}) > 1 or any(len(values) > 1 for values in several):
        yield f"{names} each name a task: what the later says holds, here task {task}{chosen and ', '}{chosen}"
    elif "env" in about and "env" not in origins:
        yield f"no --env was named: {chosen} is taken"


def _for_task(layer: Layer, task: str, model: type[GRPOConfig], dialect: str) -> Layer:
    """A preset of another task without what this one has no setting for."""
    if layer.firm or layer.task in (None, task):
        return layer
    known = {*model.model_fields, *column_types(), *model.blocks, *spellings(layer.dialect or dialect, EVERY)}
    return replace(layer, settings={key: value for key, value in layer.settings.items() if key_of(key) in known})


def _outdated(ours: Mapping[str, Any], before: Mapping[str, Any], model: type[GRPOConfig]) -> list[str]:
    """What was said about values that are now others."""
    changed = [name for name in model.goes_with if ours.get(name, before.get(name)) != before.get(name)]
    return [name for about in changed for name in model.goes_with[about]]


def _of_the_task(layer: Layer, model: type[GRPOConfig]) -> dict[str, Any]:
    """A layer's settings with those that stand in its run block."""
    for word in layer.in_run:
        if word not in model.in_run_block:
            known = [*RunConfig.model_fields, *model.in_run_block]
            raise ConfigError(f"{layer.origin}: unknown setting 'run.{word}'{nearest(word, known)}")
    return layer.settings | layer.in_run


def _from(layer: Layer, item: Translation | None, name: str) -> tuple[str, str]:
    """Where a setting came from, and what a message calls it."""
    if item is None:
        return layer.origin, f"{layer.origin}: {name}"
    return f"{layer.origin} ({item.key})", f"{layer.origin}: {item.said(name)}"


def _translated(
    layer: Layer, dialect: str, model: type[GRPOConfig], before: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[str, dict[str, Any]]], dict[str, Translation]]:
    """A layer's settings in our names; those that go along with a key and yield to others; the keys as written."""
    settings: dict[str, Any] = {}
    along: dict[str, tuple[str, dict[str, Any]]] = {}
    spelled: dict[str, Translation] = {}
    every = joined(EVERY, dict.fromkeys(EVERY, model.words[OWN]))  # the room's own words are said in any dialect
    for block, words in (
        (_of_the_task(layer, model), layer.dialect or dialect),
        (layer.algorithm, layer.dialect or ALGORITHM_DIALECT),
    ):
        try:
            known = spellings(words, every)
            flat = unfolded(block, model.blocks, model.model_fields, known, layer.leaf)
            ours, soft, done = read(_settled(flat, model, known), words, {**before, **settings}, every)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{layer.origin}: {error}") from None
        settings |= {name: _fitting(name, value, model) for name, value in ours.items()}
        for item in done:
            along[item.key] = (layer.origin, {name: soft[name] for name in item.settings if name in soft})
            spelled |= dict.fromkeys(item.settings, item)
        for name, value in (soft | ours).items():
            _expect_known(name, value, _from(layer, spelled.get(name), name)[0], model, known)
    return settings, along, spelled


def _settled(block: dict[str, Any], model: type[GRPOConfig], known: Mapping[str, Spelling]) -> dict[str, Any]:
    """Flags that were given several times: all values where the setting has several, else the last."""

    def one(key: str, value: Any) -> Any:
        name = known[key].becomes if key in known else key
        return value if not isinstance(value, Repeated) else list(value) if _many(name, model) else value[-1]

    return {key: one(key, value) for key, value in block.items()}


def _fitting(name: str, value: Any, model: type[GRPOConfig]) -> Any:
    """A single word where several are allowed."""
    return (value,) if isinstance(value, str) and _many(name, model) else value


def _many(name: str, model: type[GRPOConfig]) -> bool:
    return name in model.model_fields and get_origin(model.model_fields[name].annotation) is tuple


def _expect_known(name: str, value: Any, origin: str, model: type[GRPOConfig], words: Mapping[str, Spelling]) -> None:
    """Make sure that the task has this setting; `words`: those of the system that it may be meant in."""
    known = [own for own in model.model_fields if own != "changed"] + list(column_types())
    if name in known:
        wants = model.model_fields[name].annotation if name in model.model_fields else bool
        if isinstance(value, Bare) and {*(get_args(wants) or (wants,))} <= {str, int, float, type(None)}:
            raise ConfigError(f"{origin}: --{name.replace('_', '-')} needs a value")
        return
    about_the_run = [*(f"run.{own}" for own in RunConfig.model_fields), *(spelling.key for spelling in RUN)]
    meant = [*known, *words, *about_the_run, *(model.blocks if isinstance(value, Mapping) else ())]
    path = name
    while isinstance(value, Mapping) and len(value) == 1:  # as it was written: block.setting
        (inner, value), *_ = value.items()
        path = f"{path}.{inner}"
    raise ConfigError(f"{origin}: unknown setting {path!r}{nearest(name, meant)}")


def _made(model: type[GRPOConfig], settings: dict[str, Any], firm: set[str], origins: dict[str, str]) -> GRPOConfig:
    """The task's configuration; what a preset brought and another layer made idle or impossible is left out."""
    try:
        return model(_dialect=OWN, **settings)
    except ConfigError as error:
        idle = [name for name in settings if name in error.idle and name not in firm]
        if not idle:
            raise
    for name in idle:
        origins.pop(name)
    return _made(model, {name: value for name, value in settings.items() if name not in idle}, firm, origins)
