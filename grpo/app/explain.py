"""Settings and presets in words, for a terminal."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.app import arguments
from grpo.app.settings import Resolved, Room, preset_layer, preset_names, task_of
from grpo.blocks import block_of
from grpo.config import ConfigError, GRPOConfig, Worded
from grpo.core.surrogates import names
from grpo.errors import nearest
from grpo.recipes import CHOICES, COLUMNS, RECIPES, Recipe
from grpo.run.config import RunConfig

WIDTH = 110
"""Of explanations, where there is room: longer lines are hard to follow."""
ROOMS = {
    "bandit": "The smallest room (nothing more to install)",
    "control": "Control (extra control)",
    "language": "Language models (extra language; --model where none is named)",
    "worldmodel": "World models (extra worldmodel; --env where none is named)",
}
"""By task, and what its presets need."""


def presets_text() -> str:
    """Every preset by the room that it is for, with what has to be installed, and variations apart."""
    names, columns = preset_names(), arguments.columns()
    width = max(len(name) for name in names)

    def entry(name: str) -> str:
        return arguments.hanging(f"  {name.ljust(width)}  ", names[name], columns)

    written = [name for name in names if not names[name].startswith("loss_type=")]
    of = {name: preset_layer(name).task for name in written}
    about = "Presets, applied from left to right: `grpo train TASK VARIATION … --setting value`"
    lines = [textwrap.fill(about, columns), ""]
    for task, title in [*ROOMS.items(), (None, "Variations of a task")]:
        lines += [textwrap.fill(title, columns), "", *(entry(name) for name in written if of[name] == task), ""]
    lines += [textwrap.fill("One for each recipe (`grpo presets --recipes` has the whole table):", columns), ""]
    return "\n".join(lines + [entry(name) for name in names if name not in written])


def resolved_text(resolved: Resolved, everything: bool = False) -> str:
    """Each setting in force and where it came from, block by block."""
    blocks = type(resolved.config).blocks
    homes, order = block_of(blocks), [*blocks, "run"]
    rows = [
        (block if block == "run" else homes[name], name, value, origin)
        for block, name, value, origin in resolved.table()
    ]
    rows.sort(key=lambda row: order.index(row[0]))
    if not everything:
        rows = [row for row in rows if row[3] != "default" and not row[3].startswith("recipe ")]
    widths = [max([len(_shown(row[i])) for row in rows] + [0]) for i in range(3)]
    lines = [f"task: {resolved.task}   recipe: {resolved.config.loss_type}", ""]
    for block, name, value, origin in rows:
        cells = (block.ljust(widths[0]), name.ljust(widths[1]), _shown(value).ljust(widths[2]))
        lines.append("  ".join([*cells, origin]))
    lines += [] if everything else ["", "Everything else is at its default; --all prints it too."]
    return "\n".join([*lines, *(f"note: {notice}" for notice in resolved.config.recipe.notices())])


def settings_text(task: str | None = None, resolved: Resolved | None = None, width: int = WIDTH) -> str:
    """Every setting, by block: name, default, meaning; those that all tasks share, or a task's own beside them.

    resolved: what presets, files and flags say together, whose values stand in place of defaults.
    """
    model = _settings_of(task)
    about, given = _about(model), _given(resolved)
    how = f"{len(about)} settings: --NAME VALUE or --BLOCK.NAME VALUE, in a file NAME: VALUE alone or under BLOCK:"
    lines = [textwrap.fill(how, width), ""]
    for block, placed in {**model.blocks, "run": tuple(f"run.{name}" for name in RunConfig.model_fields)}.items():
        lines += [textwrap.fill(block + NOTES.get(block, ""), width), ""]
        for name in filter(about.__contains__, placed):  # not the numbers of other recipes' surrogates
            default, meaning = about[name]
            lines += _entry(name, _shown(given.get(name, default)), meaning, width)
        lines.append("")
    return "\n".join(lines)


def every_text(names: Sequence[str], flags: Sequence[tuple[str, str]]) -> str:
    """Every setting, with the values that presets, files and flags give."""
    task = task_of(arguments.layers(names, [key for key, _ in flags]))
    return settings_text(task, arguments.perhaps(names, flags), arguments.columns())


NOTES = {
    "algorithm": ": in a file this block may speak RLinf's words; a default is the recipe's own (loss_type)",
    "run": ": how it is carried out; these always with their block, or as another system's words",
}
"""What is to be said of a block beside its name."""


def first_text(resolved: Resolved | None = None, width: int = WIDTH) -> str:
    """The ten settings that matter first, with the values that presets and files give them, and how to list all."""
    model: type[GRPOConfig] = GRPOConfig if resolved is None else type(resolved.config)
    about, given = _about(model), _given(resolved)
    lines = ["Settings that matter first:", ""]
    for name in model.first:
        default, meaning = about[name]
        lines += _entry(name, _shown(given.get(name, default)), meaning, width)
    lines += [
        "",
        f"`grpo train{f' {resolved.task}' if resolved else ''} --settings` explains all {len(about)}, block by block.",
    ]
    if resolved is None:
        own = "Each task has its own: see `grpo train cartpole --help`, or gsm8k, or dreamer, or a file of yours."
        lines.append(textwrap.fill(own, arguments.columns()))
    return "\n".join(lines)


def _given(resolved: Resolved | None) -> dict[str, Any]:
    """Values in force, by name; those of the run with their block before them."""
    return {} if resolved is None else {n if b != "run" else f"run.{n}": v for b, n, v, _ in resolved.table()}


def _tasks() -> Mapping[str, Room]:
    from grpo.app.builders import configs  # here: it brings torch along

    return configs()


def _settings_of(task: str | None) -> type[GRPOConfig]:
    if task is None:
        return GRPOConfig
    if task not in _tasks():
        raise ConfigError(f"unknown task {task!r}{nearest(task, list(_tasks()))}; known: {', '.join(_tasks())}")
    return _tasks()[task].settings()


def _about(model: type[GRPOConfig]) -> dict[str, tuple[str, str]]:
    """Setting → its default and its meaning; those of the run with their block before them."""
    about = {name: (default, meaning) for name, default, meaning in [*_model_rows(model), *_recipe_rows(model)]}
    return about | {f"run.{name}": (default, meaning) for name, default, meaning in _model_rows(RunConfig)}


def meanings(task: str | None) -> dict[str, str]:
    """Setting → its meaning, of a task or of what all share; those of the run with their block before them."""
    return {name: meaning for name, (_, meaning) in _about(_settings_of(task)).items()}


def _entry(name: str, default: str, meaning: str, width: int) -> list[str]:
    head = f"  --{name.replace('_', '-')} ({default})"
    return textwrap.wrap(meaning, min(width, WIDTH), initial_indent=f"{head}  ", subsequent_indent="      ")


def _model_rows(model: Any) -> list[tuple[str, str, str]]:
    shown = {name: item for name, item in model.model_fields.items() if name != "changed"}
    meanings: dict[str, str] = {}
    for own in reversed([cls for cls in model.mro() if issubclass(cls, Worded)]):
        meanings |= _field_docs(own)
    return [
        (name, _shown(item.get_default(call_default_factory=True)), meanings.get(name, ""))
        for name, item in shown.items()
    ]


def _recipe_rows(model: type[GRPOConfig]) -> list[tuple[str, str, str]]:
    """The columns, and the numbers of the surrogate that the task's own recipe has."""
    plain = Recipe("")
    surrogate = RECIPES[model.model_fields["loss_type"].default].surrogate
    meanings = _field_docs(Recipe)
    for own in reversed(type(surrogate).mro()[:-2]):
        meanings |= {surrogate.prefix + name: meaning for name, meaning in _field_docs(own).items()}
    rows = []
    for name, default in plain.columns().items():
        if name not in (*COLUMNS, *names(type(surrogate))):
            continue
        choices = f" One of {', '.join(CHOICES[name])}." if name in CHOICES else ""
        more = " Each has numbers of its own: see `grpo presets --recipes`." if name == "surrogate" else ""
        rows.append((name, _shown(default), meanings.get(name, "") + choices + more))
    return rows


def _field_docs(cls: type) -> dict[str, str]:
    """The sentence written under each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    found, last = {}, ""
    for node in body.body if isinstance(body, ast.ClassDef) else []:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last], last = " ".join(str(node.value.value).split()), ""
    return found


def _shown(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "…"
