"""What leaves the library by an exception: the user's own frames, and ours only where they are asked for.

A policy, a reward or a callback that fails does so below a dozen calls of ours, which say nothing about it; an error
that we raise says everything in its message. What is neither, a fault of ours or of a library's, keeps every frame,
and GRPO_TRACEBACK=full in the environment keeps them all.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterator
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from grpo.errors import not_theirs

OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
SETTING = "GRPO_TRACEBACK"
NOTE = f"(the library's own frames are left out; {SETTING}=full shows them)"

P = ParamSpec("P")
R = TypeVar("R")


def door(function: Callable[P, R]) -> Callable[P, R]:
    """A method that users call: what it raises begins with their own code."""

    @wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> R:
        try:
            return function(*given, **named)
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get(SETTING) != "full":
                _shorten(error)
            raise

    return called


def _shorten(error: BaseException) -> None:
    """Leave our frames out of an exception, and of those that led to it."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        kept = _kept(one)
        if kept is not one.__traceback__:
            one.__traceback__ = kept
            if NOTE not in getattr(error, "__notes__", ()):
                error.add_note(NOTE)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _kept(error: BaseException) -> TracebackType | None:
    """From the first frame of the user's own on; of an error of ours, or Ctrl-C, the place where it was raised."""
    frames = list(_frames(error.__traceback__))
    theirs = (frame for frame in frames if not not_theirs(frame.tb_frame.f_code.co_filename))
    said = type(error).__module__.startswith("grpo.") or isinstance(error, KeyboardInterrupt)
    said = bool(frames) and (said or (_raised(frames[-1]) and not isinstance(error, AssertionError)))
    return next(theirs, frames[-1] if said else error.__traceback__)


def _raised(frame: TracebackType) -> bool:
    """Whether a line of ours raises here, which has its message, in place of a call that failed."""
    path = frame.tb_frame.f_code.co_filename
    return path.startswith(OURS) and linecache.getline(path, frame.tb_lineno).lstrip().startswith("raise ")


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
