"""From a word to a function of a user's: file.py:name or module:name."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo.errors import ConfigError, line, nearest
from grpo.run.guard import TrainsWhenLoaded, loading


class FromFile:
    """A function of a file, loaded again by path wherever it is sent: the file need not be importable."""

    def __init__(self, path: str, name: str) -> None:
        function = _member(_load(path), name, path)
        functools.update_wrapper(self, function)
        self.path, self.name, self.function = os.path.abspath(path), name, function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __reduce__(self) -> Any:
        return FromFile, (self.path, self.name)


def function_of(word: str) -> Callable[..., Any] | None:
    """The function that a word names by its file or module; None: it names neither."""
    head, colon, name = word.rpartition(":")
    if head.endswith(".py"):
        return FromFile(head, name)
    if word.endswith(".py"):
        raise ConfigError(f"{word}: which function? Write {word}:NAME{_has(_load(word))}")
    if colon and all(part.isidentifier() for part in head.split(".")):
        return _member(_import(head), name, head)
    return None


def _load(path: str) -> ModuleType:
    file = Path(path).absolute()
    if not file.is_file():
        there = sorted(other.name for other in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise ConfigError(f"reward file {path} does not exist{nearest(file.name, there)}")
    version = f"{file}:{file.stat().st_mtime_ns}"  # an edited file is another module: a notebook may go on
    name = f"{file.stem}_{hashlib.sha256(version.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # what stands beside it may be imported, as when it is run
    try:
        with loading(file):
            spec.loader.exec_module(module)
    except BaseException as error:  # whatever the user's file does when it is loaded
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, TrainsWhenLoaded):
            raise ConfigError(str(error)) from None
        raise ConfigError(f"reward file {path} cannot be loaded: {line(error)}") from error
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"reward module {name}: {error}; a file is given as {name}.py:NAME") from error


def _member(module: ModuleType, name: str, origin: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{origin} has no function {name!r}{nearest(name, _functions(module))}")
    return found


def _functions(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def _has(module: ModuleType) -> str:
    found = [name for name in _functions(module) if getattr(module, name).__module__ == module.__name__]
    return f"; it has {', '.join(found)}" if found else ""
