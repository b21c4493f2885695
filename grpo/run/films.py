"""Films beside a step's samples: made by a source that `Films`, ever more seldom, and never at the cost of the run.

What it returns for each row is what to look at: [{"kind": "video" | "strip" | "image", "name": …, "file": …}].
"""

from __future__ import annotations

from typing import Any

from grpo.capabilities import Films, Illustrates
from grpo.protocols import RolloutSource
from grpo.report import StepReport
from grpo.run.folder import RunFolder
from grpo.run.inside import names_inside, write_inside

SELDOM = 4
"""A step is filmed once so many times as many are done as when the last one was: a few films in a long run."""


def illustrate(folder: RunFolder, report: StepReport, source: RolloutSource, rows: list[dict[str, Any]]) -> None:
    """Have rows name small pictures of what they began with; one that many began with is written once."""
    if not isinstance(source, Illustrates) or not rows:
        return
    found = source.illustrate(report.experience.rollouts.select([row["row"] for row in rows]))
    there = set(names_inside(folder.path, "samples")) if any(found) else set()
    for row, pictures in zip(rows, found, strict=True):
        for name in pictures.keys() - there:
            write_inside(folder.path, f"samples/{name}", lambda file, data=pictures[name]: file.write(data))
            there.add(name)
        if pictures:
            row["media"] = [{"kind": "image", "name": f"image {i}", "file": name} for i, name in enumerate(pictures, 1)]


class StepFilms:
    """Of the first kept group of some kept steps, the first one among them."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._off = folder, False
        self._last: int | None = None
        """The step that was filmed last; read from the folder, so that a resumed run films the steps it would have."""

    def add(self, report: StepReport, source: RolloutSource, rows: list[dict[str, Any]]) -> None:
        """Have the group's rows name their films. Whatever goes wrong is told once, and then there are none."""
        if self._last is None:
            self._last = max(self._folder.film_steps(), default=0)
        if not isinstance(source, Films) or self._off or not rows or report.step < SELDOM * self._last:
            return
        group = [row for row in rows if row["group"] == rows[0]["group"]]
        stem = self._folder.path / "samples" / f"step-{report.step:08d}"
        try:
            found = source.film(report.experience.rollouts.select([row["row"] for row in group]), stem)
        except Exception as error:  # whatever drawing and encoding may raise: nothing of the run depends on it
            self._off = True
            for left in stem.parent.glob(f"{stem.name}-*"):
                left.unlink()
            self._folder.event(report.step, "no_films", f"nothing is filmed: {error}")
            return
        for row, media in zip(group, found, strict=False):
            if media:
                row["media"], self._last = media, report.step
