"""What went wrong, in words: shared by everyone who raises, imports nothing."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import unquote, urlsplit


class Refused(Exception):
    """What was asked for cannot be: a command ends with 2, on every rank."""


class ConfigError(Refused, ValueError):
    """A setting that is wrong, in one line that says what to do."""

    def __init__(
        self, message: str, idle: Mapping[str, str] | None = None, wrong: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.idle = dict(idle or {})
        """Settings that could just as well be left out, each with why: they change nothing here, or cannot be done."""
        self.wrong = dict(wrong or {})
        """Settings whose value cannot be, each with what is wrong with it; the message has them all."""

    def calling(self, names: Mapping[str, str]) -> ConfigError:
        """The same error with settings called as they were written."""
        if not set(names) & set(self.wrong):
            return self
        found = "; ".join(f"{names.get(name, name)}: {finding}" for name, finding in self.wrong.items())
        return ConfigError(found, self.idle, self.wrong)


class SamplesFailed(RuntimeError):
    """Samples failed on the first step, where it is still cheap to find out why."""


class Unanswered(RuntimeError):
    """A server that a run cannot do without did not give what it was asked for, in one line."""


class RanksLost(RuntimeError):
    """Another rank of the run is gone or cannot be reached: this one leaves at once and saves nothing."""


class PassUnfinished(RanksLost):
    """This rank has left a pass that others wait in. remedy: what helps; others: the error where one of them is why."""

    def __init__(self, what: str, remedy: str, others: RanksLost, why: str = "out of memory or failed") -> None:
        super().__init__(f"{why} at {what}, in the middle of a pass that others wait in; {remedy}")
        self.remedy, self.others = remedy, others


class RankFailed(RuntimeError):
    """Something went wrong on another rank, which says more about it."""


class RanksDiffer(RuntimeError):
    """Ranks that should know the same do not; the message names who differs."""


def line(error: BaseException) -> str:
    """An exception in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in {
        os.path.dirname(os.path.abspath(__file__)),
        *map(sysconfig.get_path, ("stdlib", "purelib", "platlib", "scripts")),
    }
)
"""Folders whose code is not the user's own."""
PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Nor is what lies below these: an environment may see the packages of another."""


DEEP = 4
"""Lines of the user's own that are named at most."""


def located(error: BaseException) -> str:
    """An exception in one short line, with the user's own lines that led to it: `(env.py:20 → :31 → physics.py:7)`."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(os.path.abspath(frame.filename), frame.lineno) for frame in frames]
    own = [place for place in places if os.path.exists(place[0]) and not not_theirs(place[0])]
    if not own:
        return line(error)
    left_out = ["…"] if len(own) > DEEP else []
    own = [own[0], *own[1:][-(DEEP - 1) :]]
    before = [None, *(path for path, _ in own)]
    first, *rest = [
        f"{'' if path == last else path}:{number}" for (path, number), last in zip(own, before, strict=False)
    ]
    return f"{line(error)} ({' → '.join([first, *left_out, *rest])})"


def defined_at(function: Any) -> str:
    """The ` (file:line)` of a function of the user's own, for an error that its caller raised; or nothing."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not os.path.exists(code.co_filename) or not_theirs(code.co_filename):
        return ""
    return f" ({os.path.abspath(code.co_filename)}:{code.co_firstlineno})"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the line of the user's own that led here, however many calls lie between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not_theirs(frame.f_code.co_filename):
        frame = None if frame.f_code.co_name == "spawn_main" else frame.f_back
    if frame is None:  # a thread, a command, or a process that was started: nobody's line
        warnings.warn_explicit(message, category, NOBODY, 1, "grpo", _told)
        return
    named, path = frame.f_globals.get("__name__", "<string>"), frame.f_code.co_filename
    told = frame.f_globals.setdefault("__warningregistry__", {})
    # Without its globals, which are for reading the line: a loader that has no source (python -c, a shell) raises.
    warnings.warn_explicit(message, category, path, frame.f_lineno, named, told)


NOBODY = "grpo"
"""Where a warning comes from that no line of a user's led to."""
_told: dict[Any, Any] = {}
"""Of those, the ones that were said already, as `warnings` keeps them: once is enough."""


def not_theirs(filename: str) -> bool:
    """Whether a file of code is ours or a library's, not the user's own."""
    path = os.path.abspath(filename)
    return filename.startswith("<frozen ") or path.startswith(INSTALLED) or any(part in path for part in PACKAGES)


@cache
def origin() -> tuple[str, str]:
    """Flags and name that pip is to be given for more of this installation: its folder, or the distribution."""
    try:
        told = json.loads(metadata.distribution("anygrpo").read_text("direct_url.json") or "{}")
        url, editable = urlsplit(told.get("url", "")), told.get("dir_info", {}).get("editable")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return "", "anygrpo"
    folder = Path(unquote(url.path))
    here = url.scheme == "file" and (folder / "pyproject.toml").is_file()
    return ("-e " if editable else "", str(folder)) if here else ("", "anygrpo")


def install(extra: str, flags: str = "") -> str:
    """The command that brings an extra; an editable installation stays one."""
    own, place = origin()
    return f"pip install {flags}{own}'{place}[{extra}]'"


def nearest(word: object, known: Sequence[str]) -> str:
    """ "; did you mean …?" with the closest known word, or nothing."""
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else ""
