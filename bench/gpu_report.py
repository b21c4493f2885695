"""Tables and a chart from what `gpu.py` and the benches on the CPU have written."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

Found = dict[str, Any]

MODELS = {
    "smollm": "SmolLM2-135M",
    "qwen06": "Qwen3-0.6B shape",
    "qwen17": "Qwen3-1.7B shape",
    "llama3b": "Llama-3.2-3B shape",
    "qwen4": "Qwen3-4B shape",
    "qwen8": "Qwen3-8B shape",
    "qwen32": "Qwen3-32B shape",
    "tiny": "tiny",
}
STEPS = {"step": "ours", "trl": "TRL, `generate`", "trl_vllm": "TRL, vLLM in its process"}
CONFIGURATIONS = {
    "default": "as it is",
    "ids": "detokenize off",
    "ids_mp": "detokenize off, multiprocessing on",
    "ids_wide": "detokenize off, graphs to 1,024",
    "ids_wide_nologp": "detokenize off, graphs to 1,024, log-probs off",
    "async": "detokenize off, graphs to 1,024, asynchronous scheduling",
    "async_nologp": "detokenize off, graphs to 1,024, asynchronous scheduling, log-probs off",
}
OURS, THEIRS, OTHER = "tab:blue", "tab:orange", "tab:green"
ELSEWHERE = "†"


def rates(found: Found) -> list[float]:
    """Tokens a second of every repeat."""
    return [tokens / seconds for tokens, seconds in zip(found["tokens"], found["seconds"], strict=True)]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The lower one, the median, the upper one."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: list[float], form: str) -> str:
    """The median and, in brackets, the quartiles."""
    low, middle, high = (format(value, form) for value in quartiles(values))
    return f"{middle} ({low} – {high})"


def told(found: Found | None) -> str:
    """A cell in a few words."""
    if found is None:
        return "open"
    if "error" in found:
        return f"failed: {found['error']}"
    if "computed_tokens" in found:
        return f"{spread(found['seconds'], '.3g')} s an update, {100 * matmul_share(found):.0f} % of the matmul rate"
    if "tokens" in found:
        return f"{spread(rates(found), ',.0f')} tokens/s"
    return f"{spread(found['seconds'], '.3g')} s a step"


def good(cells: dict[str, Found], *peers: str) -> dict[str, Found]:
    """The cells of these peers that have figures."""
    return {name: c for name, c in cells.items() if "error" not in c and c["settings"]["peer"] in peers}


def rival(cells: dict[str, Found], ours: str, logprobs: bool = True) -> Found | None:
    """Of vLLM's configurations for the same prompts and tokens, with or without log-probs, the fastest."""
    others = [c for c in good(cells, "vllm").values() if _same(c, cells[ours])]
    others = [c for c in others if c["settings"]["configuration"].get("logprobs", True) == logprobs]
    return max(others, key=lambda c: quartiles(rates(c))[1], default=None)


def _same(one: Found, other: Found) -> bool:
    """Whether two cells were asked for the same."""
    left_out = ("peer", "configuration", "repeats")
    a, b = ({k: v for k, v in c["settings"].items() if k not in left_out} for c in (one, other))
    return a == b


def mark(one: Found, other: Found) -> str:
    """Whether a ratio is of figures from two runs."""
    return "" if one["run"] == other["run"] and one["machine"] == other["machine"] else ELSEWHERE


def rows_of(found: Found) -> str:
    """What was asked for."""
    s = found["settings"]
    ending, adapter = ", rows end" if s["ends"] else "", f", LoRA {s['lora_rank']}" if s.get("lora_rank") else ""
    return f"{s['prompts']} × {s['group']} × {s['tokens']}{ending}{adapter}"


def tables(cells: dict[str, Found]) -> str:
    """Markdown: rollouts, vLLM's configurations, whole steps, what failed, what it was measured on."""
    made = (_rollouts, _vllm, _steps, _updates, _scaling, _failed, _machines)
    text = "\n".join(part for part in (make(cells) for make in made) if part)
    if ELSEWHERE in text:
        text += f"\n{ELSEWHERE} of figures that come from two runs.\n"
    return text or "Not measured.\n"


def _rollouts(cells: dict[str, Found]) -> str:
    ours = good(cells, "ours")
    if not ours:
        return ""
    lines = [
        "| model | prompts × completions × tokens | ours, tokens/s | vLLM's best, tokens/s | ours ÷ vLLM "
        "| its best without log-probs | ours ÷ that | floor ÷ ours | GiB, ours | graphs captured while timed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(ours, key=_place):
        cell = ours[name]
        share = cell["floor_seconds"] / statistics.median(cell["seconds"])
        memory = cell["peak"].get("allocated_gib")
        model = MODELS[cell["settings"]["model"]]
        texts = [model, rows_of(cell), spread(rates(cell), ",.0f")]
        texts += [*_beside(cell, rival(cells, name)), *_beside(cell, rival(cells, name, logprobs=False))]
        texts += [f"{share:.2f}"]
        texts += ["–" if memory is None else f"{memory:.1f}", str(cell["captures_while_timed"])]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _beside(cell: Found, other: Found | None) -> list[str]:
    """What the peer makes and how, and how often that ours is."""
    if other is None:
        return ["–", "–"]
    ratio = f"{quartiles(rates(cell))[1] / quartiles(rates(other))[1]:.2f}{mark(cell, other)}"
    return [f"{spread(rates(other), ',.0f')}: {other['vllm']}, {CONFIGURATIONS[_how(other)]}", ratio]


def _vllm(cells: dict[str, Found]) -> str:
    theirs = good(cells, "vllm")
    if not theirs:
        return ""
    lines = ["| model | prompts × completions × tokens | vLLM | tokens/s |", "|---|---|---|---|"]
    for name in sorted(theirs, key=lambda name: (_place(name), list(CONFIGURATIONS).index(_how(theirs[name])))):
        cell = theirs[name]
        texts = [MODELS[cell["settings"]["model"]], rows_of(cell), f"{cell['vllm']}, {CONFIGURATIONS[_how(cell)]}"]
        lines.append(f"| {' | '.join([*texts, spread(rates(cell), ',.0f')])} |")
    return "\n".join(lines) + "\n"


def _steps(cells: dict[str, Found]) -> str:
    steps = {name: cell for name, cell in good(cells, *STEPS).items() if not name.startswith("scale_")}
    if not steps:
        return ""
    lines = ["| a whole step | seconds | ÷ ours | GiB | tokens of a completion |", "|---|---|---|---|---|"]
    for cell in sorted(steps.values(), key=_model_then_peer):
        ratio = "–"
        mine = (c for c in steps.values() if c["settings"]["peer"] == "step" and _same(c, cell))
        ours = next(mine, None)
        if ours is not None and cell is not ours:
            middle = statistics.median(cell["seconds"]) / statistics.median(ours["seconds"])
            ratio = f"{middle:.2f}{mark(cell, ours)}"
        memory = cell["peak"].get("allocated_gib")
        label = f"{MODELS[cell['settings']['model']]}, {rows_of(cell)}: {STEPS[cell['settings']['peer']]}"
        label += "" if cell["settings"]["repeats"] else ", the first step"
        texts = [label, spread(cell["seconds"], ".3g"), ratio, "–" if memory is None else f"{memory:.1f}"]
        texts.append(f"{statistics.mean(cell['mean_length']):.1f}")
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _model_then_peer(cell: Found) -> tuple[int, int]:
    return list(MODELS).index(cell["settings"]["model"]), list(STEPS).index(cell["settings"]["peer"])


PUBLISHED = {"update_qwen06_65536": (10_100, 19.6), "update_qwen4_lora_65536": (4_160, 42.0)}
"""Tokens a second and GiB that prime-rl publishes for its trainer on one H100 (benchmarks/baselines of its repository);
not measured here."""


def matmul_share(cell: Found) -> float:
    """The operations of an update, none of them counted twice, of what a large product does in the same time."""
    needed = cell.get("operations") or 6 * cell["weights"] * cell["computed_tokens"]
    return float(needed / statistics.median(cell["seconds"]) / cell["ceilings"]["matmul_flops_per_s"])


def _updates(cells: dict[str, Found]) -> str:
    updates = good(cells, "update")
    if not updates:
        return ""
    lines = [
        "| an update | seconds | tokens/s | TFLOP/s | of the matmul rate | passes | GiB | prime-rl publishes (H100) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(updates, key=lambda name: (list(MODELS).index(updates[name]["settings"]["model"]), name)):
        cell = updates[name]
        limit = cell["settings"].get("tokens_per_microbatch")
        label = f"{MODELS[cell['settings']['model']]}, {rows_of(cell)}{f', {limit:,} tokens a pass' if limit else ''}"
        label += "" if cell["settings"]["repeats"] else ", the first one"
        share, memory = matmul_share(cell), cell["peak"].get("allocated_gib")
        texts = [label, spread(cell["seconds"], ".3g")]
        texts += [
            f"{cell['computed_tokens'] / statistics.median(cell['seconds']):,.0f}",
            f"{share * cell['ceilings']['matmul_flops_per_s'] / 1e12:.0f}",
            f"{share:.2f}",
            str(cell["passes"][-1]),
        ]
        texts.append("–" if memory is None else f"{memory:.1f}")
        speed, size = PUBLISHED.get(name, (0, 0.0))
        texts.append(f"{speed:,} tokens/s, {size:.1f} GiB" if speed else "–")
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


AXES = {
    "completions of a prompt": ("scale_group_", ["step_smollm"], lambda c: c["settings"]["group"]),
    "tokens of a completion": ("scale_length_", ["step_smollm"], lambda c: c["settings"]["tokens"]),
    "millions of weights": ("scale_model_", ["step_smollm", "step_qwen17"], lambda c: c["weights"] / 1e6),
}
"""What a step's time is drawn against: cells that vary it, those that lie on the same line, and its value."""


def scaling(cells: dict[str, Found]) -> dict[str, list[tuple[float, float]]]:
    """(value, seconds of a step) along each axis."""
    steps = {name: cell for name, cell in good(cells, "step").items() if "weights" in cell}
    found = {}
    for label, (own, also, value) in AXES.items():
        some = [cell for name, cell in steps.items() if name.startswith(own) or name in also]
        points = {float(value(cell)): statistics.median(cell["seconds"]) for cell in some}
        if len(points) > 2:
            found[label] = sorted(points.items())
    return found


def slope(points: list[tuple[float, float]]) -> float:
    """Of a straight line through the logarithms: 1 where twice as much takes twice as long."""
    x, y = zip(*((math.log(a), math.log(b)) for a, b in points), strict=True)
    return float(statistics.linear_regression(x, y).slope)


def _scaling(cells: dict[str, Found]) -> str:
    lines = ["| a step against | seconds | slope |", "|---|---|---|"]
    for label, points in scaling(cells).items():
        told = ", ".join(f"{value:,.0f}: {seconds:.3g}" for value, seconds in points)
        lines.append(f"| {label} | {told} | {slope(points):.2f} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def scaling_chart(cells: dict[str, Found], path: Path) -> None:
    """Seconds of a step against group size, length and model size, on logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = scaling(cells)
    if not found:
        return
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    row[0].set_ylabel("seconds a step")
    for axes, (label, points) in zip(row, found.items(), strict=True):
        x, y = zip(*points, strict=True)
        axes.loglog(x, y, "o-", color=OURS)
        axes.margins(0.12, 0.15)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xticks(x, [f"{value:,.0f}" for value in x], fontsize=8)
        axes.set_xticks([], minor=True)
        axes.set_xlabel(label)
        axes.set_title(f"slope {slope(points):.2f}", fontsize=9)
        axes.grid(alpha=0.3, which="both")
        for value, seconds in points:
            place = {"ha": "center", "fontsize": 7, "xytext": (0, 5), "textcoords": "offset points"}
            axes.annotate(f"{seconds:.2g} s", (value, seconds), **place)
    figure.savefig(path, dpi=100)


def _failed(cells: dict[str, Found]) -> str:
    lines = [f"- `{name}` failed: {cell['error']}" for name, cell in cells.items() if "error" in cell]
    return "\n".join(lines) + "\n" if lines else ""


def _machines(cells: dict[str, Found]) -> str:
    found = [cell for cell in cells.values() if "error" not in cell]
    if not found:
        return ""
    names = sorted({cell["machine"].get("gpu") or cell["machine"].get("cpu", "") for cell in found})
    versions: dict[str, set[str]] = {}
    for cell in found:
        for name, version in cell["versions"].items():
            versions.setdefault(name, set()).add(version)
    said = ", ".join(f"{name} {' and '.join(sorted(all_of))}" for name, all_of in versions.items())
    repeats = sorted({cell["settings"]["repeats"] or 1 for cell in found})
    sizes = [size for cell in found for size in cell["settings"]["prompt_lengths"]]
    return (
        f"{' and '.join(names)}; {said}. Medians of {' or '.join(map(str, repeats))} after warm-up, with quartiles; "
        f"prompts of {min(sizes)} to {max(sizes)} tokens, {statistics.mean(sizes):.0f} on average.\n"
    )


def cpu_tables(rollouts: Found, steps: Found) -> str:
    """Markdown: rollouts and whole steps on a CPU, as `generation.py` and `cpu_step.py` write them."""
    lines = []
    if rollouts:
        lines += [
            "| prompts × completions × tokens | tokens of a prompt | ours ÷ `generate`, tokens/s |",
            "|---|---|---|",
        ]
        for case in rollouts["cases"]:
            sizes, end = case["prompt_tokens"], ", rows end" if case["rows_end"] else ""
            asked = f"{len(sizes)} × {case['group']} × {case['tokens']}{end}"
            told = str(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
            lines.append(f"| {asked} | {told} | {case['tokens_per_second_ratio']:.2f} |")
        repeats = len(rollouts["cases"][0]["seconds"]["inline"])
        lines += ["", f"{rollouts['threads']} threads, medians of {repeats}.", ""]
    if steps:
        lines += [
            "| a training step of | tokens of a prompt | TRL's time ÷ ours | each round |",
            "|---|---|---|---|",
        ]
        for case in steps["cases"]:
            each = ", ".join(f"{ratio:.2f}" for ratio in case["ratio_each_round"])
            rows = rows_of(case["rounds"]["ours"][0])
            lines.append(f"| {rows} | {case['prompt_tokens']} on average | {case['ratio']:.2f} | {each} |")
        ours, theirs = (steps["cases"][0]["rounds"][side][0] for side in ("ours", "trl"))
        lines += ["", f"TRL {theirs['versions']['trl']}; {ours['machine']['threads']} threads.", ""]
    return "\n".join(lines).rstrip() + "\n" if lines else "Not measured.\n"


def _place(name: str) -> tuple[int, int, bool]:
    """Smaller models first, then fewer rows."""
    words = name.removeprefix("vllm_").split("_")
    return list(MODELS).index(words[0]), int(words[1]), "ending" in words


def _how(cell: Found) -> str:
    return cell["settings"]["configuration"]["name"]


def chart(cells: dict[str, Found], path: Path) -> None:
    """Bars: tokens a second of the rollouts, seconds of a step; whiskers are quartiles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ours = good(cells, "ours")
    steps = {name: c for name, c in good(cells, *STEPS).items() if c["settings"]["model"] in ("smollm", "tiny")}
    steps = {name: c for name, c in steps.items() if not name.startswith("scale_")}
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[2.6, 1])
    names = sorted(ours, key=_place)
    for at, name in enumerate(names):
        pairs = [(-0.2, ours[name], OURS, "ours"), (0.2, rival(cells, name), THEIRS, "vLLM's best configuration")]
        for offset, cell, colour, label in pairs:
            if cell is not None:
                _bar(left, at + offset, [rate / 1e3 for rate in rates(cell)], colour, label)
    left.set_xticks(range(len(names)), [_label(ours[name]) for name in names], fontsize=7)
    left.set_ylabel("thousand tokens a second")
    ordered = sorted(steps.values(), key=lambda c: list(STEPS).index(c["settings"]["peer"]))
    for at, cell in enumerate(ordered):
        colour = {"step": OURS, "trl": OTHER, "trl_vllm": THEIRS}[cell["settings"]["peer"]]
        _bar(right, at, cell["seconds"], colour, "", width=0.6)
    labels = [STEPS[cell["settings"]["peer"]].replace(", ", ",\n").replace("`", "") for cell in ordered]
    right.set_xticks(range(len(ordered)), labels, fontsize=7)
    right.set_ylabel("seconds a step")
    for axes, title in ((left, "Rollout: higher is better"), (right, "Whole step: lower is better")):
        axes.set_title(title, fontsize=9)
        axes.grid(axis="y", alpha=0.3)
    handles, texts = left.get_legend_handles_labels()
    if handles:
        unique = dict(zip(texts, handles, strict=True))
        left.legend(unique.values(), unique.keys(), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _bar(axes: Any, at: float, values: list[float], colour: str, label: str, width: float = 0.38) -> None:
    low, middle, high = quartiles(values)
    axes.bar(at, middle, width, color=colour, label=label, yerr=[[middle - low], [high - middle]], capsize=2)
    text = f"{middle:,.0f}" if middle >= 10 else f"{middle:.2g}"
    axes.annotate(text, (at, high), ha="center", va="bottom", fontsize=7, xytext=(0, 2), textcoords="offset points")


def _label(cell: Found) -> str:
    settings = cell["settings"]
    rows = settings["prompts"] * settings["group"]
    return f"{MODELS[settings['model']].replace(' ', chr(10))}\n{rows:,} rows{', ending' if settings['ends'] else ''}"
