"""Settings and presets in words, for a terminal."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from grpo.app.settings import Resolved, preset_names
from grpo.config import ConfigError, GRPOConfig
from grpo.core.surrogates import names
from grpo.errors import nearest
from grpo.recipes import CHOICES, COLUMNS, RECIPES, Recipe
from grpo.run.config import RunConfig


def presets_text() -> str:
    """Every preset, tasks and variations apart."""
    names = preset_names()
    width = max(len(name) for name in names)
    written = [name for name in names if not names[name].startswith("loss_type=")]
    lines = ["Presets, applied from left to right: `grpo train TASK VARIATION … --setting value`", ""]
    lines += [f"  {name.ljust(width)}  {names[name]}" for name in written]
    lines += ["", "One for each recipe (`grpo presets --recipes` has the whole table):", ""]
    return "\n".join(lines + [f"  {name.ljust(width)}  {names[name]}" for name in names if name not in written])


def resolved_text(resolved: Resolved, everything: bool = False) -> str:
    """Each setting in force and where it came from."""
    rows = resolved.table()
    if not everything:
        rows = [row for row in rows if row[3] != "default" and not row[3].startswith("recipe ")]
    widths = [max([len(_shown(row[i])) for row in rows] + [0]) for i in range(3)]
    lines = [f"task: {resolved.task}   recipe: {resolved.config.loss_type}", ""]
    for block, name, value, origin in rows:
        cells = (block.ljust(widths[0]), name.ljust(widths[1]), _shown(value).ljust(widths[2]))
        lines.append("  ".join([*cells, origin]))
    lines += [] if everything else ["", "Everything else is at its default; --all prints it too."]
    return "\n".join([*lines, *(f"note: {notice}" for notice in resolved.config.algorithm.notices())])


def settings_text(task: str | None = None) -> str:
    """Every setting: name, default, meaning; those that all tasks share, or a task's own beside them."""
    model = GRPOConfig
    if task is not None:
        from grpo.app.builders import configs  # here: it loads the task's libraries

        if task not in configs():
            raise ConfigError(f"unknown task {task!r}{nearest(task, list(configs()))}; known: {', '.join(configs())}")
        model = configs()[task].settings()
    blocks = {
        f"The algorithm ({model.__name__})": _model_rows(model),
        "Columns of the recipe; the default is the recipe's own": _recipe_rows(model),
        "The run, as --run.NAME or run: in a file": _model_rows(RunConfig),
    }
    lines = []
    for title, rows in blocks.items():
        lines += [title, ""]
        for name, default, meaning in rows:
            head = f"  --{name.replace('_', '-')} ({default})"
            lines += textwrap.wrap(meaning, 110, initial_indent=f"{head}  ", subsequent_indent="      ")
        lines.append("")
    return "\n".join(lines)


def _model_rows(model: Any) -> list[tuple[str, str, str]]:
    shown = {name: item for name, item in model.model_fields.items() if name != "recipe"}
    return [(name, _shown(item.default), item.description or "") for name, item in shown.items()]


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
    """The sentence written under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    found, last = {}, ""
    for node in body.body if isinstance(body, ast.ClassDef) else []:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last], last = " ".join(str(node.value.value).split()), ""
    return found


def _shown(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
