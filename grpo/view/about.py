"""What docs/metrics.md says of a metric: its tables as entries, and which entry a name of a run belongs to."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path

from grpo.run.folder import Row

PAGE = Path(__file__).with_name("metrics.md")
"""A link to docs/metrics.md in a checkout; the page itself in an installed package."""
WILD = r"[A-Za-z0-9_.@=+-]+"
"""What stands for a part in capitals: `rewards/NAME/mean`."""


@cache
def entries() -> list[Row]:
    """One for each name, in the order of the page."""
    found, section, header = [], "", True
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            section, header = line.strip() or section, True
        elif header or set(line) <= set("|- "):
            header = False
        else:
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            found += [_entry(name, section, cells) for name in _names(cells[0])]
    return found


@lru_cache(4096)
def key_of(metric: str) -> str | None:
    """The entry that explains a metric, or None."""
    keys = [entry["key"] for entry in entries()]
    return metric if metric in keys else next((key for key in keys if re.fullmatch(_pattern(key), metric)), None)


def _names(cell: str) -> list[str]:
    """`completions/mean_length`, `…/min_length`: what the ellipsis leaves out comes from the name before it."""
    names: list[str] = []
    for name in re.findall(r"`([^`]+)`", cell):
        if name.startswith("…/") and names:
            name = names[0].rpartition("/")[0] + name[1:]
        names.append(name)
    return names


def _entry(name: str, section: str, cells: list[str]) -> Row:
    rest = [None if cell in ("–", "") else cell for cell in [*cells[1:4], "", "", ""][:3]]
    anchor = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    formula, healthy, otherwise = rest
    return {
        "key": name,
        "anchor": anchor,
        "section": section,
        "formula": formula,
        "healthy": healthy,
        "otherwise": otherwise,
    }


def _pattern(key: str) -> str:
    """A word in capitals stands for one part of a name, a letter or @k for a number, an ellipsis for anything."""
    wild = {"@k": r"@\d+", "…": ".+"}
    pieces = re.split(r"(\b[A-Z]+\b|…|@k)", key)

    def matches(piece: str) -> str:
        return wild.get(piece, r"\d+" if len(piece) == 1 else WILD)

    return "".join(matches(piece) if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))
