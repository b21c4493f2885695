"""How many samples may fail before a run stops: a share of those of the last hundred steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

WINDOW = 100
"""Steps that are looked back on."""


class FailureBudget:
    """Counts failed samples. The window is judged as if it were full, so that one failure early on is no verdict."""

    def __init__(self, share: float = 0.01) -> None:
        self.share = share
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count what metrics.jsonl says of earlier steps: a resumed run judges like an uninterrupted one."""
        for row in rows:
            self.add(row.get("failed") or 0.0, row.get("samples") or 0.0)

    def add(self, failed: float, samples: float) -> None:
        """One more step."""
        self._steps.append((failed, samples))

    @property
    def failed(self) -> float:
        """Failures in the window."""
        return sum(failed for failed, _ in self._steps)

    @property
    def allowed(self) -> float:
        """Failures the window may hold."""
        samples = sum(samples for _, samples in self._steps)
        return self.share * samples * WINDOW / max(len(self._steps), 1)

    def spent(self) -> bool:
        """Whether more failed than may."""
        return self.failed > self.allowed
