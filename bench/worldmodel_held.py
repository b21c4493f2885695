"""Whether a pole that is balanced in imagination stays balanced: good looks from the first one on, by settings.

    python bench/worldmodel_learning.py --task cartpole --actors group --name cartpole_held --through --seeds 0 \\
        --set horizon=200 --set groups_per_step=12                              # some seven minutes of one core a seed
    python bench/worldmodel_held.py                                             # the table, into docs/worldmodel.md

Reads bench/results/worldmodel_cartpole_held.json, and of worldmodel_edges.json what the preset as it is comes to. A
look is twenty greedy episodes, good from 475 on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import put_into

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "worldmodel.md"
GOOD, LAST = 475.0, 5
HEADS = ("settings", "seed", "first good look", "good looks from there on", f"of the last {LAST}", "looked at until")


def told(settings: dict[str, str], seed: int, curve: list[tuple[float, float]]) -> str:
    """A row: what was changed, and how the looks were."""
    good = [value >= GOOD for _, value in curve]
    first = good.index(True) if any(good) else len(good)
    texts = [
        ", ".join(f"`{name}={value}`" for name, value in settings.items()) or "the preset `dreamer`",
        str(seed),
        f"{curve[first][0]:,.0f}" if first < len(good) else "never",
        f"{sum(good[first:])} of {len(good[first:])}",
        str(sum(good[-LAST:])),
        f"{curve[-1][0]:,.0f}",
    ]
    return f"| {' | '.join(texts)} |"


def table(edges: list[dict[str, Any]], held: list[dict[str, Any]]) -> str:
    """A row a run: first the preset as it is."""
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    usual = [cell for cell in edges if cell["starts"] == "usual" and not cell["settings"]]
    lines += [told({}, cell["seed"], cell["curve"]) for cell in usual]
    for cell in sorted(held, key=lambda cell: (len(cell["settings"]), list(cell["settings"].items()), cell["seed"])):
        curve = [(look["env_steps"], look["return"]) for look in cell["curve"]]
        lines.append(told(cell["settings"], cell["seed"], curve))
    return "\n".join(lines) + "\n"


def main() -> None:
    edges, held = (
        json.loads((RESULTS / f"worldmodel_{name}.json").read_text(encoding="utf-8"))["cells"]
        for name in ("edges", "cartpole_held")
    )
    put_into(PAGE, Path(__file__).name, table(edges, held))


if __name__ == "__main__":
    main()
