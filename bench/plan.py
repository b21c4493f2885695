"""What `grpo plan` says of a step beside what was measured.

    python bench/plan.py

A cell of `bench/gpu.py` that measures a step or an update of ours writes down what is planned for its settings
(`planned`). Rollouts, and an update whose passes were set, are what the constants of `grpo.language.planning` were
fitted to: they are predicted anew. Of some others an earlier time was known when constants were chosen (`SEEN`). Writes
bench/results/plan.json, which the page on speed is made from.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapes import SHAPES, SMOLLM

from grpo.language.planning import cost
from grpo.language.planning.gpus import GPUS
from grpo.language.planning.plan import plan_step
from grpo.language.planning.shape import ModelShape
from grpo.language.scoring.memory import Rows

RESULTS = Path(__file__).parent / "results"
GPU = GPUS["h200"]
FITTED = ("smollm_256", "smollm_1024", "qwen06_256", "qwen17_256", "qwen17_1024", "llama3b_256", "update_qwen17_lean")
"""Cells that the constants were fitted to."""
SEEN = ("update_qwen06_65536", "step_qwen8_lora", "step_qwen17_4096", "step_qwen17")
"""Cells of which an earlier time, or that of their update, was used for a constant: attention's rate, what an adapter
moves, how fast keys and values are read, what a pass costs."""


def predicted(settings: dict[str, Any]) -> dict[str, float]:
    """Gigabytes that torch hands out at most and seconds, for a cell's settings."""
    setup = setup_of(settings)
    if settings["peer"] == "ours":
        taken = setup.shape.weights * setup.low + sum(cost.sampling_memory(setup).values())
        seconds = cost.prefill_seconds(setup, GPU) + cost.decode_seconds(setup, GPU)
        return {"gib": taken / 2**30, "seconds": seconds}
    plan = plan_step(setup, GPU)
    if settings["peer"] == "update":
        seconds = plan.seconds["gradients"] + plan.seconds["optimizer"]
        return {"gib": sum(plan.gradients.values()) / 2**30, "seconds": seconds}
    return {"gib": plan.peak / 2**30, "seconds": sum(plan.seconds.values())}


def setup_of(settings: dict[str, Any]) -> cost.Setup:
    """What counts of a cell's settings; prompts as long as they are on average."""
    from transformers import AutoConfig

    shape = dict(SHAPES.get(settings["model"], SMOLLM))
    shape.pop("rope_theta", None)
    found = ModelShape.of(AutoConfig.for_model(**shape))
    lengths, rank = settings["prompt_lengths"], settings.get("lora_rank", 0)
    setup = cost.Setup(
        found,
        Rows(settings["prompts"], settings["group"], statistics.mean(lengths), settings["tokens"]),
        wide=2 if rank or settings["peer"] == "ours" else 4,
        adapter=found.lora(rank, "all-linear") if rank else 0,
        graphs=settings["peer"] != "update",
    )
    return replace(setup, set_tokens=settings.get("tokens_per_microbatch"))


def compared(cells: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted beside measured: those that were planned before, then those that the constants were fitted to."""
    rows = []
    for name, cell in cells.items():
        made = cell.get("planned") or (predicted(cell["settings"]) if name in FITTED and "seconds" in cell else None)
        if made is None or "peak" not in cell or "seconds" not in cell:
            continue
        measured = {"gib": cell["peak"]["allocated_gib"], "seconds": statistics.median(cell["seconds"])}
        rows.append(
            {
                "cell": name,
                "settings": cell["settings"],
                "predicted": made,
                "measured": measured,
                "fitted": name in FITTED,
            }
        )
    return sorted(rows, key=lambda row: row["fitted"])


def table(results: dict[str, Any]) -> str:
    """Markdown made from the results file."""
    rows = results.get("rows", [])
    if not rows:
        return "Not measured."
    lines = [
        "| cell | prompts × completions × tokens | GiB, planned and measured | ratio | seconds, the same | ratio | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        asked, planned, found = row["settings"], row["predicted"], row["measured"]
        size = f"{asked['prompts']} × {asked['group']} × {asked['tokens']:,}"
        cells = [f"`{row['cell']}`", size]
        for name, digits in (("gib", 1), ("seconds", 2)):
            cells += [f"{planned[name]:.{digits}f}, {found[name]:.{digits}f}", f"{planned[name] / found[name]:.2f}"]
        lines.append("| " + " | ".join([*cells, _mark(row)]) + " |")
    return "\n".join(lines)


def _mark(row: dict[str, Any]) -> str:
    return "fitted" if row["fitted"] else "seen" if row["cell"] in SEEN else ""


def main() -> None:
    cells = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))["cells"]
    results = {"gpu": GPU.name, "rows": compared(cells)}
    (RESULTS / "plan.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
