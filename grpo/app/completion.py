"""`grpo completion`: what a shell needs to complete commands, presets, settings and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import shtab

from grpo.app.arguments import commands_of
from grpo.app.builders import TASKS
from grpo.app.explain import meanings
from grpo.app.settings import preset_names
from grpo.recipes import CHOICES, RECIPES
from grpo.run.config import RunConfig

WITH_SETTINGS = ("train", "sweep", "plan", "config")
"""Commands whose first words are presets or files, and whose flags are settings."""
FOLDERS, FILES = ("folder", "logdir", "to", "resume"), ("export", "onnx", "dataset", "video")
"""Arguments that are a folder or a file."""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """What `shell` must read; the parser is changed."""
    settings: dict[str, tuple[str, tuple[str, ...]]] = {}
    for setting, meaning, choices in _settings():  # what all tasks share is explained as the first of them does
        settings.setdefault(setting, (meaning, choices))
    for name, command in commands_of(parser).items():
        for action in _actions(command):
            _with_paths(action)
        if name in WITH_SETTINGS:
            _with_settings(command, settings)
    return str(shtab.complete(parser, shell)).rstrip() + "\n"


def _actions(parser: argparse.ArgumentParser) -> list[Any]:
    """What it has arguments for; argparse has no other way to ask."""
    return list(vars(parser)["_actions"])


def _with_paths(action: argparse.Action) -> None:
    kind = shtab.DIRECTORY if action.dest in FOLDERS else shtab.FILE if action.dest in FILES else None
    if kind is not None and action.nargs != 0:
        vars(action)["complete"] = kind


def _with_settings(command: argparse.ArgumentParser, settings: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    """Presets and files first, then every setting that the command has not a flag of its own for."""
    words = command.add_argument("words", nargs="*", help="a preset, or a file")
    vars(words)["complete"] = _presets_or_files(list(preset_names()))
    taken = {flag for action in _actions(command) for flag in action.option_strings}
    for name, (meaning, choices) in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in taken:
            command.add_argument(flag, help=meaning.replace("%", "%%"), choices=choices or None)


def _settings() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Every setting of every task whose libraries are here: its name, meaning and what it may be."""
    for task in TASKS:
        try:
            fields = dict(TASKS[task].settings().model_fields)
        except ImportError:
            continue
        fields |= {f"run.{name}": item for name, item in RunConfig.model_fields.items()}
        for name, meaning in meanings(task).items():
            allowed = fields[name].annotation if name in fields else None
            named = tuple(RECIPES) if name == "loss_type" else tuple(map(str, CHOICES.get(name, ())))
            yield name, meaning, named or _choices(allowed)


def _choices(annotation: Any) -> tuple[str, ...]:
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(word for part in get_args(annotation) for word in _choices(part))


def _presets_or_files(names: list[str]) -> dict[str, Any]:
    every = " ".join(names)
    return {
        "bash": "_grpo_presets",
        "zsh": "_grpo_presets",
        "fish": f"{every} (__fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'_grpo_presets() {{ compgen -W "{every}" -- "$1"; compgen -f -- "$1"; }}',
            "zsh": f"_grpo_presets() {{ _alternative 'presets:preset:({every})' 'files:file:_files' }}",
        },
    }
