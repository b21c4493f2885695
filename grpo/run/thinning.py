"""Which steps of a long run keep what they left: all of the newest, of older ones ever fewer, so that a folder stops
growing. It follows from step numbers alone, so that a run that was cut and resumed ends with the same files."""

from __future__ import annotations


def due(step: int, every: int, keep: int) -> bool:
    """Whether to look for what may go: each time half of what may stay is new."""
    return step % (every * max(keep // 2, 1)) == 0


def stays(step: int, now: int, every: int, keep: int) -> bool:
    """Whether what `step` left is still there at `now`, of things that are left every so many steps.

    Half of `keep` are the newest; older ones stay a power of two apart. What has gone at one time has gone later, too.
    """
    half = max(keep // 2, 1)
    if step > now - half * every:
        return True
    apart = every
    while now > half * apart:
        apart *= 2
    return step % apart == 0
