"""The page "What it reaches": learning curves and times beside peers, from bench/results alone.

`docs/make_pages.py` asks for the text; `python docs/reaching.py` draws figures/reaches.png, which is committed.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "bench" / "results"
TASKS = ("cartpole", "acrobot", "inverted-pendulum", "pendulum", "frozenlake", "minigrid-empty")
COLOURS = {"ours": "#2166ac", "sb3": "#d6604d", "cleanrl": "#8c6bb1", "tutorial": "#999999"}
WHEN, CONTROL = "2026-11-15", "2026-11-18"
"""The days on which the files that hold no date themselves were committed, and that of control."""

PAGE = """\
# What it reaches

Every figure on this page is made from a file in `bench/results`, each of which a script in `bench/` has written with
machine, versions and seeds. A figure beside a peer was measured on the same machine and the same inputs. Comparisons
that are lost stay.

| | in short | file | machine | seeds | day |
|---|---|---|---|---|---|
{summary}

Versions: {versions}.

## Control

CPU seconds until the mean greedy return on starts that nobody trained on has reached the threshold at two looks in a
row; one thread, medians. Peers have rl-zoo's settings or their own; our presets were tuned for this, on other seeds,
which favours ours.

![greedy return against CPU seconds, a line a seed](figures/reaches.png)

| task | threshold | ours, CPU s | Stable-Baselines3's PPO, CPU s | theirs ÷ ours | environment steps, theirs ÷ ours |
|---|--:|--:|--:|--:|--:|
{control}

A critic saves environment steps: below 1 in the last column PPO needs fewer. Every cell, and the presets themselves:
[Control presets](control_presets.md). MuJoCo's walkers, where windows of steps and a value that is solved for take
PPO's rhythm:

![greedy return of the walkers, a line a seed](figures/walkers.png)

HalfCheetah is faster than PPO in steps and time, Hopper is not in steps: [the whole
table](control.md#the-walkers-of-mujoco). Robots and Pong: [Robots](embodied.md#what-was-measured).

## Language models

| trained | held-out accuracy before | after | seeds | took |
|---|--:|--:|--:|---|
{language}

![reward while training; accuracy before and after](figures/gsm8k.png)

The first row: [a real model that gets better in minutes](gsm8k.md), with its answers before and after. A whole
training step beside TRL 1.16, same model, prompts and lengths:

| a step of | ours | TRL | TRL ÷ ours |
|---|--:|--:|--:|
{steps}

On two CPU cores a step of SmolLM2-135M takes TRL {cpu} of our time. [Speed](speed.md) has rollouts beside vLLM,
updates, memory, and how a step grows with length, group and model.

## World models

Environment steps until twenty greedy episodes of CartPole reach 475, on the same world model:

| actor | environment steps | CPU s |
|---|--:|--:|
{world}

The control room, which has no model to learn, is the other way round: more steps, hardly any time. On the DeepMind
control suite at 20,000 decisions the actor without a critic is ahead on swing-up; with the settings of the preset
`dreamer-dmc` it learns reacher on three seeds of three and ball in cup on four of five:

![greedy and drawn return on the control suite, a line a seed](figures/worldmodel-suite.png)

[World models](worldmodel.md#what-was-measured) has the numbers. Beside DreamerV3 in JAX on one H200, ours makes
{updates} times its updates a second on vectors and {imagined} times its imagined steps, {coarse} times with
`precision=bfloat16`, in which JAX computes: [the table](speed.md#world-models).

## What was not measured

Unsloth, verl, OpenRLHF and other trainers of language models; more than one GPU; Atari beyond Pong; world models
larger than 12m.
"""


def results(name: str) -> dict[str, Any]:
    """What a bench has written."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def page() -> str:
    """The text of the page."""
    cells = results("control")["cells"]
    gpu = results("gpu")["cells"]
    beside = results("worldmodel_jax_gpu")
    speed, coarse = _rates(beside), _rates(beside, "ours_bfloat16")
    cpu = [case["ratio"] for case in results("cpu_step")["cases"]]
    return PAGE.format(
        summary="\n".join(_summary(gpu)),
        versions=_versions(cells, gpu),
        control="\n".join(_control(cells)),
        language="\n".join(_language()),
        steps="\n".join(_steps(gpu)),
        cpu=" and ".join(f"{ratio:.1f} ×" for ratio in cpu),
        world="\n".join(_world()),
        updates=f"{speed['update']:.2f}",
        imagined=f"{speed['imagine']:.2f}",
        coarse=f"{coarse['imagine']:.2f}",
    )


def _seeds(rows: Iterable[dict[str, Any]]) -> str:
    found = sorted({row["seed"] for row in rows})
    whole = len(found) > 2 and found == [*range(found[0], found[-1] + 1)]
    return f"{found[0]} – {found[-1]}" if whole else ", ".join(map(str, found))


def _summary(gpu: dict[str, Any]) -> list[str]:
    control, gsm8k = results("control")["cells"], results("gsm8k")
    smollm, world = results("smollm_arithmetic"), results("worldmodel_cartpole")
    pole = {peer: _median(control, "cartpole", peer, "cpu_s") for peer in ("ours", "sb3")}
    ours, theirs = median(gpu["step_smollm"]["seconds"]), median(gpu["trl_vllm_smollm"]["seconds"])
    gains = [100 * run["gain"] for run in gsm8k["runs"]]
    minutes = max(run["seconds"] for run in gsm8k["runs"]) / 60
    solved = [cell["solved"]["env_steps"] for cell in world["cells"] if cell["actor"] == "group"]
    rows = [
        ("control", f"CartPole in {pole['ours']:.1f} CPU s, PPO {pole['sb3']:.1f}", "control.json", "x86-64, one core",
         _seeds(row for row in control if (row["task"], row["peer"]) == ("cartpole", "ours")), CONTROL),
        ("language, GPU", f"GSM8K +{min(gains):.0f} to +{max(gains):.0f} points in {minutes:.1f} minutes", "gsm8k.json",
         f"one {gsm8k['machine']['gpu']}", _seeds(gsm8k["runs"]), WHEN),
        ("language, speed", f"a step in {ours:.2f} s, TRL with vLLM {theirs:.1f} s", "gpu.json",
         f"one {gpu['step_smollm']['machine']['gpu']}", "–", gpu["step_smollm"]["run"][:10]),
        ("language, CPU", f"sums: +{100 * smollm['gain_mean']:.0f} points in {smollm['runs'][0]['steps']} steps",
         "smollm_arithmetic.json", f"x86-64, {smollm['cores']} cores", _seeds(smollm["runs"]), WHEN),
        ("world model", f"CartPole within {max(solved):,.0f} environment steps", "worldmodel_cartpole.json",
         f"x86-64, {world['machine']['cores']} cores", _seeds(world["cells"]), WHEN),
    ]  # fmt: skip
    return [f"| {room} | {said} | `{file}` | {' | '.join(rest)} |" for room, said, file, *rest in rows]


def _versions(cells: Sequence[dict[str, Any]], gpu: dict[str, Any]) -> str:
    cpu = next(row["versions"] for row in cells if row["peer"] == "sb3")
    both = {"on CPUs": cpu, "on the GPU": gpu["trl_vllm_smollm"]["versions"]}
    return "; ".join(f"{where} " + ", ".join(f"{n} {v}" for n, v in found.items()) for where, found in both.items())


def _median(cells: Sequence[dict[str, Any]], task: str, peer: str, key: str) -> float | None:
    """None where most seeds did not reach the threshold."""
    found = [row for row in cells if (row["task"], row["peer"]) == (task, peer)]
    taken = [row[key] if row["reached"] else float("inf") for row in found]
    middle = median(taken) if taken else float("inf")
    return None if middle == float("inf") else middle


def _control(cells: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for task in TASKS:
        threshold = next(row["threshold"] for row in cells if row["task"] == task)
        times = [_median(cells, task, peer, "cpu_s") for peer in ("ours", "sb3")]
        steps = [_median(cells, task, peer, "env_steps") for peer in ("ours", "sb3")]
        shown = [f"{value:.3g}" if value else "never" for value in times]
        ratios = [f"{b / a:.{places}f}" if a and b else "–" for (a, b), places in ((times, 1), (steps, 2))]
        lines.append(f"| {task} | {threshold} | {' | '.join([*shown, *ratios])} |")
    return lines


def _language() -> list[str]:
    gsm8k, smollm, tiny = results("gsm8k"), results("smollm_arithmetic"), results("tiny_language")

    def row(name: str, before: list[float], after: list[float], took: str) -> str:
        both = (
            f"{min(v):.0%}" if f"{min(v):.0%}" == f"{max(v):.0%}" else f"{min(v):.0%} – {max(v):.0%}"
            for v in (before, after)
        )
        return f"| {name} | {' | '.join(both)} | {len(after)} | {took} |"

    minutes = [run["seconds"] / 60 for run in gsm8k["runs"]]
    cpu = [run["cpu_s"] / 60 for run in smollm["runs"]]
    small = [run["wall_s"] / 60 for run in tiny["runs"]]
    return [
        row("GSM8K: Qwen2.5-Coder-1.5B-Instruct, all weights", [r["before"] for r in gsm8k["runs"]],
            [r["after"] for r in gsm8k["runs"]], f"{min(minutes):.1f} – {max(minutes):.1f} minutes of one H200"),
        row("sums: SmolLM2-135M-Instruct, LoRA (`smollm-arithmetic`)", [r["before"] for r in smollm["runs"]],
            [r["last"] for r in smollm["runs"]], f"{min(cpu):.0f} – {max(cpu):.0f} CPU minutes"),
        row("sorting digits: a transformer from scratch (`tiny-language`)", [r["warm_start"] for r in tiny["runs"]],
            [r["last"] for r in tiny["runs"]], f"{min(small):.1f} – {max(small):.1f} minutes on two cores"),
    ]  # fmt: skip


def _steps(gpu: dict[str, Any]) -> list[str]:
    lines = []
    for model, ours, theirs, how in (
        ("SmolLM2-135M, 32 × 8 × 256", "step_smollm", "trl_vllm_smollm", "with vLLM in its process"),
        ("SmolLM2-135M, 32 × 8 × 256", "step_smollm", "trl_smollm", "with `generate`"),
        ("Qwen3-1.7B's shape, 32 × 8 × 256", "step_qwen17", "trl_qwen17", "with `generate`"),
    ):
        a, b = median(gpu[ours]["seconds"]), median(gpu[theirs]["seconds"])
        lines.append(f"| {model} | {a:.2f} s | {b:.1f} s, {how} | {b / a:.1f} |")
    return lines


def _world() -> list[str]:
    cells, lines = results("worldmodel_cartpole")["cells"], []
    for actor, name in (("group", "group, no critic"), ("bootstrap", "group and a value of the end"),
                        ("critic", "DreamerV3's critic"), ("control", "control room, no model")):  # fmt: skip
        solved = [cell["solved"] for cell in cells if cell["actor"] == actor and cell["solved"]]
        shown = [sorted(found[key] for found in solved) for key in ("env_steps", "cpu_s")]
        lines.append(
            f"| {name} | {', '.join(f'{v:,.0f}' for v in shown[0])} | {', '.join(f'{v:.3g}' for v in shown[1])} |"
        )
    return lines


def _rates(found: dict[str, Any], way: str = "ours") -> dict[str, float]:
    """How many times as much as DreamerV3 in JAX, of the first cell of each operation: medians of the rounds."""
    ratios: dict[str, float] = {}
    for cell in found["cells"]:
        each = [
            (ours["calls"] / ours["wall_s"]) / (theirs["calls"] / theirs["wall_s"])
            for ours, theirs in zip(cell["turns"][way], cell["turns"]["jax"], strict=True)
        ]
        ratios.setdefault(cell["operation"], median(each))
    return ratios


def draw() -> None:
    """A panel a task: greedy return against CPU seconds, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    cells = results("control")["cells"]
    figure, panels = plt.subplots(2, 3, figsize=(10, 5.4), layout="constrained")
    for panel, task in zip(panels.flat, TASKS, strict=True):
        rows = [row for row in cells if row["task"] == task and row["peer"] in COLOURS]
        for row in rows:
            curve = row["curve"]
            panel.plot([p[1] for p in curve], [p[2] for p in curve], color=COLOURS[row["peer"]], alpha=0.8, lw=1.3)
        panel.axhline(rows[0]["threshold"], color="black", lw=0.8, ls=":")
        panel.set(xscale="log", title=task)
        panel.xaxis.set_minor_formatter(NullFormatter())  # a decade would be labelled at every tick
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    names = {
        "ours": "anygrpo",
        "sb3": "Stable-Baselines3 PPO",
        "cleanrl": "CleanRL PPO",
        "tutorial": "a tutorial's GRPO",
    }
    for peer, colour in COLOURS.items():
        panels[0, 0].plot([], [], color=colour, label=names[peer])
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel("CPU seconds, one core")
    figure.supylabel("greedy return")
    figure.savefig(DOCS / "figures" / "reaches.png", dpi=90)


if __name__ == "__main__":
    draw()
