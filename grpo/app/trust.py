"""Whose code a run folder runs: looking at one, or going on with it, runs nothing that came along with it unasked.

    a file or module of yours, outside of the folder               runs: it was there before the folder
    an environment class or id of an installed package             runs
    anything named on this command line, anything with --trust     runs
    what lies inside the folder, links included                    refused
    other functions of installed packages and of Python itself     refused: `os:system` is one of them, and so is a file
                                                                   of any Python installation on this machine

The settings say of themselves where they name code: `GRPOConfig.named_code`. Where a name leads is found out without
importing what is not installed.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import grpo
from grpo.app.settings import COMMAND_LINE, Resolved
from grpo.config import ConfigError, NamedCode

OURS = (
    "grpo.envs.pictures:drawn", "grpo.control.experts:umaze", "grpo.envs.metaworld:expert",
    "grpo.language.tasks:exact", "grpo.language.tasks:in_place", "grpo.language.tasks:result",
)  # fmt: skip
"""Functions of this library that presets name; its environments are classes."""

_INSTALLED = re.compile(
    r"/(site|dist)-packages/ | /lib(32|64)?/(.*/)?(python|pypy)\d[\d.]*t?/ | ^/usr/(lib(32|64)?|share)/", re.VERBOSE
)
"""Paths of any Python's own files, of packages, and of what a distribution brings along. People's own are elsewhere."""
_NOT_LOOKED_AT = ("__main__", "antigravity", "this")
"""Importing them does something."""


def expect_trusted(resolved: Resolved, folder: Path, unused: Collection[str] = ()) -> None:
    """Refuse settings of a run folder that would run code which came with it; `unused`: those that will not be used."""
    if (said := untrusted(resolved, folder, unused)) is not None:
        raise ConfigError(said)


def untrusted(resolved: Resolved, folder: Path, unused: Collection[str] = (), file: str = "config.json") -> str | None:
    """What would have to be confirmed before these settings of a folder, from its `file`, are used; None: nothing."""
    source = folder / file
    why = {"name": _leads, "argument": _is_passed_on, "model": _brings}
    for code in resolved.config.named_code():
        origin = resolved.origins.get(code.setting, "")
        now = origin == COMMAND_LINE or origin.startswith(f"{COMMAND_LINE} (")
        if code.setting in unused or (now and not origin.startswith(str(source))):  # a folder may be called so
            continue
        said = why[code.kind](code, folder)
        if said is not None:
            return (
                f"{source}: {code.setting} names {code.word}, which {said}; it was not loaded. If you know where this "
                "folder comes from and have read what it would run, add --trust (trust=True in Python)"
            )
    return None


def _is_passed_on(code: NamedCode, folder: Path) -> str:
    return "is handed to a library that may run code for it"


def _brings(code: NamedCode, folder: Path) -> str | None:
    """Code that comes with a model: from the hub, where anybody may put some, or with the folder."""
    place = Path(os.path.expanduser(code.word))
    return "brings code of its own" if not place.exists() or _inside(place, folder) else None


def _leads(code: NamedCode, folder: Path) -> str | None:
    """Where a word leads that must not be followed: into the folder, or to a function that was not made for this."""
    home, colon, name = code.word.rpartition(":")
    written = home or code.word
    is_file = written.endswith(".py")
    if is_file:
        module, places = "", [Path(written), Path(os.path.expanduser(written))]
    elif colon:
        module, places = home, list(_places(home))
    else:  # an id, my_package/MyEnv-v0: the package is imported, nothing of it is called
        module, places = "", [place for package in _packages(code.word) for place in _places(package)]
    for place in places:
        if _inside(place, folder):
            return f"lies inside of this folder ({place})"
    installed = (colon or is_file) and places and any(_is_installed(place) for place in places)
    if module.partition(".")[0] in (*sys.stdlib_module_names, "__main__"):
        said = "is a part of Python itself"
    elif installed and code.word not in OURS and not (module and _is_environment(module, name)):
        said = f"is a function of an installed package ({places[-1]})"
    else:
        return None
    return None if code.setting == "env_kwargs" and _is_plain_text(module, name) else said


def _is_plain_text(home: str, name: str) -> bool:
    """Whether an environment's own word, `random:3`, `cuda:0` or `select:best`, only reads like one for code."""
    if not home.isidentifier() or home in _NOT_LOOKED_AT:
        return False
    try:
        module = import_module(home)
        return not (name.isidentifier() and callable(getattr(module, name, None)))
    except Exception:  # what cannot be looked at is taken for code
        return False


def _packages(word: str) -> list[str]:
    """Modules that an id is looked for in."""
    namespace, slash, _ = word.partition("/")
    found = dict.fromkeys((namespace, namespace.lower(), namespace.replace("-", "_").lower()))
    return [module for module in found if slash and module.isidentifier()]


def _is_environment(home: str, name: str) -> bool:
    """Whether a name of an installed module is an environment's class or registered id."""
    try:
        import gymnasium as gym

        module = import_module(home)
    except Exception:  # whatever an installed package does that does not work here: it is told when it is used
        return False
    found = getattr(module, name, None)
    return name in gym.registry or (isinstance(found, type) and issubclass(found, gym.Env))


# --- where a name leads, without importing it -------------------------------------------------------------------------


def _places(module: str) -> Iterator[Path]:
    """Files and folders that importing a module would go through, the last its own."""
    name, path = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _spec(name, path)
        if spec is None:
            return
        path = list(spec.submodule_search_locations or [])
        yield from (Path(place) for place in path)
        if spec.has_location and spec.origin:
            yield Path(spec.origin)


def _spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    """What an import would find, here or in the working folder, where environments are looked for too."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(name, [*sys.path, os.getcwd()] if path is None else path)
        else:
            spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _inside(place: Path, folder: Path) -> bool:
    """Whether a path goes through a folder, as it is written or where its links lead."""
    ways: Iterable[Path] = (Path(os.path.abspath(place)), place.resolve())
    return any(_same(step, folder) for way in ways for step in (way, *way.parents))


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _is_installed(place: Path) -> bool:
    """Whether a file belongs to this or another Python, as it is written or where its links lead."""
    ways = (os.path.abspath(place), str(place.resolve()))
    known = any(_INSTALLED.search(Path(way).as_posix()) for way in ways)
    return known or any(_inside(place, library) for library in _libraries())


@cache
def _libraries() -> tuple[Path, ...]:
    """Where Python, installed packages and this library are."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), *grpo.__path__]
    return tuple(Path(path) for path in dict.fromkeys(paths))
