"""Checkpoints written while training goes on: at most one at a time, and nobody leaves before it is there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress

from grpo.run import checkpoint
from grpo.run.folder import RunFolder

MAX_UNSAVED = 3
"""Failures in a row, of checkpoints or of a step's lines, before the run stops."""


class Saving:
    """The checkpoints of one process: what is written, how it ended, and how often it may fail.

    The last one, and those after one that failed, are written before training goes on.
    """

    def __init__(
        self, folder: RunFolder, keep_last: int | None, keep_best: int, at: Callable[[str], None] | None = None
    ) -> None:
        self._folder, self._keep_last, self._keep_best, self._at = folder, keep_last, keep_best, at
        self.step: int | None = None
        """Of the newest checkpoint."""
        self.given_up = False
        """Too many have failed, or the last one has."""
        self.why = ""
        """What the last of them ended with."""
        self._failures = 0
        self._under_way: _Publication | None = None
        self._cut = False

    def save(self, taken: checkpoint.Snapshot, last: bool = False) -> None:
        """Publish it, after the one that is under way."""
        self.settle()
        publication = _Publication(taken.step, lambda: self._publish(taken))
        if last or self._failures:  # nothing goes on; or what is done meanwhile may be lost
            publication.run()
            self._hear(publication, last)
        else:
            self._under_way = publication
            try:
                publication.start()
            except RuntimeError:  # there is no room for a thread: here and now, then
                self._under_way = None
                publication.run()
                self._hear(publication)

    def settle(self, wait: bool = True) -> None:
        """Hear how the save that is under way has ended; without `wait`, if it has."""
        publication = self._under_way
        if publication is None or not (publication.ended or wait):
            return
        publication.wait()
        self._under_way = None
        self._hear(publication)

    def finish(self, cut: bool) -> None:
        """No save outlives the run; one that is `cut` ends with the file it is at."""
        self._cut = cut
        with suppress(_CutShort):
            self.settle()

    def _publish(self, taken: checkpoint.Snapshot) -> None:
        def reached(point: str) -> None:
            if self._at is not None:
                self._at(point)
            if self._cut:
                raise _CutShort

        self._folder.sync()
        checkpoint.publish(self._folder, taken, keep_last=self._keep_last, keep_best=self._keep_best, at=reached)

    def _hear(self, publication: _Publication, last: bool = False) -> None:
        """A full disk is survived a few times; anything else is raised."""
        if isinstance(publication.error, OSError):
            self._failures += 1
            self.given_up = self.given_up or last or self._failures >= MAX_UNSAVED
            what = f"step {publication.step} was not saved, the older ones are kept: {publication.error}"
            self._folder.alarm(publication.step, "checkpoint_failed", what)
            self.why = f"{what}; make room, then resume" if self.given_up else ""
        elif publication.error is not None:
            raise publication.error
        else:
            self.step, self._failures = publication.step, 0


class Waited:
    """The time since the last checkpoint: a run that is cut must not lose more of it than `minutes`."""

    def __init__(self, minutes: float | None, clock: Callable[[], float]) -> None:
        self._limit, self._clock = 60 * minutes if minutes else math.inf, clock
        self.restart()

    def restart(self) -> None:
        """There is one."""
        self._since = self._clock()

    def too_long(self, ahead: int) -> bool:
        """Whether it is more than that, or would be after so many further stretches as long as this one."""
        return (self._clock() - self._since) * (1 + ahead) >= self._limit


class _Publication(threading.Thread):
    """The writing of one checkpoint, in a thread that the interpreter does not exit without."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        super().__init__(name="checkpoint")
        self.step, self._write = step, write
        self.error: BaseException | None = None
        """What it ended with; whoever waits for it gets it."""
        self.ended = False
        self._writing = threading.Lock()
        self._writing.acquire()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._writing.release()

    def wait(self) -> None:
        """Until it has ended, however often whoever waits is interrupted.

        `join` alone takes a thread that it was called away from for one that has ended (Python up to 3.12).
        """
        if not self.ended:
            self._writing.acquire()
        self.join()


class _CutShort(BaseException):
    """Ends a save that nobody waits for any more."""
