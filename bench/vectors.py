"""Playing alone, a way of stepping environments beside the others: environment steps a CPU second and a second.

    python bench/vectors.py                                   # Hopper and HalfCheetah, 64 streams
    python bench/vectors.py --tasks hopper,pong --streams 64 --workers 14 --rounds 5

A way is a setting of the control room: `serial` (one environment after the other in this process, the default),
`mujoco` (MuJoCo's own threads), `envpool` (its threads), `processes`, `halves` (processes with double_buffer: one
half of the streams steps while the other half's actions are computed). All play windows of `group_by=steps` with the
preset's policy, as training does; nothing is learned. Rounds go from way to way, so that a noisy minute hits all
alike; the first window of each way is not counted. CPU seconds are of this process, its threads and its children.
What a task does not have is left out. Writes bench/results/vectors.json; --table prints what is there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from grpo.app.builders import configs
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.control import make_trainer
from grpo.envs.fleet import EnvError
from grpo.protocols import CollectRequest

PATH = Path(__file__).resolve().parent / "results" / "vectors.json"
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"vector": "serial"},
    "mujoco": {"vector": "mujoco"},
    "envpool": {"vector": "envpool"},
    "processes": {"vector": "processes"},
    "halves": {"vector": "processes", "double_buffer": True},
}
TICK = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Of this process and of its children that are alive."""
    children = [Path(f"/proc/{child.pid}/stat") for child in multiprocessing.active_children()]
    ticks = [stat.read_text().rpartition(")")[2].split()[11:13] for stat in children if stat.exists()]
    return time.process_time() + sum(int(a) + int(b) for a, b in ticks) / TICK


def source_of(task: str, way: str, args: argparse.Namespace) -> Any:
    """A control room that plays this way."""
    changes = WAYS[way] | {"groups_per_step": args.streams, "group_size": args.steps, "seed": 0}
    if WAYS[way]["vector"] == "processes":
        changes["workers"] = args.workers
    return make_trainer(resolve([preset_layer(task), flag_layer(list(changes.items()))], configs()).config).source


def measure(task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Steps a CPU second and a second of each way, round by round."""
    sources, missing = {}, {}
    for way in args.ways.split(","):
        try:
            sources[way] = source_of(task, way, args)
            sources[way].collect(CollectRequest(0))
        except (EnvError, ImportError) as error:
            missing[way] = str(error)
            sources.pop(way, None)
    found: dict[str, list[list[float]]] = {way: [] for way in sources}
    for turn in range(1, args.rounds + 1):
        for way, source in sources.items():
            steps, cpu, wall = source.env_steps, cpu_s(), time.perf_counter()
            for window in range(args.windows):
                source.collect(CollectRequest(turn * args.windows + window))
            made = source.env_steps - steps
            found[way].append([made / (cpu_s() - cpu), made / (time.perf_counter() - wall)])
            print(f"{task} {way}: {found[way][-1][0]:,.0f} a CPU second, {found[way][-1][1]:,.0f} a second", flush=True)
    for source in sources.values():
        source.close()
    names = ("gymnasium", "mujoco", "envpool", "ale-py", "torch", "numpy")
    versions = {name: metadata.version(name) for name in names if _installed(name)}
    return {
        "task": task, "streams": args.streams, "steps": args.steps, "windows": args.windows, "workers": args.workers,
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "machine": platform.machine(), "versions": versions,
        "ways": found, "missing": missing,
    }  # fmt: skip


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: medians with the smallest and the largest of the rounds; ratios of medians with serial."""
    lines = [
        "| task | way | steps a CPU second | ÷ serial | steps a second | ÷ serial |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = [statistics.median(turn[i] for turn in row["ways"]["serial"]) for i in (0, 1)]
        for way, turns in row["ways"].items():
            cells = []
            for i in (0, 1):
                rates = [turn[i] for turn in turns]
                middle = statistics.median(rates)
                cells += [f"{middle:,.0f} ({min(rates):,.0f} – {max(rates):,.0f})", f"{middle / base[i]:.2f}"]
            lines.append(f"| {row['task']}, {row['streams']} streams | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or print what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="hopper,halfcheetah", help="presets that learn from windows of steps")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32, help="of a window")
    parser.add_argument("--windows", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = json.loads(PATH.read_text(encoding="utf-8"))["rows"] if PATH.exists() else []
    if not args.table:
        torch.set_num_threads(1)
        for task in args.tasks.split(","):
            rows = [
                row
                for row in rows
                if (row["task"], row["streams"], row["cores"]) != (task, args.streams, os.cpu_count())
            ]
            rows.append(measure(task, args))
            lines = ",\n".join(map(json.dumps, rows))
            PATH.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
