"""Every room's words in one table: a preset or a file may speak any dialect, whatever task it ends in."""

from __future__ import annotations

from grpo.control.dialect import WORDS as CONTROL
from grpo.dialects import COMMON, SYSTEMS, joined
from grpo.language.compat.dialect import WORDS as LANGUAGE
from grpo.run.dialect import RUN
from grpo.worldmodel.dialect import WORDS as WORLDMODEL

EVERY = joined(SYSTEMS, CONTROL, LANGUAGE, WORLDMODEL)
"""By system, beside `COMMON`."""


def table_text() -> str:
    """Every foreign key, its system, what it becomes, and that system's default."""
    rows = [("key", "system", "becomes", "default there")]
    rows += [(s.key, "any", s.becomes, s.default) for s in COMMON]
    rows += [(s.key, "any", ", ".join(f"run.{name.strip()}" for name in s.becomes.split(",")), s.default) for s in RUN]
    for system, some in EVERY.items():
        rows += [(s.key, system, "refused" if s.refused else s.becomes or "always so", s.default) for s in some]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in rows]
    return "\n".join(lines)
