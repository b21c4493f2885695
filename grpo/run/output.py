"""Standard output and error that never fail: what nobody can read any more is dropped, and said once elsewhere.

    with standing(tell):   # for as long as a run goes on
        print("…")         # | head has had enough, the disk is full, the terminal is gone: nothing happens

Everything that prints goes through these two streams: progress, rich, warnings, tracebacks, a user's own code.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from grpo.errors import NOBODY

NAMES = {"stdout": "standard output", "stderr": "standard error"}


class Steady:
    """A text stream whose writes never raise. Once one has failed, the others go nowhere."""

    def __init__(self, stream: TextIO | None, name: str) -> None:
        self.name = name
        self.lost: OSError | ValueError | None = None
        """What the first write that failed ended with."""
        self.tell: Callable[[str], Any] | None = None
        """Gets the one line about it."""
        if stream is None or stream.closed:
            stream, self.lost = open(os.devnull, "w"), ValueError("it was closed")  # noqa: SIM115
        self.stream: TextIO = stream

    def write(self, text: str) -> int:
        """Text, as well as the stream's encoding can say it."""
        self._try(lambda: self._write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Several."""
        for text in lines:
            self.write(text)

    def flush(self) -> None:
        """Pass on what is held back."""
        self._try(self.stream.flush)

    def say_if_lost(self) -> None:
        """Tell whoever listens now what happened before."""
        if self.lost is not None and self.tell is not None:
            self.tell(f"{self.name} is gone ({self.lost}): what would be printed is dropped")

    def __getattr__(self, name: str) -> Any:
        """Whatever else a stream has."""
        return getattr(self.stream, name)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeEncodeError as error:
            self.stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def _try(self, call: Callable[[], Any]) -> None:
        if self.lost is not None:
            return
        try:
            call()
        except BlockingIOError:  # a reader that is slow, and has set its end so: this much it misses
            return
        except (OSError, ValueError) as error:  # ValueError: closed by somebody
            self.lost = error
            self._sink()
            self.say_if_lost()

    def _sink(self) -> None:
        """What is still held back goes nowhere too: the interpreter flushes it at its end, and would exit with 120."""
        with suppress(OSError, ValueError):
            if self.stream.fileno() in (1, 2):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)


def install() -> tuple[Steady, Steady]:
    """Make this process's two streams steady for good."""
    _fill()
    sys.stdout, sys.stderr = streams = _steady("stdout"), _steady("stderr")
    return streams


def plain_warnings() -> None:
    """Make a warning that no line of a user's led to one line, without a place in our code."""
    ours = warnings.formatwarning

    def said(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        return f"warning: {message}\n" if filename == NOBODY else ours(message, category, filename, lineno, line)

    warnings.formatwarning = said


@contextmanager
def standing(tell: Callable[[str], Any] | None = None) -> Iterator[tuple[Steady, Steady]]:
    """The same for a while; `tell` hears of a stream that is lost, once, also of one that was lost before."""
    before = sys.stdout, sys.stderr
    streams = install()
    listening = [stream.tell for stream in streams]
    try:
        for stream in streams:
            stream.tell = tell
            stream.say_if_lost()
        yield streams
    finally:
        for stream, heard in zip(streams, listening, strict=True):
            stream.flush()
            stream.tell = heard
        sys.stdout, sys.stderr = before


def _steady(which: str) -> Any:
    stream = vars(sys)[which]
    return stream if isinstance(stream, Steady) else Steady(stream, NAMES[which])


def _fill() -> None:
    """Closed descriptors become /dev/null: else the next file opened would be where others print to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest that is free
