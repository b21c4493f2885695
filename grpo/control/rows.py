"""The rows that a step has played, by number: what they were, to show them and to play them again.

Starts that are asked for again within a step get rows of their own; a row's number goes with it through everything that
is selected from the step's rollouts.

Letters: F numbers of an observation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo.control.episodes import Episodes
from grpo.rollouts import Rollouts

if TYPE_CHECKING:
    from grpo.control.films import Reel, Tape
    from grpo.envs.episodes import Start
    from grpo.envs.heads import Head

MOST_SEEN = 8
"""Numbers of an observation that are kept beside the actions; larger ones say little to the eye."""


class StepRows:
    """The step's rows, attempt by attempt."""

    def __init__(self) -> None:
        self._errors: dict[int, str] = {}
        self._count = 0
        self._firsts: list[int] = []
        """Number of the first row of each attempt."""
        self._reels: list[Reel | None] = []
        """Each attempt's episodes, to play them again; None where they are parts of streams, or a program's."""

    def add(self, episodes: Episodes, attempt: int, starts: Sequence[Start] | None = None) -> int:
        """Number these; the first one's number. Without `starts` they cannot be played again."""
        if attempt == 0:
            self._errors, self._count, self._firsts, self._reels = {}, 0, [], []
        first = self._count
        self._errors |= {first + row: message for row, message in episodes.errors.items()}
        self._firsts.append(first)
        self._reels.append(None if starts is None else _reel(starts, episodes))
        self._count += len(episodes)
        return first

    @property
    def replayable(self) -> bool:
        """Whether all of the step's episodes can be played again."""
        return None not in self._reels

    def tapes(self, rows: Rollouts, head: Head, repeat: int) -> list[Tape | None]:
        """What it takes to play these rows again; None for one that failed."""
        tapes = []
        for number in rows.inputs["row"][:, 0].tolist():
            attempt = self._attempt(number)
            reel = self._reels[attempt]
            assert reel is not None
            tapes.append(reel.tape(number - self._firsts[attempt], head, repeat))
        return tapes

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """Actions, rewards, length of each row, what was seen if it is little, and what went wrong with it."""
        seen = rows.inputs["observation"]
        short = (
            not isinstance(seen, Mapping)
            and seen.ndim == 3
            and seen.shape[2] <= MOST_SEEN
            and "float" in str(seen.dtype)
        )
        lengths = rows.mask_NT.sum(1).tolist()
        shown: list[dict[str, Any]] = []
        for i, (number, length) in enumerate(zip(rows.inputs["row"][:, 0].tolist(), lengths, strict=True)):
            trace = {
                "length": length,
                "actions": rows.inputs["action"][i, :length].tolist(),
                "rewards": [] if rows.reward_NT is None else rows.reward_NT[i, :length].tolist(),
            }
            if short:
                trace["observations"] = [[round(x, 4) for x in seen_F] for seen_F in seen[i, :length].tolist()]
            if attempt := max(self._attempt(number), 0):
                trace["attempt"] = attempt
            shown.append(trace | ({"error": self._errors[number]} if number in self._errors else {}))
        return shown

    def _attempt(self, number: int) -> int:
        return bisect_right(self._firsts, number) - 1


def _reel(starts: Sequence[Start], episodes: Episodes) -> Reel:
    from grpo.control.films import Reel  # here: what a program played is not filmed, and needs no environment

    return Reel.of(starts, episodes)
